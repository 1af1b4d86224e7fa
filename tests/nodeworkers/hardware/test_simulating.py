"""A machine that a file describes is what the file says, also when that changes or makes no sense."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.simulating import Simulated
from planning.devices.cards import Card, Sight, Vendor


class Machine:
    """As many cards as its file has lines."""

    vendor: Vendor = "nvidia"

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.beats = self.closed = 0
        self.news = threading.Event()

    def apply(self, file: Path) -> None:
        try:
            lines = file.read_text().split()
        except OSError as error:
            raise HardwareError(f"{file.name} cannot be read: {error.strerror}.") from error
        if "odd" in lines:
            raise HardwareError(f"{file.name}, line {lines.index('odd') + 1}: 'odd' is no card.")
        self.lines = lines

    def beat(self) -> None:
        self.beats += 1

    def look(self) -> Sight:
        cards = (Card(id, "nvidia", "T4", "nvidia.com/gpu", index) for index, id in enumerate(self.lines))
        return Sight("nvidia", tuple(cards), problem="It is warm." if len(self.lines) > 2 else "")

    def wait(self, seconds: float) -> None:
        self.news.wait(seconds)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def source(machine: Machine, tmp_path: Path) -> Simulated:
    (tmp_path / "machine.yaml").write_text("a b")
    return Simulated(machine, tmp_path / "machine.yaml", machine.apply, machine.beat)


def _ids(sight: Sight) -> list[str]:
    assert sight.simulated
    return [card.id for card in sight.cards]


def test_it_is_what_the_file_says_by_now(source: Simulated, machine: Machine, tmp_path: Path) -> None:
    assert _ids(source.look()) == ["a", "b"] == _ids(source.look()) and machine.beats == 2
    (tmp_path / "new").write_text("a")
    os.replace(tmp_path / "new", tmp_path / "machine.yaml")
    assert _ids(source.look()) == ["a"] and source.vendor == "nvidia"
    source.close()
    assert machine.closed == 1


def test_a_file_that_makes_no_sense_is_told_and_the_machine_stays(source: Simulated, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("a b c")
    assert source.look().problem == "It is warm."
    file.write_text("a odd")
    for _ in range(2):
        sight = source.look()
        assert _ids(sight) == ["a", "b", "c"]
        assert sight.problem == "machine.yaml, line 2: 'odd' is no card. It is warm."
    file.unlink()
    assert source.look().problem == "machine.yaml cannot be read: No such file or directory. It is warm."
    file.write_text("d")
    assert _ids(source.look()) == ["d"] and not source.look().problem


def test_waiting_ends_when_the_file_is_another_or_the_machine_has_news(
    source: Simulated, machine: Machine, tmp_path: Path
) -> None:
    source.look()
    began = time.monotonic()
    source.wait(0.6)
    assert time.monotonic() - began >= 0.6
    (tmp_path / "machine.yaml").write_text("a b c")
    source.wait(600)
    source.look()
    machine.news.set()
    source.wait(600)
