"""The benchmarks' own arithmetic, and the pure one in miniature."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import admission, gangs, placement, strategies
from benchmarks.report import Report
from berth.demo.cut import cut_nodes
from berth.demo.trace import load
from crds.gpuworkload import GPUWorkloadSpec
from planning.capacity import Room
from planning.filters import Shape
from planning.fleet import Fleet
from planning.model import Resources
from planning.strategies import Request, installed
from planning.strategies.fgd import FGD
from tests.planning.builders import GIB, node


def test_both_rounds_ask_for_the_same() -> None:
    ours = GPUWorkloadSpec.parse(admission.workload("w", 5)["spec"])[0]
    assert ours is not None
    bare = admission.bare_job("b", 5)["spec"]["template"]["spec"]["containers"][0]
    assert ours.resources is not None
    assert {**ours.resources.requests, "nvidia.com/gpu": str(ours.gpu_count)} == bare["resources"]["requests"]
    assert [(each.name, each.value) for each in ours.env or ()] == [("SIMULATED_RUN", "5s")]


def test_what_a_gang_is_told_and_what_its_pods_do() -> None:
    body = gangs.gang("g", 10, topology={"level": gangs.ZONE})
    spec, refused = GPUWorkloadSpec.parse(body["spec"])
    assert spec is not None and not refused and spec.replicas * spec.gpu_count == 80
    scheduled = {"conditions": [{"type": "Scheduled", "reason": "NoSuitableNode"}], "phase": "Pending"}
    assert gangs.reason_of(body) == ("g", "")
    assert gangs.reason_of({**body, "status": scheduled}) == ("g", "NoSuitableNode")
    assert gangs.reason_of({**body, "status": {**scheduled, "phase": "Running"}}) == ("g", "Running")
    pod: dict[str, Any] = {"metadata": {"labels": {"gpu.warp.dev/workload": "g"}}, "status": {"phase": "Running"}}
    assert gangs.member_of({**pod, "spec": {}}) == ("g", True, True)
    assert gangs.member_of({**pod, "spec": {"schedulingGates": [{"name": "x"}]}, "status": {}}) == ("g", False, False)


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
    command = ["placement", "--nodes", "20", "--queued", "60", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    placement.main()
    assert json.loads(file.read_text())["rounds"]["placed"] > 0


def test_the_published_fgd_takes_the_first_name_and_ours_the_fullest_node() -> None:
    ranks = []
    for mine in (strategies.PublishedFGD(), FGD()):
        fleet = Fleet((node(name), Room(free, 64_000, 256 * GIB, 110)) for name, free in (("a", 5), ("b", 2)))
        place = fleet.find(Request("u", "ns", "w", Resources(1)), Shape(Resources(1)), mine)
        assert place is not None
        ranks.append(place.node)
    assert ranks == ["a", "b"]


def test_strategies_run_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, pods, file = tmp_path / "nodes.csv", tmp_path / "pods.csv", tmp_path / "out.json"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu\na,8000,9,4\nb,8000,9,4\n")
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\none,1,1,1,500\ntwo,1,1,2,1000\n")
    command = ["strategies", "--nodes", str(nodes), "--pods", str(pods), "--seeds", "1-3", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    strategies.main()
    found = json.loads(file.read_text())
    by_name = found["unallocated on pods.csv"]
    assert set(by_name) == {strategies.PUBLISHED, *strategies.COMPARED} and set(strategies.COMPARED) <= set(installed())
    assert by_name[strategies.PUBLISHED]["minus_published"] == {"mean": 0.0, "sd": 0.0}
    assert found["decisions, fgd, 2 nodes"]["decisions"] > 0


@pytest.mark.parametrize("name", ["admission", "kueue", "placement", "strategies"])
def test_every_benchmark_tells_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    for module in [each for each in sys.modules if each.startswith(f"benchmarks.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
