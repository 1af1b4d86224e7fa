"""The registration of resources with a small kubelet, in one process: what it does, and what becomes of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from nodeworkers.device_plugin import registration as module
from nodeworkers.device_plugin import supervisor as supervising
from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.device_plugin.registration import Folders, Status
from nodeworkers.device_plugin.supervisor import Supervisor, remove_stale
from tests.nodeworkers.device_plugin.simulated_devices import GPU, N150, SimulatedDevices, simulated
from tests.nodeworkers.device_plugin.small_kubelet import SmallKubelet


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[SmallKubelet]:
    kubelet = SmallKubelet(tmp_path / "plugins")
    await kubelet.start()
    yield kubelet
    await kubelet.stop()
    assert kubelet.violations == []


@pytest.fixture
def devices() -> SimulatedDevices:
    made = SimulatedDevices()
    made.offer(*simulated(4))
    return made


@asynccontextmanager
async def supervised(
    kubelet: SmallKubelet, devices: SimulatedDevices, folders: Folders | None = None
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(devices, PodResources(kubelet.pod_resources), folders or Folders(kubelet.folder))
    running = asyncio.ensure_future(supervisor.run())
    try:
        yield supervisor
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert sockets((folders or Folders(kubelet.folder)).sockets) == []


def sockets(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("berth-"))


async def until(true: Callable[[], bool], seconds: float = 15) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def of(supervisor: Supervisor, resource: str = N150) -> Status:
    return next(each for each in supervisor.statuses() if each.resource == resource)


async def test_every_resource_is_registered(kubelet: SmallKubelet, devices: SimulatedDevices) -> None:
    devices.offer(*simulated(2, GPU, "GPU"), resource=GPU)
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4, GPU: 2})
        await until(lambda: all(each.serving for each in supervisor.statuses()))
        assert [each.resource for each in supervisor.statuses()] == [GPU, N150]
        status = of(supervisor)
        assert (status.generation, status.registrations, status.error) == (1, 1, "")
        assert status.registered_since is not None and status.stream_seconds is not None
        assert min(kubelet.deadlines) > 15
        assert len(set(sockets(kubelet.folder))) == 2


async def test_one_that_comes_later_is_registered_then_and_one_without_devices_stays(
    kubelet: SmallKubelet, devices: SimulatedDevices
) -> None:
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        devices.offer(*simulated(1, GPU, "GPU"), resource=GPU)
        await kubelet.until({N150: 4, GPU: 1})
        devices.offer()
        await kubelet.until({N150: 0, GPU: 1})
        devices.offer(*simulated(3))
        await kubelet.until({N150: 3, GPU: 1})
        assert {each.registrations for each in supervisor.statuses()} == {1}
        assert kubelet.snapshots == {N150: 3, GPU: 1}


async def test_a_kubelet_that_comes_later_is_told_at_once(tmp_path: Path, devices: SimulatedDevices) -> None:
    kubelet = SmallKubelet(tmp_path / "plugins")
    kubelet.folder.mkdir()
    async with supervised(kubelet, devices) as supervisor:
        await until(lambda: bool(supervisor.statuses()))
        assert of(supervisor) == Status(N150, 0, 0, None, None, "")
        assert sockets(kubelet.folder) == []
        await kubelet.start()
        await kubelet.until({N150: 4}, seconds=5)
    await kubelet.stop()


async def test_a_kubelet_that_starts_anew_is_told_each_time(kubelet: SmallKubelet, devices: SimulatedDevices) -> None:
    async with supervised(kubelet, devices) as supervisor:
        for round in range(20):
            await kubelet.until({N150: 4}, seconds=5)
            await kubelet.restart()
            assert len(kubelet.registered) >= round + 1
        await kubelet.until({N150: 4}, seconds=5)
        await until(lambda: of(supervisor).serving)
        names = [path for path, _ in kubelet.registered]
        assert len(names) == len(set(names)), "a socket's name was used again"
        assert len(sockets(kubelet.folder)) == 1


async def test_one_that_is_away_and_left_its_socket_is_tried_now_and_then(
    kubelet: SmallKubelet, devices: SimulatedDevices
) -> None:
    await kubelet.stop()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(kubelet.folder / "kubelet.sock"))
    stale.close()  # as SIGKILL leaves it
    async with supervised(kubelet, devices) as supervisor:
        await until(lambda: bool(supervisor.statuses()) and "nobody answers on" in of(supervisor).error)
        first = sockets(kubelet.folder)
        await asyncio.sleep(1)  # some attempts later
        assert of(supervisor).generation == 1 and sockets(kubelet.folder) == first
        await kubelet.start()
        await kubelet.until({N150: 4}, seconds=5)
        await until(lambda: of(supervisor).error == "")


async def test_no_pause_is_too_long_for_a_kubelet_that_is_new(
    kubelet: SmallKubelet, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 300.0)
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 300.0)
    kubelet.refuse = "not now"
    async with supervised(kubelet, devices) as supervisor:
        await until(lambda: bool(supervisor.statuses()) and "not now" in of(supervisor).error)
        kubelet.refuse = ""
        await kubelet.restart()
        await kubelet.until({N150: 4}, seconds=5)


async def test_another_kubelet_is_told_although_the_old_one_still_listens(
    kubelet: SmallKubelet, devices: SimulatedDevices
) -> None:
    other = SmallKubelet(kubelet.folder)
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        await other.start(wipe=False)
        await other.until({N150: 4}, seconds=5)
        await until(lambda: of(supervisor).serving and of(supervisor).registrations == 2)
        await other.stop()


async def test_a_socket_that_somebody_removes_is_missed(kubelet: SmallKubelet, devices: SimulatedDevices) -> None:
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        (name,) = sockets(kubelet.folder)
        (kubelet.folder / name).unlink()
        await until(lambda: of(supervisor).registrations == 2 and of(supervisor).serving)
        await kubelet.until({N150: 4})
        assert name not in sockets(kubelet.folder)


async def test_a_kubelet_that_drops_the_stream_gets_another(
    kubelet: SmallKubelet, devices: SimulatedDevices, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        await kubelet._clients[N150].channel.close()
        await until(lambda: of(supervisor).registrations == 2 and of(supervisor).serving)
        await kubelet.until({N150: 4})
        assert f"The kubelet stopped listening to {N150}" in caplog.text


async def test_a_kubelet_that_never_listens_is_told_again(
    kubelet: SmallKubelet, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STREAM_SECONDS", 0.1)
    kubelet.deaf = True
    async with supervised(kubelet, devices) as supervisor:
        await until(lambda: bool(supervisor.statuses()) and of(supervisor).registrations > 1)
        assert not of(supervisor).serving
        monkeypatch.undo()
        kubelet.deaf = False
        await kubelet.until({N150: 4})


async def test_what_ends_late_takes_the_new_one_with_it_and_that_is_mended(
    kubelet: SmallKubelet, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race of kubernetes#121994: with no time between them the kubelet ends the new stream for the old one."""
    monkeypatch.setattr(module, "_SETTLE_SECONDS", 0.0)
    kubelet.slow = 0.1
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        for round in range(4):
            await until(lambda: of(supervisor).serving)
            supervisor._registrations[N150].renew(f"Round {round}.")
            await until(lambda: not of(supervisor).serving)
            await until(lambda: of(supervisor).serving)
        await kubelet.until({N150: 4})


