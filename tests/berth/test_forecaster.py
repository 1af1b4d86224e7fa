"""A forecast is made in a program of its own, which is nobody's rival and ends with whoever asked."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from activities.forecasts import forecast
from berth.forecaster import ForecastError, forecast_aside
from planning.model import Snapshot
from tests.planning.builders import NOW, SETTINGS, node, quota, reservation, workload
from tests.planning.test_prediction import running


def seen() -> Snapshot:
    there = running((8, 100.0), waiting=(), took=(400.0,) * 5)
    waits = replace(workload("a", 8), status={"phase": "Scheduling"})
    return replace(
        there,
        nodes=(*there.nodes, node("b", 2, labels={"pool": "x"})),
        workloads=(*there.workloads, waits),
        quotas=(quota("q", "ns", gpus=80),),
        reservations=(reservation("r", gpus=1, start=100, end=200),),
    )


async def test_it_comes_to_the_same_as_in_the_worker() -> None:
    here, aside = forecast(seen(), SETTINGS), await forecast_aside(seen(), SETTINGS)
    assert aside == here and aside.at == NOW and aside.early["a"] == pytest.approx(300, rel=0.1)


async def test_one_that_fails_says_why() -> None:
    with pytest.raises(ForecastError, match=r"exit status 1\): .*'NoneType'"):
        await forecast_aside(replace(seen(), workloads=(None,)), SETTINGS)  # type: ignore[arg-type]  # no snapshot


async def test_whoever_no_longer_waits_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    asked = asyncio.create_task(forecast_aside(seen(), SETTINGS))
    async with asyncio.timeout(20):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.02)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
