"""The watcher process: a line for each look, whatever its vendor's driver does, and no life without its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodeworkers.hardware import watcher
from nodeworkers.hardware.wire import decode
from planning.devices.cards import Sight

DEADLINE = 30.0
PRELUDE = """
import ctypes, os, sys, time
from nodeworkers.hardware import watcher
from nodeworkers.hardware.provider import HardwareError
from planning.devices.cards import Card, Sight

class Source:
    vendor = "nvidia"
    looks = 0
    def look(self):
        self.looks += 1
        return Sight("nvidia", (Card("GPU-1", "nvidia", "T4", "nvidia.com/gpu", self.looks),))
    def wait(self, seconds):
        time.sleep(0.01)
    def close(self):
        print("closed", file=sys.stderr, flush=True)

sys.modules["made"] = sys.modules["__main__"]
watcher.SOURCES["nvidia"] = "made:Source"
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
        code = f"{PRELUDE}\n{code}\nwatcher.main(['nvidia', *sys.argv[1:]])"
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def _look(child: subprocess.Popen[bytes]) -> Sight:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.stderr.read() if child.stderr else b""
    return decode(line, "nvidia")


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_look_is_a_line_and_there_are_not_too_many(start: Start) -> None:
    child = start("")
    began = time.monotonic()
    assert [_look(child).cards[0].index for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert time.monotonic() - began >= 4 * watcher.SHORTEST_SECONDS, "a source with much news is not asked endlessly"


def test_it_ends_when_asked_and_lets_go_of_the_driver(start: Start) -> None:
    child = start("")
    _look(child)
    child.terminate()
    _, words = child.communicate(timeout=DEADLINE)
    assert (child.returncode, words) == (0, b"closed\n")


def test_it_ends_when_nobody_listens(start: Start) -> None:
    child = start("")
    _look(child)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.wait(DEADLINE) == 0
    assert child.stderr.read() == b"closed\n"


def test_what_a_driver_prints_is_not_mixed_with_what_is_said(start: Start) -> None:
    child = start(
        """
look = Source.look
def noisy(self):
    print("hello from Python", flush=True)
    libc = ctypes.CDLL(None)
    libc.puts(b"hello from C"); libc.fflush(None)
    return look(self)
Source.look = noisy
"""
    )
    assert _look(child).cards and _look(child).cards
    child.terminate()
    assert b"hello from C" in child.communicate(timeout=DEADLINE)[1]


def test_a_driver_that_fails_is_a_sentence_and_looked_at_again(start: Start) -> None:
    child = start(
        r"""
look = Source.look
def failing(self):
    seen = look(self)
    if self.looks == 1:
        raise HardwareError("The driver \ud800 is not loaded; load it.")
    return Sight("nvidia", problem="\ud800") if self.looks == 2 else seen
Source.look = failing
"""
    )
    assert _look(child) == Sight("nvidia", problem="The driver ? is not loaded; load it.")
    assert "cannot be written as JSON" in _look(child).problem
    assert _look(child).cards


def test_a_bug_ends_it_with_its_last_words(start: Start) -> None:
    child = start("Source.look = lambda self: 1 / 0")
    said, words = child.communicate(timeout=DEADLINE)
    assert child.returncode == 1 and not said
    assert words.splitlines()[-1] == b"ZeroDivisionError: division by zero"


def test_it_dies_with_its_parent() -> None:
    code = f"""{PRELUDE}
child = os.fork()
if child == 0:
    watcher.main(["nvidia", "--parent", str(os.getppid())])
print(child, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(3)]
        child = int(next(line for line in lines if not line.startswith(b"{")))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        # Its pipe is still read, so that it is the parent's death that it dies of.
        _until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])
    finally:
        parent.kill()
        parent.communicate()


def test_it_does_not_live_where_its_parent_is_gone_already(start: Start) -> None:
    child = start("", "--parent", str(os.getpid() + 1))
    said, words = child.communicate(timeout=DEADLINE)
    assert child.returncode == 1 and not said and b"is gone" in words


def test_a_simulated_machine_is_made_of_its_file_in_its_folder(start: Start) -> None:
    made = """
def simulated(file, tree):
    source = Source()
    source.look = lambda: Sight("nvidia", problem=f"{file} in {tree}", simulated=True)
    return source
watcher.SIMULATED["nvidia"] = "made:simulated"
"""
    child = start(made, "--simulated", "machine.yaml", "--tree", "/tree")
    assert _look(child) == Sight("nvidia", problem="machine.yaml in /tree", simulated=True)


def test_what_it_is_asked_for_wrongly_it_says(start: Start) -> None:
    child = start("", "--simulated", "machine.yaml")
    _, words = child.communicate(timeout=DEADLINE)
    assert child.returncode == 2 and b"belong together" in words


def test_it_is_small(start: Start) -> None:
    """Resident memory of a watcher without a driver, and none of the libraries that would make it big."""
    child = start(
        "heavy = {'pydantic', 'temporalio', 'kubernetes', 'grpc', 'asyncio', 'ssl', 'yaml', 'hashlib'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    _look(child)
    status = Path(f"/proc/{child.pid}/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    assert resident < 20 * 1024, f"{resident} kB"
