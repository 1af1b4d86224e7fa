"""Which ResourceSlices a node has, and the least that is written to get there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planning.devices.cards import Card
from planning.devices.offers import Device
from planning.devices.slices import (
    DRIVER,
    PER_SLICE,
    PER_SLICE_WITH_TAINTS,
    UNHEALTHY,
    Stored,
    changes,
    keeps_taints,
    names,
    probe,
    slices,
    stored,
)

UUID = "GPU-8A3F12cd-1111-2222-3333-444455556666"
GPU = Card(
    id=UUID, vendor="nvidia", product="NVIDIA H200", resource="nvidia.com/gpu", index=3, address="0000:3b:00.0",
    numa=1, memory_mib=143360, arch="hopper", driver="570.86.15", firmware="96.00",
)  # fmt: skip
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def devices(count: int, resource: str = "tenstorrent.com/n150") -> tuple[Device, ...]:
    return tuple(Device(f"tt-{number:05d}", resource, (f"tt-{number:05d}",)) for number in range(count))


class Server:
    """The store of an API server: keeps what it is sent and numbers it."""

    def __init__(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.writes = 0

    def settle(self, wanted: list[dict[str, Any]], stop_after: int = 10**9) -> None:
        """Does what `changes` says; `stop_after` writes the process is killed."""
        todo = changes(wanted, [stored(body) for body in self.bodies.values()])
        steps: list[tuple[str, Any]] = [
            *(("delete", each) for each in todo.delete), *(("update", each) for each in todo.update),
            *(("create", each) for each in todo.create),
        ]  # fmt: skip
        for step, each in steps[:stop_after]:
            self.version += 1
            self.writes += 1
            if step == "delete":
                del self.bodies[each.name]
                continue
            name = each["metadata"]["name"]
            assert (name in self.bodies) == (step == "update")
            old: dict[str, Any] = {}
            if step == "update":
                old = self.bodies[name]
                assert each["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]
            metadata = {**old.get("metadata", {}), **each["metadata"], "resourceVersion": str(self.version)}
            body = {**old, **each, "metadata": metadata, "spec": {**old.get("spec", {}), **each["spec"]}}
            body = json.loads(json.dumps(body))
            for device in body["spec"]["devices"]:
                for taint in device.get("taints", ()):
                    taint.setdefault("timeAdded", f"t{self.version}")
            self.bodies[name] = body

    def pool(self) -> tuple[set[int], set[str]]:
        """The generations in the pool, and the devices in it; fails where it is not whole."""
        specs = [body["spec"] for body in self.bodies.values()]
        assert all(spec["pool"]["resourceSliceCount"] == len(specs) for spec in specs)
        return (
            {spec["pool"]["generation"] for spec in specs},
            {device["name"] for spec in specs for device in spec["devices"]},
        )


def device_of(card: Card = GPU, **more: Any) -> dict[str, Any]:
    device = Device(card.id, card.resource, (card.id,), numa=(1,), **more)
    (body,) = slices("node-1", {card.resource: [device]}, {card.id: card}, roots={card.id: "pci0000:3a"})
    (found,) = body["spec"]["devices"]
    assert isinstance(found, dict)
    return found


def test_a_card_says_what_it_is() -> None:
    attributes = {key: next(iter(value.values())) for key, value in device_of()["attributes"].items()}
    assert attributes == {
        "resource": "nvidia.com/gpu", "type": "gpu", "id": UUID, "uuid": UUID, "vendor": "nvidia",
        "product": "NVIDIA H200", "arch": "hopper", "driverVersion": "570.86.15", "firmware": "96.00", "cards": 1,
        "index": 3, "numa": 1, "resource.kubernetes.io/pciBusID": "0000:3b:00.0",
        "resource.kubernetes.io/pcieRoot": "pci0000:3a",
    }  # fmt: skip
    assert device_of()["name"] == UUID.lower()
    assert device_of()["capacity"] == {"memory": {"value": "140Gi"}}
    assert "taints" not in device_of()


def test_what_is_simulated_says_so_and_nothing_else_does() -> None:
    (body,) = slices("node-1", {"a/b": devices(2)}, {}, simulated=True)
    assert [each["attributes"]["simulated"] for each in body["spec"]["devices"]] == [{"bool": True}] * 2
    assert "simulated" not in device_of()["attributes"]


def test_a_tenstorrent_card_has_its_asic_id_and_an_unknown_address_is_not_told() -> None:
    card = replace(GPU, id="tt-0100014511703001", vendor="tenstorrent", address="somewhere", memory_mib=0)
    body = device_of(card)
    assert body["attributes"]["asicID"] == {"string": "0100014511703001"}
    assert "uuid" not in body["attributes"] and "resource.kubernetes.io/pciBusID" not in body["attributes"]
    assert "capacity" not in body


def test_a_seat_says_what_all_its_cards_have_in_common() -> None:
    other = replace(GPU, id="GPU-b", index=4, address="0000:5e:00.0", arch="ada")
    seat = Device("kyb-pair0-s1", "kyb.ai/gpu-2x-seat", (GPU.id, other.id), group="pair0", numa=(0, 1))
    (body,) = slices("node-1", {seat.resource: [seat]}, {GPU.id: GPU, other.id: other})
    (found,) = body["spec"]["devices"]
    attributes = {key: next(iter(value.values())) for key, value in found["attributes"].items()}
    assert attributes == {
        "resource": "kyb.ai/gpu-2x-seat", "type": "gpu-2x-seat", "id": "kyb-pair0-s1", "group": "pair0", "cards": 2,
        "vendor": "nvidia", "product": "NVIDIA H200", "driverVersion": "570.86.15", "firmware": "96.00",
    }  # fmt: skip
    assert found["capacity"] == {"memory": {"value": "280Gi"}}


def test_a_device_whose_cards_nobody_knows_is_told_all_the_same() -> None:
    (body,) = slices("node-1", {"r/x": [Device("x-1", "r/x", ("gone",))]}, {})
    assert body["spec"]["devices"] == [
        {
            "name": "x-1",
            "attributes": {
                "resource": {"string": "r/x"}, "type": {"string": "x"}, "id": {"string": "x-1"}, "cards": {"int": 1},
            },
        }
    ]  # fmt: skip


def test_an_unhealthy_device_has_a_taint_with_the_reason_or_is_left_out() -> None:
    ill = replace(devices(2)[0], healthy=False, reason="Double bit/ECC" + "x" * 80)
    offered = {"tenstorrent.com/n150": [ill, devices(2)[1]]}
    (with_taints,) = slices("n", offered, {})
    (taint,) = with_taints["spec"]["devices"][0]["taints"]
    assert taint["key"] == UNHEALTHY and taint["effect"] == "NoSchedule"
    assert taint["value"].startswith("Double-bit-ECCxxx") and len(taint["value"]) == 63
    (without,) = slices("n", offered, {}, taints=False)
    assert [each["name"] for each in without["spec"]["devices"]] == ["tt-00001"]
    assert slices("n", {"r/x": [replace(ill, reason="--")]}, {})[0]["spec"]["devices"][0]["taints"][0]["value"] == (
        "Unhealthy"
    )


def test_ten_thousand_devices_stand_in_slices_of_the_size_that_fits() -> None:
    offered = {"tenstorrent.com/n150": devices(10_000)}
    assert (PER_SLICE, PER_SLICE_WITH_TAINTS) == (128, 64)
    assert len(slices("n", offered, {})) == 157
    assert len(slices("n", offered, {}, taints=False)) == 79
    assert slices("n", {"r/x": []}, {}) == []


def test_one_cards_trouble_is_one_write_and_the_time_of_its_taint_stays() -> None:
    server, cards = Server(), devices(300)
    server.settle(slices("n", {"r/x": cards}, {}))
    assert server.pool()[0] == {1} and server.writes == 5
    ill = [replace(each, healthy=each.id != "tt-00100", reason="Lost") for each in cards]
    server.settle(slices("n", {"r/x": ill}, {}))
    assert server.pool()[0] == {1} and server.writes == 6
    came = server.version
    worse = [replace(each, healthy=each.id not in ("tt-00100", "tt-00101"), reason="Lost") for each in cards]
    server.settle(slices("n", {"r/x": worse}, {}))
    assert server.writes == 7
    taints = {
        device["name"]: device["taints"][0]["timeAdded"]
        for body in server.bodies.values() for device in body["spec"]["devices"] if "taints" in device
    }  # fmt: skip
    assert taints == {"tt-00100": f"t{came}", "tt-00101": f"t{came + 1}"}
    server.settle(slices("n", {"r/x": worse}, {}))
    assert server.writes == 7, "nothing changed, nothing is written"


def test_what_takes_more_than_one_write_is_a_new_generation_of_all() -> None:
    server = Server()
    server.settle(slices("n", {"r/x": devices(129)}, {}))
    server.settle(slices("n", {"r/x": devices(193)}, {}))
    generations, found = server.pool()
    assert generations == {2} and len(found) == 193 and server.writes == 3 + 4
    server.settle(slices("n", {"r/x": devices(64)}, {}))
    assert server.pool()[1] == {each.id for each in devices(64)}
    server.settle([])
    assert server.bodies == {}


def test_trouble_in_two_slices_is_never_seen_by_half() -> None:
    server, cards = Server(), devices(200)
    server.settle(slices("n", {"r/x": cards}, {}))
    ill = [replace(each, healthy=each.id not in ("tt-00000", "tt-00199"), reason="Lost") for each in cards]
    server.settle(slices("n", {"r/x": ill}, {}))
    assert server.pool()[0] == {2} and server.writes == 4 + 4


def test_a_node_that_was_made_anew_owns_its_slices() -> None:
    server = Server()
    for owner in ("uid-1", "uid-2"):
        server.settle(slices("n", {"r/x": devices(1)}, {}, owner=owner))
        (body,) = server.bodies.values()
        assert [each["uid"] for each in body["metadata"]["ownerReferences"]] == [owner]


def test_long_node_names_make_names_that_are_allowed() -> None:
    node = ".".join(["a" * 62] * 4)
    made = [body["metadata"]["name"] for body in slices(node, {"r/x": devices(200)}, {})]
    assert len(set(made)) == 4 and all(len(name) <= 253 for name in made)
    assert len(probe(node)["metadata"]["name"]) <= 253
    assert slices("n", {"r/x": devices(1)}, {})[0]["metadata"]["name"] == f"n-{DRIVER}-0"


def test_a_server_that_drops_taints_is_recognized() -> None:
    body = probe("n")
    assert keeps_taints(body)
    del body["spec"]["devices"][0]["taints"]
    assert not keeps_taints(body) and not keeps_taints({})


ids = st.text("AaBbZz019._-", min_size=1, max_size=63)


@given(st.sets(ids, max_size=30))
def test_names_are_labels_that_lead_back_to_one_device(found: set[str]) -> None:
    called = names(found)
    assert called == names(sorted(found, reverse=True))
    assert set(called) == found and len(set(called.values())) == len(found)
    for each, name in called.items():
        assert LABEL.fullmatch(name)
        assert name == each or not LABEL.fullmatch(each)


def test_a_name_does_not_depend_on_another_unless_they_would_meet() -> None:
    assert names([UUID]) == {UUID: UUID.lower()}
    assert names(["a.b", "a-b"])["a-b"] == "a-b"
    assert re.fullmatch(r"a-b-[0-9a-f]{10}", names(["a.b", "a-b"])["a.b"])
    assert re.fullmatch(r"[0-9a-f]{10}", names(["..."])["..."])


state = st.dictionaries(
    st.sampled_from(["r/x", "r/y"]),
    st.lists(st.tuples(st.integers(0, 150), st.booleans()), max_size=140, unique_by=lambda pair: pair[0]),
)


def offer(found: dict[str, list[tuple[int, bool]]]) -> dict[str, list[Device]]:
    return {
        resource: [
            Device(f"{resource[-1]}-{number}", resource, (), healthy=well, reason="Lost") for number, well in pairs
        ]
        for resource, pairs in found.items()
    }


@given(st.lists(st.tuples(state, st.booleans(), st.integers(0, 3)), min_size=1, max_size=5))
def test_whatever_happens_and_wherever_it_is_killed_the_pool_ends_whole(
    story: list[tuple[dict[str, list[tuple[int, bool]]], bool, int]],
) -> None:
    server, last = Server(), 0
    for found, taints, killed_after in story:
        wanted = slices("n", offer(found), {}, taints=taints)
        server.settle(wanted, stop_after=killed_after)
        server.settle(wanted)
        generations, there = server.pool()
        told = [device for devices in offer(found).values() for device in devices if taints or device.healthy]
        assert there == set(names(device.id for device in told).values())
        if wanted:
            (generation,) = generations
            assert generation >= last or not server.bodies
            last = generation
        before = server.writes
        server.settle(wanted)
        assert server.writes == before
        limit = PER_SLICE_WITH_TAINTS if taints else PER_SLICE
        assert all(len(body["spec"]["devices"]) <= limit for body in server.bodies.values())


def test_attributes_and_texts_stay_within_the_limits() -> None:
    card = replace(GPU, product="ü" * 100, driver="x" * 100)
    attributes = device_of(card)["attributes"]
    assert len(attributes) + 1 <= 32
    assert all(len(value["string"].encode()) <= 64 for value in attributes.values() if "string" in value)
    assert attributes["product"] == {"string": "ü" * 32}


def test_slices_of_another_generation_are_written_anew() -> None:
    wanted = slices("n", {"r/x": devices(65)}, {})
    digest = stored({**wanted[0], "metadata": {**wanted[0]["metadata"], "resourceVersion": "1"}}).digest
    half = [Stored(wanted[0]["metadata"]["name"], 5, 7, 2, digest), Stored(wanted[1]["metadata"]["name"], 6, 6, 2, "")]
    (update,) = changes(wanted, half).update
    assert update["metadata"]["resourceVersion"] == "6" and update["spec"]["pool"]["generation"] == 7
