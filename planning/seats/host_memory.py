"""Decides whether a seat may be parked: what it moves to the host must fit into its container's limits and the node's.

For whoever chooses who is active, and for the node, which asks again right before it parks. Parked memory of a GPU is
anonymous memory of the process that it was taken from, so a limit below it means the kernel's OOM killer in the middle
of a checkpoint; here it means a sentence with the numbers, and a seat that goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# What parking takes beyond the bytes themselves: an entry of eight bytes in the page tables for each 4 KiB, which a
# container's limit counts too, and something for the driver's own lists.
_PAGES = 512
_SLACK = 64 * 2**20

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Level:
    """A cgroup that a seat's processes are in, its container's first. limit: bytes, None for none (`memory.max`). used:
    bytes that cannot be had back (`memory.current` less `inactive_file` of `memory.stat`).
    """

    name: str
    limit: int | None
    used: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of the host. available: bytes that are free or can be had back at once."""

    number: int
    available: int


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The host's memory. available: bytes, as MemAvailable of /proc/meminfo. keep: bytes that stay free whatever comes.
    parked: what parked seats hold on it. budget: the most that they may, None where nothing limits them. coming: what
    parkings that are under way in other groups will still take. numa: its nodes, empty where nobody knows.
    """

    available: int
    keep: int = 0
    parked: int = 0
    budget: int | None = None
    coming: int = 0
    numa: tuple[NumaNode, ...] = ()


@dataclass(frozen=True, slots=True)
class Parking:
    """A seat that is parked, or is to be: see SeatView."""

    seat: str
    bytes: int
    numa: tuple[tuple[int, int], ...] = ()
    bound: bool = False
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True, slots=True)
class Parked:
    """What is parked on a node, in bytes; `numa`: by NUMA node, as far as somebody knows."""

    bytes: int
    numa: tuple[tuple[int, int], ...]


def needed(moved: int) -> int:
    """Bytes of host memory that parking so many bytes of a GPU takes."""
    return moved + -(-moved // _PAGES) + _SLACK if moved > 0 else 0


def refusal(parking: Parking, memory: NodeMemory) -> str:
    """Why the seat must not be parked, a sentence with the numbers; '' if it may."""
    need = needed(parking.bytes)
    if not need:
        return ""
    moved = f"parking {parking.seat} moves {amount(parking.bytes)} to the host, {amount(need)} with page tables"
    for level in parking.levels:
        if level.limit is not None and level.used + need > level.limit:
            return (
                f"{moved}; the {level.name} has {amount(level.used)} in use and a limit of {amount(level.limit)}, so "
                f"that it would be killed: raise its memory limit to {amount(level.used + need)} or more"
            )
    if memory.budget is not None and memory.parked + memory.coming + parking.bytes > memory.budget:
        there = memory.parked + memory.coming
        return (
            f"{moved}; parked seats of this node hold {amount(there)} and may hold {amount(memory.budget)}: raise "
            "that budget, or have fewer seats"
        )
    free = memory.available - memory.coming - memory.keep
    if need > free:
        return (
            f"{moved}; the node has {amount(max(free, 0))} to spare ({amount(memory.available)} available, "
            f"{amount(memory.coming)} promised to others that are being parked, {amount(memory.keep)} kept free): free "
            "memory there, or have fewer seats"
        )
    if parking.bound and (short := _short(parking, memory)):
        return f"{moved}; it may use memory of {short}: let it use other NUMA nodes, or free memory there"
    return ""


def slow(parking: Parking, memory: NodeMemory) -> str:
    """What makes a parking that is not refused slow: memory of another NUMA node than its GPUs'; '' if nothing does."""
    short = _short(parking, memory)
    return f"parking {parking.seat} uses memory of other NUMA nodes than its GPUs', which is slower: of {short}" * bool(
        short
    )


def parked(parkings: Iterable[Parking]) -> Parked:
    """What these seats hold together."""
    total, by_node = 0, dict[int, int]()
    for each in parkings:
        total += max(each.bytes, 0)
        for number, share in each.numa:
            by_node[number] = by_node.get(number, 0) + max(share, 0)
    return Parked(total, tuple(sorted(by_node.items())))


def _short(parking: Parking, memory: NodeMemory) -> str:
    """The NUMA nodes that have less than is moved to them, with the numbers."""
    available = {each.number: each.available for each in memory.numa}
    return ", ".join(
        f"NUMA node {number}, which has {amount(max(available[number], 0))} for {amount(needed(share))}"
        for number, share in parking.numa
        if number in available and needed(share) > available[number]
    )


def amount(size: int) -> str:
    """Bytes for a person, such as `1.5 GiB`."""
    value, unit = float(size), 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + f" {_UNITS[unit]}"
