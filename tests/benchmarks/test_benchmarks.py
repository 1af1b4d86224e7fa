"""The benchmarks' own arithmetic, and the pure one in miniature."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import admission, placement
from benchmarks.report import Report
from berth.demo.cut import cut_nodes
from berth.demo.trace import load
from crds.gpuworkload import GPUWorkloadSpec


def test_both_rounds_ask_for_the_same() -> None:
    ours = GPUWorkloadSpec.parse(admission.workload("w", 5)["spec"])[0]
    assert ours is not None
    bare = admission.bare_job("b", 5)["spec"]["template"]["spec"]["containers"][0]
    assert ours.resources is not None
    assert {**ours.resources.requests, "nvidia.com/gpu": str(ours.gpu_count)} == bare["resources"]["requests"]
    assert [(each.name, each.value) for each in ours.env or ()] == [("SIMULATED_RUN", "5s")]


def test_job_and_pod_news() -> None:
    raw: dict[str, Any] = {"metadata": {"name": "j"}, "status": {"ready": 1}}
    assert admission.job_news(raw) == admission.JobNews("j", False)
    raw["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert admission.job_news(raw) == admission.JobNews("j", True)
    pod: dict[str, Any] = {
        "metadata": {"labels": {"batch.kubernetes.io/job-name": "j"}},
        "status": {"phase": "Pending"},
    }
    assert admission.runner_of(pod) == ""
    pod["status"]["phase"] = "Running"
    assert admission.runner_of(pod) == "j"


def test_demand_never_asks_for_more() -> None:
    pods = load().pods
    drawn = list(placement.demand(pods, 500, seed=3))
    assert 492 < sum(pod.gpus for pod in drawn) <= 500
    assert drawn == list(placement.demand(pods, 500, seed=3))


def test_a_cluster_on_paper_fills_and_never_overfills() -> None:
    found = load()
    nodes = cut_nodes(found.nodes, 100)
    pods = random.Random(1).choices(found.pods, k=150)
    cluster = placement.Cluster.of(nodes, [placement.workload_view(i, pod) for i, pod in enumerate(pods)])
    while cluster.round(1, limit=20)[0].assignments:
        pass
    assert 0 <= cluster.unallocated < 100
    used: dict[str, int] = {}
    for pod in cluster.pods:
        used[pod.node] = used.get(pod.node, 0) + pod.requests.gpus
    assert all(used.get(node.name, 0) <= node.gpus for node in nodes)


def test_report_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("a benchmark")
    report.row("speed", "7", "per second")
    report.note({"speed": 7})
    report.finish(tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["speed"] == 7
    assert written["machine"]["cpus"] >= 1
    assert "per second" in capsys.readouterr().out


def test_placement_runs_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    command = ["placement", "--nodes", "20", "--queued", "60", "--seeds", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(placement, "allocation", lambda *_: None)
    placement.main()
    assert json.loads(file.read_text())["rounds"]["placed"] > 0


@pytest.mark.parametrize("name", ["admission", "placement"])
def test_every_benchmark_tells_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
