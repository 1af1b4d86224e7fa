"""Parts of a node's work are kept going, each by itself."""

from __future__ import annotations

import asyncio

import pytest

from nodeworkers import keeping
from nodeworkers.keeping import Keeping


async def test_what_fails_is_told_and_begun_anew_while_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeping, "AGAIN", 0.01)
    kept, times, on = Keeping(), [0], asyncio.Event()

    async def fails() -> None:
        times[0] += 1
        if times[0] < 3:
            raise OSError("the disk is full")
        assert "fails" not in kept.broken
        on.set()
        await asyncio.Event().wait()

    async def goes_on() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(kept.keep(work.__name__, work)) for work in (fails, goes_on)]
    await asyncio.sleep(0)
    assert kept.broken == {"fails": "fails: OSError('the disk is full')"}
    async with asyncio.timeout(5):
        await on.wait()
    assert times == [3] and kept.broken == {} and not any(task.done() for task in tasks)
    assert caplog.text.count("fails: it failed and is started again") == 2
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
