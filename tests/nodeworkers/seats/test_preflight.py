"""What a node has for parking is found out: by the helpers of its groups, and from the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from nodeworkers.seats.helper.client import Hello, HelperClient, HelperError
from nodeworkers.seats.preflight import Preflight, read_kernel
from planning.devices.offering import Seat


@dataclass
class Helpers:
    """Of groups; `away`: those that cannot be asked."""

    version: str = "550.54.14"
    away: set[str] = field(default_factory=set)
    group: str = ""

    def of(self, group: str) -> HelperClient:
        self.group = group
        return cast(HelperClient, self)

    async def hello(self) -> Hello:
        if self.group in self.away:
            raise HelperError("The helper was begun and does not answer.")
        return Hello(1, self.version, [])


def seat(group: str, number: int) -> Seat:
    return Seat(f"kyb-{group}-s{number}", "kyb.ai/gpu-1x-seat", group, (f"GPU-{group}",))


async def test_each_group_says_what_its_driver_lacks() -> None:
    helpers = Helpers()
    preflight = Preflight(lambda: [seat("G0", 1), seat("G0", 2)], dict, helpers.of)
    assert not preflight.missing("G0") and not preflight.checks("G0"), "nobody looked yet"
    await preflight.look()
    assert "550.54.14" in preflight.missing("G0")[0]
    assert not {each.name: each.ok for each in preflight.checks("G0")}["CudaCheckpoint"]
    helpers.away = {"G0"}
    await preflight.look()
    assert not preflight.missing("G0") and "could not be asked" in preflight.checks("G0")[0].told


def test_the_kernel_is_read(tmp_path: Path) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "sys" / "kernel").mkdir(parents=True)
    (sys / "kernel" / "mm" / "transparent_hugepage").mkdir(parents=True)
    (sys / "kernel" / "mm" / "transparent_hugepage" / "enabled").write_text("always [madvise] never\n")
    (proc / "meminfo").write_text("MemTotal:       1024 kB\nSwapTotal:       2 kB\nnonsense\nOdd: x kB\n")
    (proc / "sys" / "kernel" / "io_uring_disabled").write_text("2\n")
    (proc / "77").mkdir()
    (proc / "77" / "comm").write_text("nvidia-cuda-mps-server"[:15] + "\n")
    found = read_kernel(proc, sys)
    assert (found.huge_pages, found.memory, found.swap, found.io_uring, found.mps) == (
        "madvise", 2**20, 2048, False, True,
    )  # fmt: skip
    (proc / "77" / "comm").unlink()
    assert not read_kernel(proc, sys).mps


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    found = read_kernel(tmp_path, tmp_path)
    assert (found.huge_pages, found.memory, found.mps, found.io_uring) == ("", 0, False, False)
