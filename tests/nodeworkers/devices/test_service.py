"""What breaks off in the device work is begun anew, told, and ends nothing else."""

from __future__ import annotations

import asyncio

import pytest

from nodeworkers.devices import service
from nodeworkers.devices.service import DeviceService


async def test_a_part_that_breaks_off_is_begun_anew_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_AGAIN", 0.02)
    made = object.__new__(DeviceService)
    made._broken = {}
    begun, told = 0, []

    async def breaks() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise RuntimeError("a mistake")
        told.append(dict(made._broken))
        await asyncio.Event().wait()

    task = asyncio.create_task(made._keep("allocation", breaks))
    try:
        async with asyncio.timeout(10):
            while not told:
                await asyncio.sleep(0.005)
        assert begun == 3 and not task.done() and told == [{}], "what is well again is not told any more"
    finally:
        task.cancel()
