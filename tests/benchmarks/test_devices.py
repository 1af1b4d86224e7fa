"""The benchmarks of devices, in miniature and without a kubelet."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import device_deaths, devices
from benchmarks.report import Report


def test_it_measures_both_sides(tmp_path: Path) -> None:
    report = Report("devices")
    devices.measure(8, 8, tmp_path, report)
    for title in ("Allocate, 8 devices", "first list, 8 devices", "preferred 1, 8 devices"):
        values = report.values[title]
        assert 0 < values["ours"]["p50"] <= values["ours"]["p99"] and values["bare"]["p50"] > 0
    assert report.values["building, 8 devices"]["p50"] > 0
    assert len(report.rows) == 4


async def test_it_waits_for_what_the_kubelet_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts = iter([4, -1, 3, 4, 4, 4])

    async def count() -> int:
        return next(counts)

    assert 0.02 < await device_deaths.until(count, 3) < 60
    monkeypatch.setattr(device_deaths, "_LONGEST", 0.03)
    with pytest.raises(SystemExit, match="there are 4 instead of 3"):
        await device_deaths.until(count, 3)
    with device_deaths.peer(None, tmp_path) as files:
        assert files == []