async def test_the_old_stream_ends_before_the_new_one_is_registered(
    kubelet: SmallKubelet, devices: SimulatedDevices
) -> None:
    kubelet.slow = 0.1  # of what is waited for
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        for round in range(5):
            await until(lambda: of(supervisor).serving)
            supervisor._registrations[N150].renew(f"Round {round}.")
            await until(lambda: of(supervisor).registrations == round + 2 and kubelet.ended == round + 1)  # noqa: B023
            await kubelet.until({N150: 4})
        assert of(supervisor).registrations == 6, "the kubelet took an old stream's end for the new one's"


async def test_a_refusal_is_told_and_tried_again(
    kubelet: SmallKubelet, devices: SimulatedDevices, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.refuse = "the ResourceName is invalid"
    async with supervised(kubelet, devices) as supervisor:
        await until(lambda: len(kubelet.deadlines) >= 4)
        assert of(supervisor).error == (
            f"The kubelet did not register {N150}: the ResourceName is invalid (UNKNOWN). It is tried again."
        )
        assert caplog.text.count("is invalid") == 1, "said once, not at each attempt"
        kubelet.refuse = ""
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).error == "")


async def test_a_kubelet_that_hangs_in_register_holds_up_nobody_else(
    kubelet: SmallKubelet, devices: SimulatedDevices
) -> None:
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        kubelet.stuck = True
        devices.offer(*simulated(1, GPU, "GPU"), resource=GPU)
        await until(lambda: len(kubelet.deadlines) == 2)
        devices.sicken(simulated(1)[0].id)
        await kubelet.until({N150: 3})
        kubelet.stuck = False
        await kubelet.restart()
        await kubelet.until({N150: 3, GPU: 1}, seconds=5)
        assert of(supervisor).serving


async def test_a_socket_that_goes_while_it_is_registered_is_not_waited_for(
    kubelet: SmallKubelet, devices: SimulatedDevices
) -> None:
    kubelet.stuck = True
    async with supervised(kubelet, devices):
        await until(lambda: len(kubelet.deadlines) == 1)
        kubelet.stuck = False
        (name,) = sockets(kubelet.folder)
        (kubelet.folder / name).unlink()
        await kubelet.until({N150: 4}, seconds=5)


