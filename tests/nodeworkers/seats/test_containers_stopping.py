"""Exactly these processes are ended, and never one that has their pid: real processes, and a real control group where
the machine lets us make one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeworkers.seats import stopping
from nodeworkers.seats.backend import Process
from nodeworkers.seats.cgroups import Cgroup, CgroupError, of_container, processes
from nodeworkers.seats.processes import started
from nodeworkers.seats.stopping import StoppingError, stop, stop_container

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
# Asked to end, it starts another in its place, as a server with a watcher may.
RISES = """
import signal, subprocess, sys, time
def again(*_):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sys.exit()
signal.signal(signal.SIGTERM, again)
print(1, flush=True)
time.sleep(600)
"""
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[subprocess.Popen[bytes]] = []

    def begin(program: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        return process

    yield begin
    for each in made:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


def known(process: subprocess.Popen[bytes]) -> Process:
    began = started(process.pid)
    assert began is not None
    return Process(process.pid, began)


async def test_a_process_that_obeys_ends_at_once(start: Start) -> None:
    process = start("import time; print(1, flush=True); time.sleep(600)")
    began = time.monotonic()
    assert await stop([known(process)], grace=30) == ()
    assert time.monotonic() - began < 10
    assert process.wait() == -signal.SIGTERM


async def test_one_that_does_not_obey_is_killed_when_its_time_is_over(start: Start) -> None:
    process, other = start(STUBBORN), start(STUBBORN)
    began = time.monotonic()
    assert await stop([known(process)], grace=0.3) == ()
    assert time.monotonic() - began >= 0.3
    assert process.wait() == -signal.SIGKILL
    assert other.poll() is None


async def test_one_that_has_the_pid_by_now_is_left_alone(start: Start) -> None:
    process = start(STUBBORN)
    before = Process(process.pid, known(process).started - 1)
    assert await stop([before], grace=0) == ()
    assert process.poll() is None


async def test_a_pid_that_is_used_again_while_its_handle_is_taken_is_left_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, other = start(STUBBORN), start(STUBBORN)
    take = os.pidfd_open
    # The process ends, and another takes its pid, after it was looked at last and before its handle is there.
    monkeypatch.setattr(os, "pidfd_open", lambda pid: take(other.pid))
    monkeypatch.setattr(stopping, "there", lambda process: False)
    assert await stop([known(process)], grace=0) == ()
    assert process.poll() is None and other.poll() is None


async def test_one_that_ended_before_is_no_trouble(start: Start) -> None:
    process = start("print(1, flush=True)")
    was = Process(process.pid, 1)
    process.wait()
    assert await stop([was], grace=5) == ()
    assert await stop([], grace=5) == ()


async def test_what_a_signal_does_not_end_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(STUBBORN)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda handle, number: None)
    assert await stop([known(process)], grace=0.05, killed=0.05) == (known(process),)


async def test_a_signal_that_is_not_allowed_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(handle: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    process = start(STUBBORN)
    monkeypatch.setattr(signal, "pidfd_send_signal", refuses)
    with pytest.raises(StoppingError, match=f"The process {process.pid} may not be ended by berth"):
        await stop([known(process)], grace=0)


async def test_no_handle_is_left_open(start: Start) -> None:
    process = known(start(STUBBORN))
    before = len(os.listdir("/proc/self/fd"))
    stopped = asyncio.ensure_future(stop([process, Process(1, 0)], grace=30))
    while len(os.listdir("/proc/self/fd")) == before:
        await asyncio.sleep(0.01)
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    assert len(os.listdir("/proc/self/fd")) == before


ID = f"berth-test-{os.getpid()}"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of the machine's own."""
    base = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    folder = base / ID
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield folder
    deadline = time.monotonic() + 10
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
            break
        except OSError:
            assert time.monotonic() < deadline, "the control group of the test does not get empty"
            time.sleep(0.02)


def put(process: subprocess.Popen[bytes], folder: Path) -> Cgroup:
    (folder / "cgroup.procs").write_text(str(process.pid))
    return of_container(process.pid, ID)


async def test_a_container_ends_with_what_it_starts_meanwhile(start: Start, group: Path) -> None:
    process, other = start(RISES), start(STUBBORN)
    cgroup = put(process, group)
    assert cgroup.folder == group and processes(cgroup) == (known(process),)
    assert await stop_container(cgroup, grace=30) == ()
    assert processes(cgroup) == () and other.poll() is None


def test_a_container_that_is_gone_has_nothing_to_end(start: Start, group: Path) -> None:
    process = start(STUBBORN)
    cgroup = put(process, group)
    process.kill()
    process.wait()
    group.rmdir()
    try:
        assert asyncio.run(stop_container(cgroup, grace=5)) == ()
        with pytest.raises(CgroupError, match="is gone"):
            of_container(process.pid, ID)
    finally:
        group.mkdir()
