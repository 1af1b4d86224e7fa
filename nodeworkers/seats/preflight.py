"""Finds out what a node has for parking, group by group, for `planning/seats/preflight.py`: the driver by the group's
helper, the rest from the kernel.

Looks once a minute, and never twice at once at a driver that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.limits import numbers
from nodeworkers.seats.world import UntouchedError
from planning.devices.cards import Card
from planning.devices.offering import Seat
from planning.seats.preflight import Check, Found, checks, missing

LOOK = 60.0  # seconds
_SOON = 5.0  # seconds, until each driver has answered
_MPS = "nvidia-cuda-mps"  # the kernel keeps 15 characters
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is the same for all groups."""

    huge_pages: str
    memory: int
    swap: int
    io_uring: bool
    mps: bool


class Preflight:
    """One node's. `seats`: all that it has; `cards`: its GPUs by UUID; `helper`: a group's."""

    def __init__(
        self, seats: Callable[[], Sequence[Seat]], cards: Callable[[], Mapping[str, Card]],
        helper: Callable[[str], HelperClient],
    ) -> None:  # fmt: skip
        self._seats, self._cards, self._helper = seats, cards, helper
        self._found: dict[str, Found] = {}

    def missing(self, group: str) -> Sequence[str]:
        """What a checkpoint by the driver lacks there, as far as is known."""
        return missing(self._found.get(group, Found()))

    def checks(self, group: str) -> Sequence[Check]:
        """For people; none before the first look."""
        return checks(self._found[group]) if group in self._found else ()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            known = bool(self._found) and all(each.driver for each in self._found.values())
            await asyncio.sleep(LOOK if known else _SOON)

    async def look(self) -> None:
        """At all groups once."""
        kernel = await asyncio.to_thread(read_kernel)
        groups: dict[str, list[Seat]] = {}
        for seat in self._seats():
            groups.setdefault(seat.group, []).append(seat)
        found = await asyncio.gather(*(self._look(group, seats, kernel) for group, seats in groups.items()))
        self._found = dict(zip(groups, found, strict=True))

    async def _look(self, group: str, seats: Sequence[Seat], kernel: Kernel) -> Found:
        driver, trouble = "", ""
        try:
            driver = (await self._helper(group).hello()).version
        except UntouchedError as error:
            trouble = str(error)
        all_cards = self._cards()
        cards = [all_cards[each] for each in seats[0].cards if each in all_cards]
        return Found(
            driver, trouble, platform.machine(), len(seats[0].cards), kernel.mps, kernel.huge_pages,
            kernel.memory, kernel.swap, sum(card.memory_mib << 20 for card in cards), len(seats),
            tuple(sorted({card.numa for card in cards if card.numa is not None})), kernel.io_uring,
        )  # fmt: skip


def read_kernel(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Kernel:
    """What cannot be read counts as nothing known."""
    said = _text(sys / "kernel/mm/transparent_hugepage/enabled")
    chosen = said[said.find("[") + 1 : said.find("]")] if "[" in said else ""
    sizes = numbers(proc / "meminfo")
    off = _text(proc / "sys/kernel/io_uring_disabled").strip()
    return Kernel(chosen, sizes.get("MemTotal", 0), sizes.get("SwapTotal", 0), off in ("0", "1"), _mps_runs(proc))


def _mps_runs(proc: Path) -> bool:
    return any(_text(proc / pid / "comm").startswith(_MPS) for pid in os.listdir(proc) if pid.isdigit())


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
