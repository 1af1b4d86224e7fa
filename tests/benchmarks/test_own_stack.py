"""That the memory of controller and worker is sampled, and told where there is one."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.own_stack import Memory
from benchmarks.report import Report


async def test_the_most_memory_is_told_of_each_process_that_runs() -> None:
    pids = {"controller": os.getpid(), "worker": None}
    stack = SimpleNamespace(process=lambda name: SimpleNamespace(pid=pids[name]))
    memory, report = Memory(cast(Any, stack)), Report("")
    async with memory.sampled():
        await asyncio.sleep(0)  # its first sample needs one turn
    memory.tell(report)
    told = report.values["memory_controller"]
    assert told["rss_max"] >= told["pss_max"] > 0 and told["samples"] == 1
    assert "memory_worker" not in report.values
    assert [row[0] for row in report.rows] == ["memory of controller"]
