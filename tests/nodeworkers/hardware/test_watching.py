"""A vendor's watcher that hangs, crashes, prints nonsense or will not die takes nothing with it, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nodeworkers.hardware.watching import Patience, Watching, command, plugged
from planning.devices.cards import Sight

DEADLINE = 30.0
QUICK = Patience(
    first=10.0, silence=0.5, polite=2.0, death=5.0, look_for_hardware=0.05, retry_first=0.05, retry_most=0.2
)
CALM = replace(QUICK, first=60.0, silence=30.0)  # where a busy machine must not look like a hang
LOOK = r"""
import os, signal, sys, time
number = 0
def look(problem=""):
    global number
    number += 1
    line = '{"vendor":"nvidia","cards":[],"troubles":{},"readings":{},"links":[],"problem":"%s","host":{},'
    line += '"simulated":true}'
    sys.stdout.write(line.replace("%s", problem or f"look {number} of {os.getpid()}") + "\n")
    sys.stdout.flush()
"""


class Heard:
    """What a Watching told, in its order."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []
        self.silences: list[str] = []

    async def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not what():
            assert time.monotonic() < deadline, (self.sights[-3:], self.silences)
            await asyncio.sleep(0.01)

    def pids(self) -> list[int]:
        """The processes whose looks came, in their order."""
        return list(dict.fromkeys(int(each.problem.split()[-1]) for each in self.sights if "look" in each.problem))


@asynccontextmanager
async def watched(
    code: str, patience: Patience = QUICK, there: Callable[[], bool] = lambda: True
) -> AsyncIterator[tuple[Watching, Heard]]:
    heard = Heard()
    line = [sys.executable, "-I", "-c", LOOK + code]
    watching = Watching("nvidia", line, heard.sights.append, heard.silences.append, there, patience)
    running = asyncio.create_task(watching.run())
    try:
        yield watching, heard
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.wait([running])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


GOES_ON = "while True: look(); time.sleep(0.1)"


async def test_looks_are_passed_on_until_it_is_stopped_and_nothing_is_left() -> None:
    async with watched(GOES_ON, CALM) as (watching, heard):
        await heard.until(lambda: len(heard.sights) >= 3)
        (pid,) = heard.pids()
        assert watching.pid == pid and not watching.problem and watching.sight == heard.sights[-1]
        assert heard.sights[0] == Sight("nvidia", problem=f"look 1 of {pid}", simulated=True)
    assert not _alive(pid) and not heard.silences and watching.pid is None


async def test_one_that_hangs_is_ended_and_started_anew() -> None:
    async with watched("look(); time.sleep(600)") as (watching, heard):
        await heard.until(lambda: len(heard.pids()) >= 2)
        assert not _alive(heard.pids()[0])
        assert heard.silences[0] == (
            "The watcher of the node's nvidia cards has said nothing for 0.5 s, as when a driver hangs. It is ended "
            "and started anew; look into the node's kernel log."
        )
        assert not watching.problem or len(heard.silences) > 1, "the next look ends the problem"


async def test_a_new_one_may_take_longer_for_its_first_look() -> None:
    async with watched("time.sleep(1.5)\n" + GOES_ON, replace(CALM, silence=1.0)) as (_, heard):
        await heard.until(lambda: len(heard.sights) >= 2)
        assert not heard.silences
    async with watched("time.sleep(600)", replace(QUICK, first=0.3)) as (_, heard):
        await heard.until(lambda: bool(heard.silences))
        assert "said nothing for 0.3 s" in heard.silences[0]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV and is started anew. It said nothing on stderr."),
        ("raise RuntimeError('the library is of another version')", "ended with code 1 and is started anew. Its last "
         "words: RuntimeError: the library is of another version"),
        ("sys.stderr.write('y' * 100_000 + chr(27)); sys.exit(3)", f"ended with code 3 and is started anew. Its last "
         f"words: {'y' * 399}"),
        ("sys.exit(0)", "ended with code 0 and is started anew. It said nothing on stderr."),
        ("sys.stdout.write('{\"vendor\":'); sys.stdout.flush(); os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("print('NVRM: hello', flush=True); time.sleep(600)", "no look at the hardware: no JSON"),
        ("print('{}', flush=True); time.sleep(600)", "no look at the hardware: a sight has not the fields"),
        ("os.write(1, bytes(range(256)) * 10 + b'\\n'); time.sleep(600)", "no look at the hardware: no JSON"),
        ("print('[' * 100_000, flush=True); time.sleep(600)", "no look at the hardware: no JSON"),
        ("while True: os.write(1, b'x' * 65536)", "no look at the hardware: a line of more than 4,194,304 bytes."),
        ("while True: os.write(2, b'x' * 65536)", "has said nothing for 0.5 s"),
        ("while True: look()", "said 101 lines in "),
        ("os.close(1); time.sleep(600)", "closed its output. It is ended and started anew."),
    ],
)  # fmt: skip
async def test_one_that_fails_is_told_ended_and_started_anew(code: str, why: str) -> None:
    async with watched(f"look()\n{code}") as (_, heard):
        await heard.until(lambda: len(heard.pids()) >= 2)
        assert why in heard.silences[0] and heard.silences[0].startswith("The watcher of the node's nvidia cards ")
        assert len(heard.silences[0]) < 700 and heard.silences[0].isprintable()
        assert not _alive(heard.pids()[0])
    assert not any(map(_alive, heard.pids()))


