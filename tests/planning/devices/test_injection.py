"""What a container gets: names that stay, nodes of its own cards alone, and CUDA's needs; else a sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.devices import cdi
from planning.devices.cards import Card
from planning.devices.cdi import DriverFiles
from planning.devices.injection import allocated, pages_lacking
from planning.devices.offers import Device, Injection, Mount, Node, Refused

N150, GPU, SEAT = "tenstorrent.com/n150", "nvidia.com/gpu", "kyb.ai/gpu-2x-seat"
LINK = "/dev/tenstorrent/by-id/wormhole-0"
TT = [
    Card(f"tt-0{n}", "tenstorrent", "n150", N150, n, f"0000:c{n}:00.0", nodes=(f"{LINK}{n}",)) for n in range(3)
]  # fmt: skip
GPUS = [Card(f"GPU-{n}", "nvidia", "H100", GPU, n, nodes=(f"/m/dev/nvidia{n}",)) for n in range(4)]
MIG = Card(
    "MIG-1", "nvidia", "1g", "nvidia.com/mig-1g.10gb", 3, nodes=("/m/dev/nvidia-caps/nvidia-cap1",), parent="GPU-3"
)
FILES = DriverFiles(("/m/dev/nvidiactl", "/m/dev/nvidia-uvm"), (("/host/libcuda.so.1", "/usr/lib/libcuda.so.1"),))
CARDS = {card.id: card for card in [*TT, *GPUS, MIG]}
ODD = [Card("tt-bare", "tenstorrent", "n150", N150, 9), Card("amd-0", "amd", "x", "amd.com/gpu", 0, nodes=("/dev/x",))]
DEVICES = {
    device.id: device
    for device in [
        *(Device(card.id, card.resource, (card.id,)) for card in CARDS.values()),
        *(Device(f"GPU-3-r{n}", GPU, ("GPU-3",)) for n in range(2)),
        *(Device(f"kyb-G10-s{n}", SEAT, ("GPU-1", "GPU-0"), group="G10") for n in (1, 2)),
        Device("ill", N150, ("tt-00",), healthy=False, reason="Detached", message="Its driver has let go of it."),
        Device("gone", N150, ("tt-99",)),
        Device("bare", N150, ("tt-bare",)),
        Device("both", N150, ("tt-00", "GPU-0")),
        Device("amd", "amd.com/gpu", ("amd-0",)),
        Device("empty", "amd.com/gpu", ()),
    ]
}


def given_(*asked: str, resource: str, with_cdi: bool = True, host: dict[str, str] | None = None) -> Injection:
    cards = CARDS | {card.id: card for card in ODD}
    return allocated(asked, resource, DEVICES, cards, host or {}, FILES, with_cdi=with_cdi)


def test_tenstorrents_cards_are_named_by_their_whole_addresses() -> None:
    found = given_("tt-02", "tt-00", resource=N150)
    assert found.env == {"TT_VISIBLE_DEVICES": "0000:c0:00.0,0000:c2:00.0"}
    assert found.cdi == ("berth.dev/tenstorrent=tt-02", "berth.dev/tenstorrent=tt-00") and found.nodes == ()
    plain = given_("tt-02", resource=N150, with_cdi=False)
    assert plain.nodes == (Node("/dev/tenstorrent/by-id/wormhole-02", "/dev/tenstorrent/2"),) and plain.cdi == ()


def test_pages_of_a_gigabyte_are_mounted_where_no_iommu_translates() -> None:
    pages = (Mount("/dev/hugepages-1G", "/dev/hugepages-1G", read_only=False),)
    assert given_("tt-00", resource=N150).mounts == pages, "nobody tells"
    modes = {"iommu/tt-00": "translated", "iommu/tt-01": "passthrough"}
    assert given_("tt-00", resource=N150, host=modes).mounts == ()
    assert given_("tt-00", "tt-01", resource=N150, host=modes).mounts == pages
    none = {"iommu/tt-00": "none", "hugepages-1g/total": "0", "hugepages-1g/free": "0"}
    assert given_("tt-00", resource=N150, host=none).mounts == (), "a mount of nothing keeps a container from starting"
    assert "need 4 free pages" in pages_lacking(TT[:1], none)
    assert "need 4 free pages" in pages_lacking(TT[:2], {**modes, "hugepages-1g/free": "3"})
    assert pages_lacking(TT[:2], {**modes, "hugepages-1g/free": "4"}) == pages_lacking(TT, {}) == ""


def test_a_gpu_comes_with_what_cuda_needs() -> None:
    assert given_("GPU-2", resource=GPU) == Injection(
        {"NVIDIA_VISIBLE_DEVICES": "void"}, cdi=("berth.dev/nvidia=GPU-2",)
    )
    plain = given_("GPU-2", resource=GPU, with_cdi=False)
    assert [node.container for node in plain.nodes] == ["/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert plain.env == {"NVIDIA_VISIBLE_DEVICES": "GPU-2"} and plain.mounts[0].container == "/usr/lib/libcuda.so.1"


def test_a_seat_says_which_it_is_and_on_which_gpus() -> None:
    found = given_("kyb-G10-s2", resource=SEAT)
    assert found.env == {
        "NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1", "KYB_GPU_GROUP": "G10",
        "KYB_GPU_INDICES": "0,1", "KYB_GPU_SEAT": "kyb-G10-s2",
    }  # fmt: skip
    assert sorted(found.cdi) == ["berth.dev/nvidia=GPU-0", "berth.dev/nvidia=GPU-1"]


@pytest.mark.parametrize(
    ("asked", "resource", "why"),
    [
        (("ill",), N150, "ill is not available (Detached): Its driver has let go of it."),
        (("nobody",), N150, "This node offers no tenstorrent.com/n150 called nobody."),
        (("GPU-0",), N150, "This node offers no tenstorrent.com/n150 called GPU-0."),
        (("gone",), N150, "The cards of gone are not on this node any more"),
        (("kyb-G10-s1", "kyb-G10-s2"), SEAT, "A container has one seat, and 2 of kyb.ai/gpu-2x-seat were asked for"),
        (("bare",), N150, "tt-bare has no device node on this node"),
        (("both",), N150, "It is unknown what a container needs for tenstorrent.com/n150 of nvidia and tenstorrent."),
        (("amd",), "amd.com/gpu", "It is unknown what a container needs for amd.com/gpu of amd."),
        (("empty",), "amd.com/gpu", "It is unknown what a container needs for amd.com/gpu of nobody."),
        ((), N150, "No device of tenstorrent.com/n150 was asked for"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_sentence(asked: tuple[str, ...], resource: str, why: str) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(why)}"):
        given_(*asked, resource=resource)


def test_two_shares_of_a_gpu_are_that_gpu_once() -> None:
    assert given_("GPU-3-r0", "GPU-3-r1", resource=GPU).cdi == ("berth.dev/nvidia=GPU-3",)


def test_an_instance_comes_with_the_node_of_its_gpu() -> None:
    plain = given_("MIG-1", resource="nvidia.com/mig-1g.10gb", with_cdi=False)
    assert [node.container for node in plain.nodes][:2] == ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap1"]


NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


def follows_the_specification(kind: str, document: dict[str, Any]) -> None:
    """SPEC.md of cncf-tags/container-device-interface, and what its Go library refuses beside."""
    assert set(document) <= {"cdiVersion", "kind", "annotations", "devices", "containerEdits"}
    assert re.fullmatch(r"0\.[3-8]\.0", document["cdiVersion"])
    assert document["kind"] == kind
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]/[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]", kind)
    called = [device["name"] for device in document["devices"]]
    assert called and len({*called}) == len(called) and all(NAME.fullmatch(each) for each in called)
    for device in document["devices"]:
        assert set(device) == {"name", "containerEdits"} and device["containerEdits"]
        follows_in_edits(device["containerEdits"])
    follows_in_edits(document.get("containerEdits", {}))


def follows_in_edits(edits: dict[str, Any]) -> None:
    assert set(edits) <= {"env", "deviceNodes", "mounts", "hooks"} and all(edits.values())
    assert all(re.fullmatch("[^=]+=.*", each) for each in edits.get("env", []))
    for node in edits.get("deviceNodes", []):
        assert {"path", "hostPath"} <= set(node) <= {"path", "hostPath", "permissions"}, "hostPath is of 0.5.0"
        assert node["path"].startswith("/dev/") and node["hostPath"].startswith("/")
        assert re.fullmatch("r?w?m?", node.get("permissions", "rwm"))
    for mount in edits.get("mounts", []):
        assert set(mount) <= {"hostPath", "containerPath", "options", "type"}
        assert mount["hostPath"].startswith("/") and mount["containerPath"].startswith("/")
    for hook in edits.get("hooks", []):
        assert hook["hookName"] in {"prestart", "createRuntime", "createContainer", "startContainer", "poststart"}
        assert hook["path"].startswith("/") and all(isinstance(each, str) for each in hook["args"])


def names(document: dict[str, Any]) -> dict[str, list[str]]:
    return {
        each["name"]: [node["path"] for node in each["containerEdits"]["deviceNodes"]] for each in document["devices"]
    }


def test_the_documents_have_a_device_for_each_card_and_are_of_the_specification() -> None:
    found = cdi.documents(CARDS.values(), FILES)
    assert names(found["berth.dev/tenstorrent"]) == {f"tt-0{n}": [f"/dev/tenstorrent/{n}"] for n in range(3)}
    assert names(found["berth.dev/nvidia"])["MIG-1"] == ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap1"]
    edits = found["berth.dev/nvidia"]["containerEdits"]
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidia-uvm", "/dev/nvidiactl"]
    assert edits["mounts"][0] == {
        "hostPath": "/host/libcuda.so.1", "containerPath": "/usr/lib/libcuda.so.1",
        "options": ["ro", "nosuid", "nodev", "bind"],
    }  # fmt: skip
    for kind, document in found.items():
        assert document["cdiVersion"] == "0.6.0"
        follows_the_specification(kind, document)


def test_a_containers_loader_is_told_of_the_libraries_where_the_host_can() -> None:
    gpus, both = [GPUS[0]], (*FILES.libraries, ("/host/nvidia-smi", "/usr/bin/nvidia-smi"))
    for hook, first in (("/usr/bin/nvidia-cdi-hook", ["nvidia-cdi-hook"]), ("/x/nvidia-ctk", ["nvidia-ctk", "hook"])):
        document = cdi.documents(gpus, DriverFiles(FILES.nodes, both, hook))["berth.dev/nvidia"]
        follows_the_specification("berth.dev/nvidia", document)
        assert document["containerEdits"]["hooks"] == [
            {"hookName": "createContainer", "path": hook, "args": [*first, "update-ldcache", "--folder", "/usr/lib"]}
        ]
    assert "hooks" not in cdi.documents(gpus, FILES)["berth.dev/nvidia"]["containerEdits"]
    assert "hooks" not in cdi.documents(gpus, DriverFiles(hook="/x/nvidia-ctk"))["berth.dev/nvidia"]["containerEdits"]


def test_a_name_leads_to_its_card_when_the_kernel_counts_anew() -> None:
    moved = Card("tt-00", "tenstorrent", "n150", N150, 5, nodes=("/dev/tenstorrent/by-id/wormhole-00",))
    document = cdi.documents([moved])["berth.dev/tenstorrent"]
    assert document["devices"][0]["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/tenstorrent/5", "hostPath": "/dev/tenstorrent/5", "permissions": "rw"}
    ]


@given(st.permutations(list(CARDS.values())))
def test_the_order_of_cards_makes_no_other_documents(cards: list[Card]) -> None:
    assert cdi.documents(cards, FILES) == cdi.documents(CARDS.values(), FILES)


def test_a_card_without_a_node_is_in_none() -> None:
    assert cdi.documents([Card("tt-1", "tenstorrent", "n150", N150, 0)]) == {}


odd = st.builds(
    Card, id=st.text("Gt0.-_: /=", max_size=8), vendor=st.sampled_from(["nvidia", "tenstorrent"]), product=st.just("x"),
    resource=st.just(""), index=st.integers(0, 99), parent=st.sampled_from(["", "G", "t0"]),
    nodes=st.lists(st.sampled_from(["/dev/nvidia0", "/dev/tenstorrent/by-id/wormhole-0"]), max_size=2).map(tuple),
)  # fmt: skip


@given(st.lists(odd, max_size=8))
def test_one_odd_card_takes_no_others_away(cards: list[Card]) -> None:
    found = cdi.documents(cards, FILES)
    for kind, document in found.items():
        follows_the_specification(kind, document)
    listed = {device["name"] for document in found.values() for device in document["devices"]}
    sound = {card.id: card for card in cards if NAME.fullmatch(card.id)}
    assert {name for name, card in sound.items() if card.nodes} <= listed <= set(sound)
