"""The stack that a benchmark measures: up while it runs and gone afterwards, and how much memory berth takes on it."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from berth.cli.application import after_up, application_processes
from berth.demo import measure
from stack import Endpoints, Lines, Stack, UpOptions

MEGABYTE = 1024 * 1024


def data_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the folder that `own_stack` is given."""
    parser.add_argument("--data", type=Path, help="an empty folder for the stack; left out: a temporary one")


@contextmanager
def own_stack(
    name: str, data: Path | None, settings: dict[str, Any] | None = None
) -> Iterator[tuple[Stack, Endpoints]]:
    """A stack with berth on it, in the folder `data` or in a temporary one that is removed."""
    folder = data or Path(tempfile.mkdtemp(prefix=f"berth-{name}-"))
    stack = Stack(folder)
    up = UpOptions(node_lease_seconds=120, end_with_caller=True)
    try:
        endpoints = stack.up(
            up, Lines(), lambda found: application_processes(found, up), lambda found: after_up(found, settings)
        )
        yield stack, endpoints
    finally:
        stack.down()
        if data is None:
            shutil.rmtree(folder, ignore_errors=True)


class Memory:
    """Of controller and worker, sampled every second."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._samples: dict[str, list[measure.Memory]] = {}

    @asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Within the block."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _sample(self) -> None:
        while True:
            for name in ("controller", "worker"):
                pid = self._stack.process(name).pid
                if pid is not None:
                    with suppress(OSError, KeyError):
                        self._samples.setdefault(name, []).append(measure.memory(pid))
            await asyncio.sleep(1.0)

    def tell(self, report: Report) -> None:
        """The most that each had."""
        for name, samples in self._samples.items():
            rss, pss = max(each.rss for each in samples), max(each.pss for each in samples)
            report.note({f"memory_{name}": {"rss_max": rss, "pss_max": pss, "samples": len(samples)}})
            report.row(f"memory of {name}", f"{rss / MEGABYTE:.0f} MB", f"RSS at most; PSS {pss / MEGABYTE:.0f} MB")
