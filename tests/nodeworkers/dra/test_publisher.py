"""ResourceSlices follow the devices, whatever the API server and others do meanwhile."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kube.resources import NODES
from nodeworkers.dra import publisher
from nodeworkers.dra.publisher import RESOURCESLICES, pcie_root
from planning.devices.offers import Device
from planning.devices.slices import UNHEALTHY
from tests.kube.fake_api import FakeApi
from tests.kube.fake_objects import Object
from tests.nodeworkers.dra.rig import NODE, Rig, serving, until
from tests.nodeworkers.dra.simulated_devices import SimulatedDevices, simulated_cards, whole

CARDS = simulated_cards(4)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_LEAST_SECONDS", 0.02)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(tmp_path, SimulatedDevices(*whole(CARDS))) as made:
        made.cards = CARDS
        await until(lambda: published(made) == set(CARDS) and made.api.watching, "published and watched")
        yield made


def devices(rig: Rig) -> dict[str, Any]:
    return {
        device["name"]: device
        for body in rig.api.objects(RESOURCESLICES).values() for device in body["spec"]["devices"]
    }  # fmt: skip


def published(rig: Rig) -> set[str]:
    return set(devices(rig))


def writes(rig: Rig) -> int:
    kinds = ("POST", "PATCH", "DELETE")
    return len([1 for method, path, _ in rig.api.requests if method in kinds and "dryRun" not in path])


async def test_slices_follow_the_devices(rig: Rig) -> None:
    ((_, name),) = rig.api.objects(RESOURCESLICES)
    body = rig.api.objects(RESOURCESLICES)["", name]
    assert name == f"{NODE}-devices.kyb.ai-0" and body["spec"]["nodeName"] == NODE
    assert body["metadata"]["ownerReferences"][0]["uid"] == rig.api.objects(NODES)["", NODE]["metadata"]["uid"]
    first = min(CARDS)
    rig.devices.ail(first)
    await until(lambda: devices(rig)[first].get("taints"), "the taint")
    assert devices(rig)[first]["taints"][0] | {"timeAdded": ""} == {
        "key": UNHEALTHY, "value": "HeartbeatStopped", "effect": "NoSchedule", "timeAdded": "",
    }  # fmt: skip
    rig.devices.recover(first)
    await until(lambda: not devices(rig)[first].get("taints"), "the taint goes")
    rig.devices.remove(first)
    await until(lambda: first not in published(rig), "the device goes")
    for each in list(CARDS)[1:]:
        rig.devices.remove(each)
    await until(lambda: not rig.api.objects(RESOURCESLICES), "no devices, no slices")


async def test_what_a_kubelet_deletes_comes_back(rig: Rig) -> None:
    ((_, name),) = rig.api.objects(RESOURCESLICES)
    rig.api.remove(RESOURCESLICES, name)
    await until(lambda: published(rig) == set(CARDS), "published again")


async def test_what_others_write_is_put_right_and_what_is_anothers_is_left_alone(rig: Rig) -> None:
    ((_, name),) = rig.api.objects(RESOURCESLICES)
    spec = rig.api.objects(RESOURCESLICES)["", name]["spec"]
    foreign = {**spec, "driver": "gpu.nvidia.com"}
    elsewhere = {**spec, "nodeName": "node-2"}
    rig.api.put(RESOURCESLICES, "foreign", spec=foreign)
    rig.api.put(RESOURCESLICES, "elsewhere", spec=elsewhere)
    rig.api.put(RESOURCESLICES, f"{NODE}-devices.kyb.ai-7", spec=spec)
    rig.api.put(RESOURCESLICES, name, spec={**spec, "devices": []})
    await until(lambda: sorted(each for _, each in rig.api.objects(RESOURCESLICES)) == [
        "elsewhere", "foreign", name,
    ], "what is stale goes")  # fmt: skip
    await until(
        lambda: len(rig.api.objects(RESOURCESLICES)["", name]["spec"]["devices"]) == len(CARDS), "and is put right"
    )
    assert rig.api.objects(RESOURCESLICES)["", "foreign"]["spec"] == foreign


async def test_an_api_server_that_is_away_is_tried_until_it_is_back(rig: Rig) -> None:
    first = min(CARDS)
    rig.api.fail(count=7, method="PATCH", status=500)
    rig.api.fail("lost", count=1, method="PATCH")
    rig.devices.ail(first)
    await until(lambda: "cannot be published" in rig.driver.publisher.problem, "what is wrong is told")
    await until(lambda: devices(rig)[first].get("taints"), "the taint")
    await until(lambda: rig.driver.publisher.problem == "", "nothing is wrong any more")


async def test_a_restart_writes_nothing_when_nothing_changed(rig: Rig) -> None:
    rig.devices.ail(min(CARDS))
    await until(lambda: devices(rig)[min(CARDS)].get("taints"), "the taint")
    await rig.stop()
    before = writes(rig)
    await rig.start()
    await until(lambda: rig.driver.publisher.published == 1, "looked at")
    assert writes(rig) == before


async def test_a_node_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async with serving(tmp_path, SimulatedDevices(*whole(CARDS))) as rig:
        rig.api.remove(NODES, NODE)
        for key in list(rig.api.objects(RESOURCESLICES)):
            rig.api.remove(RESOURCESLICES, key[1])
        await until(lambda: "not found" in rig.driver.publisher.problem, "what is missing is told")
        rig.api.put(NODES, NODE)
        await until(lambda: published(rig) == set(CARDS), "published")


class WithoutTaints(FakeApi):
    """As an API server whose feature DRADeviceTaints is off: the field is dropped in silence."""

    def _write(self, plural: str, key: tuple[str, str], obj: Object, dry_run: bool = False) -> Object:
        for device in (obj.get("spec") or {}).get("devices") or ():
            device.pop("taints", None)
        return super()._write(plural, key, obj, dry_run)


async def test_where_taints_are_dropped_unhealthy_devices_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.nodeworkers.dra.rig.FakeApi", WithoutTaints)
    first = min(CARDS)
    simulated = SimulatedDevices(*whole(CARDS))
    simulated.ail(first)
    async with serving(tmp_path, simulated) as rig:
        await until(lambda: published(rig) == set(CARDS) - {first}, "the others")
        simulated.recover(first)
        await until(lambda: published(rig) == set(CARDS), "all")


async def test_many_devices_fill_many_slices_of_one_pool(tmp_path: Path) -> None:
    many = [Device(f"tt-{number:04d}", "r/x", ()) for number in range(200)]
    async with serving(tmp_path, SimulatedDevices(*many)) as rig:
        await until(lambda: rig.driver.publisher.published == 4, "published")
        before = writes(rig)
        rig.devices.ail("tt-0100")
        await until(lambda: devices(rig)["tt-0100"].get("taints"), "the taint")
        assert writes(rig) == before + 1
        pools = [body["spec"]["pool"] for body in rig.api.objects(RESOURCESLICES).values()]
        assert pools == [{"name": NODE, "generation": 1, "resourceSliceCount": 4}] * 4


def test_the_root_complex_is_where_the_pci_tree_says(tmp_path: Path) -> None:
    place = tmp_path / "bus/pci/devices"
    place.mkdir(parents=True)
    os.symlink("../../../devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0", place / "0000:3b:00.0")
    os.symlink("../../../devices/platform/0000:3c:00.0", place / "0000:3c:00.0")
    assert pcie_root(tmp_path, "0000:3b:00.0") == "pci0000:3a"
    assert [pcie_root(tmp_path, each) for each in ("0000:3c:00.0", "0000:3d:00.0", "")] == ["", "", ""]
