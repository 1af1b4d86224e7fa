"""Decides what a node can park with, by what was found out about it: for people, before anything is parked, and for
whoever chooses how a seat is parked.

What does not hold says what follows from it and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planning.seats.checkpoint_capability import SIMULATED, capability
from planning.seats.host_memory import amount


@dataclass(frozen=True, slots=True)
class Found:
    """driver: its version, '' where it could not be asked, and then `trouble` says why. machine: as uname has it. gpus:
    of the group. mps: CUDA's multi-process server runs. huge_pages: of `always`, `madvise` and `never`, '' unknown.
    memory, swap: bytes of the host. device_memory: bytes of the group's GPUs together. seats: on the group. numa: nodes
    that its GPUs are on. io_uring: whether processes may use it.
    """

    driver: str = ""
    trouble: str = ""
    machine: str = "x86_64"
    gpus: int = 1
    mps: bool = False
    huge_pages: str = ""
    memory: int = 0
    swap: int = 0
    device_memory: int = 0
    seats: int = 1
    numa: tuple[int, ...] = ()
    io_uring: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One thing. `ok`: there is nothing to mend; `told`: a sentence that says what follows."""

    name: str
    ok: bool
    told: str


def asked_by_runtime(trouble: str, *, claimed: bool) -> Check:
    """Whether the container runtime asks berth before it creates a container (NRI). `trouble`: why it does not, a
    sentence without its full stop, '' if it does; `claimed`: seats are handed out by DRA, where nobody else asks.
    """
    if not trouble:
        return Check("nri", True, "The container runtime asks berth before it creates a container with a seat.")
    if claimed:
        told = f"{trouble}. A claim is prepared when its seat has the slot, which takes the kubelet a minute and more"
        return Check("nri", False, f"{told}; a container that ends starts anew without the slot.")
    return Check("nri", True, f"{trouble}. It is not needed: the kubelet asks before each start, by device plugin.")


def missing(found: Found) -> Sequence[str]:
    """What a checkpoint by the driver lacks, as sentences; none if it can be done. Nor where the driver could not be
    asked: that says nothing of what it can, and no server is ended for it.
    """
    if not found.driver:
        return ()
    return capability(found.driver, found.machine, found.gpus, mps=found.mps).missing


def checks(found: Found) -> list[Check]:
    """All of a group, in a fixed order."""
    return [
        _driver(found),
        *_warnings(found),
        _huge_pages(found),
        _memory(found),
        _swap(found),
        _numa(found),
        _disk(found),
    ]


def _driver(found: Found) -> Check:
    lacking = missing(found)
    if lacking:
        return Check("CudaCheckpoint", False, " ".join(lacking) + " Seats are parked by their engine's sleep, or cold.")
    if not found.driver:
        told = f"The GPUs' driver could not be asked: {found.trouble}" if found.trouble else "It was not asked yet."
        return Check("CudaCheckpoint", not found.trouble, told)
    simulated = found.driver == SIMULATED
    what = "Simulated GPUs" if simulated else f"Driver {found.driver}"
    can = capability(found.driver, found.machine, found.gpus, mps=found.mps)
    moves = "" if not can.moves else ", on other GPUs too"
    return Check("CudaCheckpoint", True, f"{what} can park servers and wake them{moves}.")


def _warnings(found: Found) -> list[Check]:
    """What may fail all the same: a trial of each server tells."""
    if not found.driver or missing(found):
        return []
    told = capability(found.driver, found.machine, found.gpus, mps=found.mps).warnings
    return [Check(f"Warning{number}", True, each) for number, each in enumerate(told, 1)]


def _huge_pages(found: Found) -> Check:
    if found.huge_pages == "never":
        told = (
            "Transparent huge pages are off, so parking takes longer: much of it is the kernel's zeroing of pages, and "
            "for 8.5 GB somebody measured 3.9 s without and 1.6 s with them. Write `madvise` or `always` to "
            "/sys/kernel/mm/transparent_hugepage/enabled."
        )
        return Check("HugePages", False, told)
    return Check("HugePages", True, f"Transparent huge pages: {found.huge_pages or 'not known'}.")


def _memory(found: Found) -> Check:
    most = found.device_memory * max(0, found.seats - 1)
    told = (
        f"The host has {amount(found.memory)}. All seats of the group but one, parked, take up to {amount(most)} of it "
        "if each fills its GPUs"
    )
    if found.memory and most > found.memory:
        return Check("HostMemory", False, f"{told}: one that does not fit is not parked.")
    return Check("HostMemory", True, f"{told}.")


def _swap(found: Found) -> Check:
    if found.swap:
        told = f"The host swaps ({amount(found.swap)}): what is parked may be written to disk, with all that it holds."
        return Check("Swap", False, told)
    return Check("Swap", True, "The host does not swap.")


def _numa(found: Found) -> Check:
    if len(found.numa) > 1:
        told = f"The group's GPUs are on NUMA nodes {', '.join(map(str, found.numa))}: copies to the others are slower."
        return Check("Numa", False, told)
    where = f"NUMA node {found.numa[0]}" if found.numa else "no NUMA node that the machine tells"
    return Check("Numa", True, f"The group's GPUs are on {where}.")


def _disk(found: Found) -> Check:
    uring = " Processes may use io_uring, which CRIU cannot save." if found.io_uring else ""
    return Check("Criu", True, f"Nothing is parked on disk.{uring}")
