"""Labels of nodes with accelerators: such as the API server takes, such as placement reads, and none untrue."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.accelerators import gpu_model, memory_mib
from planning.devices.cards import Card, Sight
from planning.devices.labels import admitted, changes, labels, owned, value

GPUS = tuple(
    Card(
        f"GPU-{number}", "nvidia", "NVIDIA H100 80GB HBM3", "nvidia.com/gpu", number,
        numa=number // 2, memory_mib=81559, driver="580.65.06",
    )
    for number in range(4)
)  # fmt: skip
MIG = Card("MIG-1", "nvidia", "1g.10gb", "nvidia.com/mig-1g.10gb", 0, memory_mib=9728, parent="GPU-0")
TT = tuple(
    Card(
        f"tt-{number}", "tenstorrent", kind, f"tenstorrent.com/{kind}", number,
        numa=0, memory_mib=memory, driver="2.10.0", firmware="18.12.0.0",
    )
    for number, (kind, memory) in enumerate([("p150a", 32768), ("p150b", 32768), ("n150", 12288)])
)  # fmt: skip
NVIDIA = Sight("nvidia", GPUS, host={"driver": "580.65.06", "cuda": "13.0"})
TENSTORRENT = Sight("tenstorrent", TT, host={"iommu/tt-0": "translated", "iommu/tt-1": "translated"}, simulated=True)


def test_a_node_with_gpus() -> None:
    assert labels([NVIDIA]) == {
        "berth.dev/nvidia.count": "4",
        "berth.dev/nvidia.product": "NVIDIA-H100-80GB-HBM3",
        "berth.dev/nvidia.card.NVIDIA-H100-80GB-HBM3": "4",
        "berth.dev/nvidia.memory": "81559",
        "berth.dev/nvidia.driver": "580.65.06",
        "berth.dev/nvidia.numa": "0_1",
        "berth.dev/nvidia.cuda": "13.0",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.memory": "81559",
    }


def test_a_node_with_cards_that_differ_and_are_simulated() -> None:
    found = labels([TENSTORRENT])
    assert {key: text for key, text in found.items() if key.startswith("berth.dev/")} == {
        "berth.dev/tenstorrent.count": "3",
        "berth.dev/tenstorrent.product": "mixed",
        "berth.dev/tenstorrent.card.p150a": "1",
        "berth.dev/tenstorrent.card.p150b": "1",
        "berth.dev/tenstorrent.card.n150": "1",
        "berth.dev/tenstorrent.memory": "12288",
        "berth.dev/tenstorrent.driver": "2.10.0",
        "berth.dev/tenstorrent.firmware": "18.12.0.0",
        "berth.dev/tenstorrent.iommu": "translated",
        "berth.dev/tenstorrent.numa": "0",
        "berth.dev/tenstorrent.simulated": "true",
    }
    some = Sight("tenstorrent", TT[:2], host={"iommu/tt-0": "translated", "iommu/tt-1": "none"})
    assert labels([some])["berth.dev/tenstorrent.iommu"] == "mixed"


def test_placement_reads_model_and_memory_of_each_resource() -> None:
    found = labels([replace(NVIDIA, cards=(*GPUS, MIG)), TENSTORRENT])
    assert gpu_model(found, "nvidia.com/gpu") == "NVIDIA-H100-80GB-HBM3"
    assert memory_mib(found, "nvidia.com/gpu") == memory_mib(found, "kyb.ai/gpu-2x-seat") == 81559
    assert memory_mib(found, "nvidia.com/mig-1g.10gb") == 9728
    assert memory_mib(found, "tenstorrent.com/n150") == 12288
    aliased = labels([TENSTORRENT], {card.resource: "tenstorrent.com/p150" for card in TT[:2]})
    assert memory_mib(aliased, "tenstorrent.com/p150") == 32768 and "tenstorrent.com/p150a.memory" not in aliased


def test_of_gpus_that_differ_no_model_is_promised_and_the_least_memory() -> None:
    other = replace(GPUS[0], id="GPU-9", product="NVIDIA A100", memory_mib=40960)
    found = labels([replace(NVIDIA, cards=(*GPUS, other))])
    assert "nvidia.com/gpu.product" not in found and found["nvidia.com/gpu.memory"] == "40960"
    unknown = replace(other, memory_mib=0)
    assert "nvidia.com/gpu.memory" not in labels([replace(NVIDIA, cards=(*GPUS, unknown))]), "nobody can promise it"


def test_gpus_of_which_all_are_divided_still_tell_their_model() -> None:
    divided = replace(GPUS[0], resource="")
    found = labels([Sight("nvidia", (divided, MIG))])
    assert found["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3" and found["berth.dev/nvidia.count"] == "1"


def test_what_holds_no_more_is_removed_and_nothing_is_written_twice() -> None:
    before = labels([NVIDIA, TENSTORRENT])
    mine = before.keys()
    assert changes({"kubernetes.io/hostname": "n"}, before, ()) == before
    assert changes(before, before, mine) == {}
    after = labels([NVIDIA])
    removed = changes(before | {"kubernetes.io/hostname": "n"}, after, mine)
    assert set(removed) == set(before) - set(after) and set(removed.values()) == {None}
    assert "tenstorrent.com/n150.memory" in removed


def test_labels_that_somebody_else_set_are_left_to_him() -> None:
    theirs = {"nvidia.com/gpu.product": "NVIDIA-H100-SHARED", "nvidia.com/gpu.memory": "1", "berth.dev/pool": "a"}
    wanted = labels([NVIDIA])
    written = changes(theirs, wanted, ())
    assert not set(theirs) & set(written)
    assert changes(theirs | wanted | theirs, {}, written).keys() == {
        key for key in wanted if key.startswith("berth.dev/")
    }


def test_which_labels_are_berths_the_api_server_remembers() -> None:
    def entry(manager: str, *keys: str) -> dict[str, object]:
        return {"manager": manager, "fieldsV1": {"f:metadata": {"f:labels": {".": {}, **{f"f:{k}": {} for k in keys}}}}}

    managed = [entry("berth-worker", "a.b/c", "d"), entry("nfd", "e"), {"manager": "berth-worker"}, "odd"]
    assert owned({"metadata": {"managedFields": managed}}, "berth-worker") == {"a.b/c", "d"}
    assert owned({"metadata": {}}, "berth-worker") == owned({"metadata": None}, "berth-worker") == frozenset()


def test_a_node_may_ask_for_labels_that_tell_of_accelerators_and_for_no_others() -> None:
    good = labels([replace(NVIDIA, cards=(*GPUS, MIG)), TENSTORRENT])
    bad = {
        "node-role.kubernetes.io/control-plane": "", "kubernetes.io/hostname": "other", "topology.k8s.io/zone": "a",
        "x.kubernetes.io/gpu.memory": "1", "x.k8s.io/gpu.memory": "1", "team": "a", "nvidia.com/gpu.deploy": "x",
        "berth.dev/pool": "a", "berth.dev/nvidia.odd": "no value", "a.b/c.memory": 7, 7: "a", "/": "", ".memory": "1",
    }  # fmt: skip
    assert admitted({**good, **bad}) == good


def test_a_resource_that_is_none_has_no_label() -> None:
    odd = replace(TT[0], resource="Tenstorrent_com/p150a")
    assert all(key.startswith("berth.dev/") for key in labels([Sight("tenstorrent", (odd,))]))


def test_of_no_cards_nothing_is_told() -> None:
    assert labels([Sight("nvidia", host={"driver": "1"}), Sight("tenstorrent")]) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [("Tesla T4", "Tesla-T4"), ("  x ", "x"), ("a" * 70, "a" * 63), ("a" * 62 + "-b", "a" * 62), ("", ""), ("°", "")],
)
def test_values(text: str, told: str) -> None:
    assert value(text) == told


texts = st.text(max_size=80) | st.sampled_from(["n150", "x/y", "a" * 70])
cards = st.builds(
    Card, id=texts, vendor=st.just("nvidia"), product=texts,
    resource=texts | st.sampled_from(["nvidia.com/gpu", f"a.b/{'c' * 60}"]), index=st.integers(0, 9),
    numa=st.none() | st.integers(-1, 9), memory_mib=st.integers(-1, 9), driver=texts, firmware=texts,
    parent=st.sampled_from(["", "GPU-0"]),
)  # fmt: skip


@given(st.lists(cards, max_size=5), st.dictionaries(texts, texts, max_size=3), st.booleans())
def test_whatever_cards_say_the_api_server_takes_the_labels(
    cards: list[Card], host: dict[str, str], simulated: bool
) -> None:
    for key, text in labels([Sight("nvidia", tuple(cards), host=host, simulated=simulated)]).items():
        domain, _, name = key.partition("/")
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", domain)
        assert len(domain) <= 253 and len(name) <= 63 and 0 < len(text) <= 63
        for each in (name, text):
            assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", each)
