"""Layers that are ready before a pod asks: what a pod gets is the same, and none is left when there is no more need."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nodeworkers.csi import mounts, spares, uppers
from nodeworkers.csi.driver import Driver, Places
from nodeworkers.csi.spares import SPARES
from nodeworkers.csi.uppers import Uppers
from nodeworkers.ledger import Ledger
from tests.nodeworkers.csi_rig import CACHE, KERNEL, UPPER_BYTES, Rig, needs_mounts, request, rig_in

pytestmark = needs_mounts


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rig_in(tmp_path) as made:
        yield made


async def until(holds: Callable[[], bool], what: str) -> None:
    """Waits for it, for half a minute at most."""
    try:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"it never came to be: {what}") from None


@asynccontextmanager
async def watched(rig: Rig) -> AsyncIterator[Driver]:
    """A driver that keeps spares."""
    ledger = Ledger(rig.folder)
    driver = Driver(Places(rig.kubelet, rig.folder), "node-1", ledger, rig.store, UPPER_BYTES)
    await driver.start()
    watching = asyncio.create_task(driver.watch())
    try:
        yield driver
    finally:
        watching.cancel()
        await driver.stop()
        ledger.close()


@pytest.mark.parametrize("group", [None, 2000])
def test_what_a_pod_gets_does_not_depend_on_whether_its_layer_was_ready(rig: Rig, group: int | None) -> None:
    volumes = rig.open()
    seen = []
    for number, ready in enumerate((True, False)):
        if ready:
            volumes.uppers.add_spare()
        target = rig.target(f"pod-{number}")
        volumes.publish(f"csi-{number}", target, request(f"pod-{number}"), group)
        assert volumes.uppers.spares == 0
        upper, record = volumes.uppers.upper(f"csi-{number}"), volumes.ledger.mount(f"csi-{number}")
        assert record is not None and record.upper == str(upper)
        Path(target, KERNEL, "add.cubin").write_bytes(b"changed")
        assert (upper / KERNEL / "add.cubin").read_bytes() == b"changed"
        had, room = os.stat(target), os.statvfs(target)
        (layer,) = mounts.here([str(upper.parent)])
        (shown,) = mounts.here([target])
        seen.append((
            had.st_mode, had.st_uid, had.st_gid, room.f_blocks, room.f_bavail, layer.kind, layer.options,
            shown.options.replace(f"csi-{number}", "csi"), sorted(os.listdir(target)),
        ))  # fmt: skip
    assert seen[0] == seen[1]
    for number in range(2):
        volumes.unpublish(f"csi-{number}", rig.target(f"pod-{number}"))
    assert rig.left() == []
    volumes.ledger.close()


def test_a_layer_is_that_of_one_volume_however_many_ask_at_once(rig: Rig) -> None:
    volumes = rig.open()
    for _ in range(3):
        volumes.uppers.add_spare()
    wrong: list[BaseException] = []

    def begin(number: int) -> None:
        try:
            target = rig.target(f"pod-{number}")
            volumes.publish(f"csi-{number}", target, request(f"pod-{number}"), None)
            Path(target, "whose").write_text(str(number))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and volumes.uppers.spares == 0
    for number in range(8):
        assert (volumes.uppers.upper(f"csi-{number}") / "whose").read_text() == str(number)
        volumes.unpublish(f"csi-{number}", rig.target(f"pod-{number}"))
    assert rig.left() == []
    volumes.ledger.close()


def test_a_sweep_takes_what_an_earlier_process_had_ready_and_leaves_its_own(rig: Rig) -> None:
    before = rig.open()
    before.uppers.add_spare()
    before.ledger.close()
    after = rig.open()
    after.uppers.add_spare()
    (told,) = after.sweep()
    assert "which nobody has mounted, is gone" in told
    assert after.uppers.spares == 1 and len(rig.mounted()) == 1
    assert after.sweep() == []
    after.uppers.drop_spare()
    after.uppers.drop_spare()
    assert rig.left() == []
    after.ledger.close()


@pytest.mark.parametrize("step", ["_copied", "_attached", "mount"])
def test_a_spare_that_cannot_be_made_leaves_nothing(rig: Rig, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = rig.open()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(mounts if step == "mount" else uppers, step, full)
        with pytest.raises(OSError, match="No space left"):
            volumes.uppers.add_spare()
    assert volumes.uppers.spares == 0 and rig.left() == []
    volumes.ledger.close()


async def test_a_node_keeps_spares_while_a_cache_can_be_had(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_SECONDS", 0.05)
    async with watched(rig) as driver:
        await until(lambda: driver.uppers.spares == SPARES, "all spares")
        assert len(rig.mounted()) == SPARES
        driver.volumes.publish("csi-1", rig.target(), request(), None)
        await until(lambda: driver.uppers.spares == SPARES, "another for the one that was taken")
        driver.volumes.ledger.put_cache(replace(CACHE, state="Removing"))
        await until(lambda: driver.uppers.spares == 0, "no spares")
        driver.volumes.unpublish("csi-1", rig.target())
        assert rig.left() == []
        driver.volumes.ledger.put_cache(CACHE)
        await until(lambda: driver.uppers.spares > 0, "spares again")
    assert rig.left() == [], "a node's process that ends takes its spares along"


async def test_the_kubelets_calls_come_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_SECONDS", 0.05)
    ledger = Ledger(rig.folder)
    driver = Driver(Places(rig.kubelet, rig.folder), "node-1", ledger, rig.store, UPPER_BYTES)
    await driver.start()
    made, early, go_on = 0, 0, threading.Event()
    add = Uppers.add_spare

    def counted(self: Uppers) -> None:
        nonlocal made, early
        early += not go_on.is_set()
        add(self)
        made += 1

    monkeypatch.setattr(Uppers, "add_spare", counted)
    call = asyncio.create_task(driver.node._alone("csi-1", go_on.wait))
    await until(lambda: driver.node.busy, "a call under way")
    watching = asyncio.create_task(driver.watch())
    try:
        for _ in range(3):
            driver.node.calm.set()
            await until(lambda: not driver.node.calm.is_set(), "another look of the spares'")
    finally:
        go_on.set()
    await call
    await until(lambda: made == SPARES, "spares once the call has ended")
    assert early == 0, "a spare was begun while a call was under way"
    watching.cancel()
    await driver.stop()
    ledger.close()
    assert rig.left() == []


async def test_what_goes_wrong_is_said_once_and_pods_are_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spares, "_SECONDS", 0.01)
    tries = 0

    def full(self: Uppers) -> None:
        nonlocal tries
        tries += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Uppers, "add_spare", full)
    async with watched(rig) as driver:
        await until(lambda: tries >= 3, "three attempts")
        driver.volumes.publish("csi-1", rig.target(), request(), None)
        driver.volumes.unpublish("csi-1", rig.target())
    said = [line for line in caplog.messages if "No space left" in line]
    assert len(said) == 1 and "pods wait for theirs to be made" in said[0]
    assert rig.left() == []
