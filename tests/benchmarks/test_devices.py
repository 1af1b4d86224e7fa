"""The benchmark of the device plugin, in miniature."""

from __future__ import annotations

from pathlib import Path

from benchmarks import devices
from benchmarks.report import Report


def test_it_measures_both_sides(tmp_path: Path) -> None:
    report = Report("devices")
    devices.measure(8, 8, tmp_path, report)
    for title in ("Allocate, 8 devices", "first list, 8 devices", "preferred 1, 8 devices"):
        values = report.values[title]
        assert 0 < values["ours"]["p50"] <= values["ours"]["p99"] and values["bare"]["p50"] > 0
    assert report.values["building, 8 devices"]["p50"] > 0
    assert len(report.rows) == 4