async def test_one_that_will_not_end_politely_is_killed_with_what_it_started() -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif os.fork() == 0: time.sleep(600)\n"
    async with watched(stubborn + GOES_ON, CALM) as (_, heard):
        await heard.until(lambda: bool(heard.sights))
        (pid,) = heard.pids()
        began = time.monotonic()
    assert not _alive(pid)
    assert QUICK.polite <= time.monotonic() - began < QUICK.polite + QUICK.death
    await heard.until(lambda: not _session(pid))


def _session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = each.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(each.parent.name))
    return found


async def test_one_that_cannot_die_is_not_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in state D, simulated: signals to it are held back until the kernel lets go."""
    held = True
    really = os.killpg
    monkeypatch.setattr(os, "killpg", lambda pid, sent: None if held else really(pid, sent))
    async with watched("look(); time.sleep(600)", replace(QUICK, death=0.3)) as (watch, heard):
        await heard.until(lambda: len(heard.silences) >= 2)
        (pid,) = heard.pids()
        assert f"cannot be ended: the kernel holds process {pid} (state S). No other is started" in heard.silences[1]
        await asyncio.sleep(1.0)  # many times what a restart takes
        assert heard.pids() == [pid] and watch.pid == pid and len(heard.silences) == 2
        held = False
        really(pid, signal.SIGKILL)
        await heard.until(lambda: len(heard.pids()) >= 2)
    assert not any(map(_alive, heard.pids()))


async def test_stopping_does_not_wait_for_one_that_cannot_die(monkeypatch: pytest.MonkeyPatch) -> None:
    really, opened = os.killpg, len(os.listdir("/proc/self/fd"))
    pid = 0
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", lambda pid, sent: None)
            async with watched(GOES_ON, replace(QUICK, death=0.3)) as (_, heard):
                await heard.until(lambda: bool(heard.sights))
                (pid,) = heard.pids()
                began = time.monotonic()
            assert time.monotonic() - began < 5.0 and _alive(pid)
    finally:
        really(pid, signal.SIGKILL)
        # Until the event loop has seen its end too, for the test's loop ends next.
        await Heard().until(lambda: not _alive(pid) and len(os.listdir("/proc/self/fd")) <= opened)
        await Heard().until(lambda: not any("waitpid" in each.name for each in threading.enumerate()))


async def test_failures_in_a_row_are_further_and_further_apart_and_a_good_time_ends_that() -> None:
    apart = Patience(retry_first=0.2, retry_most=0.8, settled=60.0)
    async with watched("look(); sys.exit(1)", apart) as (_, heard):
        began = time.monotonic()
        await heard.until(lambda: len(heard.pids()) >= 4)
        assert time.monotonic() - began >= 0.2 + 0.4 + 0.8
    async with watched("look(); sys.exit(1)", replace(apart, retry_most=600.0, settled=0.0)) as (_, heard):
        await heard.until(lambda: len(heard.pids()) >= 10)  # 102 s, were they doubled


async def test_without_hardware_there_is_no_process_and_it_is_found_when_plugged_in(tmp_path: Path) -> None:
    there = tmp_path / "card"
    async with watched(GOES_ON.replace("look()", "look(problem=' ')"), patience=CALM, there=there.exists) as (
        watching,
        heard,
    ):
        await heard.until(lambda: heard.sights == [Sight("nvidia")])
        assert watching.pid is None and watching.sight == Sight("nvidia")
        there.touch()
        await heard.until(lambda: len(heard.sights) >= 3)
        pid = watching.pid
        assert pid is not None and _alive(pid)
        there.unlink()
        await heard.until(lambda: heard.sights[-1] == Sight("nvidia") and watching.pid is None)
        assert not _alive(pid) and not heard.silences, "hardware that was taken away is no failure"


async def test_who_stumbles_over_a_look_ends_no_watching() -> None:
    stumbled = 0

    def stumble(_: Sight | str) -> None:
        nonlocal stumbled
        stumbled += 1
        raise RuntimeError

    line = [sys.executable, "-I", "-c", LOOK + "look(); sys.exit(1)"]
    running = asyncio.create_task(Watching("nvidia", line, stumble, stumble, lambda: True, QUICK).run())
    await Heard().until(lambda: stumbled >= 4)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def test_a_program_that_is_not_there_is_a_sentence() -> None:
    heard = Heard()
    running = asyncio.create_task(
        Watching("nvidia", ["/nowhere"], heard.sights.append, heard.silences.append, lambda: True, QUICK).run()
    )
    await heard.until(lambda: len(heard.silences) >= 2)
    assert heard.silences[0].endswith("cannot be started: No such file or directory. Install berth on this node anew.")
    running.cancel()
    await asyncio.wait([running])


async def test_of_200_cards_one_that_hangs_and_one_that_says_nothing_cost_themselves_alone(tmp_path: Path) -> None:
    """Through the real process: looks go on, and of all others each is as well as it is."""
    file = tmp_path / "machine.yaml"
    file.write_text(
        "tenstorrent: {cards: [{type: n150, count: 99}, {type: n300, fault: hang}, "
        "{type: p150a, fault: empty-attribute}, {type: n150, count: 99}]}\n"
    )
    heard = Heard()
    line = command("tenstorrent", file, tmp_path / "tree")
    watching = Watching("tenstorrent", line, heard.sights.append, heard.silences.append, lambda: True, CALM)
    running = asyncio.create_task(watching.run())
    try:
        await heard.until(lambda: len(heard.sights) >= 3)
        for sight in heard.sights:
            ill = {sight.cards[99].id: "Hangs", sight.cards[100].id: "AttributeEmpty"}
            assert {card: trouble.reason for card, trouble in sight.troubles.items()} == ill
            assert len(sight.cards) == 200 and sight.simulated and not sight.problem
            well = [card for card in sight.cards if card.id not in ill]
            assert {card.resource for card in well} == {"tenstorrent.com/n150"}
            assert all(card.id in sight.readings for card in well)
        assert not heard.silences and len({sight.cards for sight in heard.sights[1:]}) == 1
    finally:
        file.write_text("tenstorrent: {cards: []}\n")  # whoever waits for the card that hangs is let go
        running.cancel()
        await asyncio.wait([running])


def test_hardware_is_seen_without_its_driver(tmp_path: Path) -> None:
    assert not plugged("nvidia", tmp_path)
    devices = tmp_path / "bus" / "pci" / "devices"
    for address, vendor in (("0000:00:00.0", "0x8086\n"), ("0000:3b:00.0", "0x1e52\n"), ("0000:3c:00.0", "\xff")):
        (devices / address).mkdir(parents=True)
        (devices / address / "vendor").write_text(vendor, "latin-1")
    (devices / "0000:3d:00.0").mkdir()  # unplugged just now
    assert plugged("tenstorrent", tmp_path) and not plugged("nvidia", tmp_path)
    (devices / "0000:3e:00.0").mkdir()
    (devices / "0000:3e:00.0" / "vendor").write_text("0x10de\n")
    assert plugged("nvidia", tmp_path)


def test_a_driver_with_a_card_is_enough(tmp_path: Path) -> None:
    classes = tmp_path / "class" / "tenstorrent"
    classes.mkdir(parents=True)
    assert not plugged("tenstorrent", tmp_path)
    (classes / "tenstorrent!0").mkdir()
    assert plugged("tenstorrent", tmp_path)


def test_a_watcher_is_started_as_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = command("tenstorrent", Path("machine.yaml"), Path("tree"))
    assert line[1:4] == ["-I", "-m", "nodeworkers.hardware.watcher"]
    assert line[4:] == [
        "tenstorrent", "--parent", str(os.getpid()), "--simulated", f"{tmp_path}/machine.yaml",
        "--tree", f"{tmp_path}/tree",
    ]  # fmt: skip
