"""The demo's figures: how they are computed, and that table and file say the same."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from berth.demo import measure, report
from berth.demo.cut import RunTimes, make_cut
from berth.demo.live import Fleet, Sample
from berth.demo.measure import Histories, Request, parse_writes, spent, writes_between
from berth.demo.run import MARKER, DemoOptions, run_demo
from berth.demo.trace import load
from stack import Stack, StackError

METRICS = b"""\
# TYPE apiserver_request_total counter
apiserver_request_total{code="201",component="apiserver",dry_run="",group="batch",resource="jobs",scope="resource",subresource="",verb="POST",version="v1"} 7
apiserver_request_total{code="201",component="apiserver",dry_run="All",group="batch",resource="jobs",scope="resource",subresource="",verb="POST",version="v1"} 5
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="status",verb="PATCH",version="v1"} 1.2e+06
apiserver_request_total{code="409",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="",verb="DELETE",version="v1"} 2
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 9
apiserver_request_total{code="0",component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="WATCH",version="v1"} 9
"""  # noqa: E501


def samples(*entries: tuple[float, int, int]) -> list[Sample]:
    return [Sample(at, Counter(), {"T4": used}, waiting) for at, used, waiting in entries]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([5.0], 0.99, 5.0), (list(map(float, range(1, 101))), 0.5, 50.0), (list(map(float, range(1, 101))), 0.99, 99.0)],
)
def test_percentile_is_the_nearest_rank(values: list[float], share: float, expected: float) -> None:
    assert report.percentile(values, share) == expected


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        report.percentile([], 0.5)


def test_unallocated_counts_from_the_fullest_moment_while_somebody_waits() -> None:
    seen = samples((0, 0, 50), (1, 50, 30), (2, 98, 20), (3, 100, 20), (4, 90, 10), (6, 80, 0), (7, 10, 0))
    assert report.unallocated(seen, 100) == {
        "at_fullest": 0,
        "waiting_at_fullest": 20,
        "seconds_full_and_waiting": 4,  # from second 2 (98 of at most 100) to 6
        "mean_while_waiting": (2 + 0 + 10 + 10) / 4,
    }


def test_unallocated_is_empty_when_nobody_waits() -> None:
    assert report.unallocated(samples((0, 5, 0), (1, 6, 0)), 100) == {}


def test_writes_are_read_from_the_servers_metrics() -> None:
    assert parse_writes(METRICS) == {
        Request("POST", "jobs.batch", True): 7,
        Request("PATCH", "pods/status", True): 1_200_000,
        Request("DELETE", "pods", False): 2,
    }


def test_writes_between_two_moments() -> None:
    before = Counter({Request("POST", "jobs.batch", True): 3})
    after = Counter({Request("POST", "jobs.batch", True): 7, Request("DELETE", "pods", False): 9})
    assert writes_between(before, after) == {"DELETE pods (refused)": 9, "POST jobs.batch": 4}


def test_cpu_of_a_restarted_process_counts_from_its_restart() -> None:
    assert spent({"worker": 9.0, "etcd": 1.0}, {"worker": 2.0, "etcd": 4.0, "new": 1.0}) == {
        "etcd": 3.0,
        "worker": 2.0,
        "new": 1.0,
    }


def test_memory_of_this_process() -> None:
    found = measure.memory(os.getpid())
    assert 0 < found.pss <= found.rss <= found.peak
    assert measure.cpu_seconds(os.getpid()) > 0


def played() -> dict[str, Any]:
    cut = make_cut(load(), gpus=100, workloads=20)
    fleet = Fleet.of([(n.name, n.model, n.gpus) for n in cut.nodes], [(r.pod.name, r.pod.gpus) for r in cut.runs])
    node = cut.nodes[0].name
    for index, name in enumerate(fleet.items):
        fleet.applied(name, 0.0)
        fleet.sample(index / 10)
        fleet.job(name, 0, node, 0.5 + index)
        fleet.pod(f"u{name}", name, 0, node, True, 1.0 + index)
        fleet.pod_gone(f"u{name}", name, 0, 2.0 + index)
        fleet.status(name, "Succeeded", 0, "", 3.0 + index)
    fleet.sample(30.0)
    timings = report.Timings(5.0, 6.0, 7.0, 30.0, 40.0)
    histories = Histories((12,) * 20, (3000,) * 20, 0, 100, 50_000, 1)
    return report.figures(cut, fleet, timings, histories, {"POST jobs.batch": 20}, seed=1)


def test_figures_are_plain_and_the_table_shows_them() -> None:
    result = played()
    assert json.loads(json.dumps(result)) == result
    assert result["workloads"] == {
        "applied": 20, "placed": 20, "ran": 20, "retried": 0, "succeeded": 20, "failed": 0, "unfinished": 0,
        "jobs": 20, "placed_per_second": 1.0,
    }  # fmt: skip
    assert result["time_to_placement"] == {"p50": 9.5, "p99": 19.5, "max": 19.5}
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(report.table(result))
    text = console.export_text()
    for words in ("time to placement, p99", "19.50 s", "history of a workload", "12.0", "overcommitted"):
        assert words in text


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StackError, match="did not make"):
        run_demo(DemoOptions(data=tmp_path, gpus=20, workloads=1), Console(file=io.StringIO()))
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert not (tmp_path / MARKER).exists()


def test_a_file_that_cannot_be_written_is_noticed_first(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="cannot be written"):
        run_demo(DemoOptions(data=tmp_path / "d", json_file=tmp_path / "no" / "x.json"), Console(file=io.StringIO()))
    assert not (tmp_path / "d").exists()


@pytest.mark.stack
@pytest.mark.timeout(280)
def test_the_demo_in_miniature(tmp_path: Path) -> None:
    """From nothing to figures: a stack of its own, real everything but nodes and runs."""
    file = tmp_path / "figures.json"
    out = io.StringIO()
    options = DemoOptions(
        data=tmp_path / "data",
        gpus=100,
        workloads=40,
        failing=0.05,
        times=RunTimes(1.0, 4.0),
        json_file=file,
        keep=False,
        timeout=150.0,
    )
    result = run_demo(options, Console(file=out, width=100))
    assert result["workloads"] | {"placed_per_second": 0, "jobs": 0} == {
        "applied": 40, "placed": 40, "ran": 40, "retried": 2, "succeeded": 38, "failed": 2, "unfinished": 0,
        "jobs": 0, "placed_per_second": 0,
    }  # fmt: skip
    assert result["gpus"]["node_overcommitted"] == 0
    assert result["histories"]["workflows"] == 2, "of the others nothing but their place was decided"
    assert result["histories"]["events_p50"] == 0 < result["histories"]["events_max"] <= 40
    assert result["histories"]["ledger_events"] > 0
    assert result["api_writes_by_kind"]["POST jobs.batch"] >= 42
    assert result["cpu_seconds"]["worker"] > 0
    assert json.loads(file.read_text()) == result
    assert "what was measured" in out.getvalue()
    assert not Stack(tmp_path / "data").running