async def test_what_the_kubelet_does_not_advertise_is_registered_anew(
    kubelet: SmallKubelet, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_AGAIN_SECONDS", 0.05)
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        assert await supervisor.check() == ()
        lost, ghost = simulated(4)[3].id, "ghost"
        kubelet.healthy[N150] = kubelet.healthy[N150] - {lost} | {ghost}
        (sentence,) = await supervisor.check()
        assert f"4 devices of {N150}" in sentence and f"lacks {lost}" in sentence and f"has {ghost}" in sentence
        await until(lambda: of(supervisor).registrations == 2 and of(supervisor).serving)
        await kubelet.until({N150: 4})
        assert await supervisor.check() == ()
        kubelet.healthy[N150] = frozenset((simulated(4)[0].id,))
        (sentence,) = await supervisor.check()
        assert sentence.startswith(f"The kubelet advertises 1 device of {N150}, and 4 devices should be; it lacks ")


async def test_it_looks_by_itself(
    kubelet: SmallKubelet, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(supervising, "_YOUNG_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(supervising, "_YOUNG_SECONDS", 0.0)
    monkeypatch.setattr(supervising, "_AGAIN_SECONDS", 0.05)
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        kubelet.healthy[N150] = frozenset()  # as the race leaves it
        await until(lambda: of(supervisor).registrations >= 2 and of(supervisor).serving)
        await kubelet.until({N150: 4})


async def test_capacity_that_a_race_takes_right_after_a_registration_is_back_within_five_seconds(
    kubelet: SmallKubelet, devices: SimulatedDevices
) -> None:
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        kubelet.healthy[N150] = frozenset()
        await kubelet.until({N150: 4}, seconds=5)


async def test_a_change_under_way_is_no_drift(
    kubelet: SmallKubelet, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_AGAIN_SECONDS", 0.5)
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        kubelet.healthy[N150] = frozenset()  # what is seen at the first look
        looking = asyncio.ensure_future(supervisor.check())
        await asyncio.sleep(0.1)
        devices.sicken(simulated(1)[0].id)  # and this comes to the kubelet before the second
        assert await looking == ()
        assert of(supervisor).registrations == 1


async def test_a_kubelet_that_does_not_say_is_no_drift(kubelet: SmallKubelet, devices: SimulatedDevices) -> None:
    async with supervised(kubelet, devices) as supervisor:
        await kubelet.until({N150: 4})
        await until(lambda: of(supervisor).serving)
        kubelet.pod_resources.unlink()
        assert await supervisor.check() == ()
        assert str(kubelet.pod_resources) in supervisor.unchecked
        assert of(supervisor).registrations == 1


async def test_sockets_of_former_lives_go_and_others_stay(kubelet: SmallKubelet) -> None:
    ours, others = kubelet.folder / "berth-0123456789ab-7.sock", kubelet.folder / "nvidia-gpu.sock"
    served, named = kubelet.folder / "berth-0123456789ab-8.sock", kubelet.folder / "berth-0123456789ab-9.sock"
    alike = kubelet.folder / "berth-tools.sock"
    for path in (ours, others, alike):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    named.write_text("no socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(served))
        listening.listen()
        remove_stale(kubelet.folder)
    assert not ours.exists()
    assert others.exists() and alike.exists() and served.exists() and named.exists()
    remove_stale(kubelet.folder / "absent")


async def test_a_folder_that_is_too_deep_is_told(tmp_path: Path, devices: SimulatedDevices) -> None:
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    # The path of kubelet.sock itself is too long to bind: made where it is short.
    with socket.socket(socket.AF_UNIX) as short:
        os.chdir(folder)
        short.bind("kubelet.sock")
    supervisor = Supervisor(devices, PodResources(tmp_path / "none"), Folders(folder))
    running = asyncio.ensure_future(supervisor.run())
    await until(lambda: bool(supervisor.statuses()) and "too long for a socket" in of(supervisor).error)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


@pytest.fixture
async def watching(tmp_path: Path) -> AsyncIterator[SmallKubelet]:
    kubelet = SmallKubelet(tmp_path / "plugins", tmp_path / "registry")
    (tmp_path / "registry").mkdir()
    await kubelet.start()
    yield kubelet
    await kubelet.stop()
    assert kubelet.violations == []


async def test_a_kubelet_that_watches_finds_it_and_finds_it_again(
    watching: SmallKubelet, devices: SimulatedDevices, tmp_path: Path
) -> None:
    folders = Folders(watching.folder, tmp_path / "registry")
    async with supervised(watching, devices, folders) as supervisor:
        for _ in range(3):
            await watching.until({N150: 4}, seconds=5)
            await until(lambda: of(supervisor).serving)
            await watching.restart()
        await watching.until({N150: 4}, seconds=5)
        assert watching.deadlines == [], "nobody called Register"
        await until(lambda: of(supervisor).serving)
        (name,) = sockets(tmp_path / "registry")
        (tmp_path / "registry" / name).unlink()
        await until(lambda: of(supervisor).serving and sockets(tmp_path / "registry") not in ([], [name]))
        await watching.until({N150: 4})


async def test_a_kubelet_that_watches_and_refuses_is_told_again(
    watching: SmallKubelet, devices: SimulatedDevices, tmp_path: Path
) -> None:
    watching.refuse = "not among the supported versions"
    async with supervised(watching, devices, Folders(watching.folder, tmp_path / "registry")) as supervisor:
        await until(lambda: bool(supervisor.statuses()) and "not among the supp" in of(supervisor).error)
        watching.refuse = ""
        await watching.until({N150: 4})
