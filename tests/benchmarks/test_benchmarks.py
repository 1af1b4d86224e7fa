"""The benchmarks' own arithmetic, and the pure one in miniature."""

from __future__ import annotations

import argparse
import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import admission, extraction, gangs, placement, predictions, sharding, strategies
from benchmarks.report import Report
from berth.demo.cut import cut_nodes
from berth.demo.trace import load
from berth.simulate.load import offered
from berth.simulate.trace import Recorded
from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings
from planning.capacity import Room
from planning.filters import Shape
from planning.fleet import Fleet
from planning.jobs import shape_of
from planning.model import WHOLE, Resources
from planning.simulation import Arrival
from planning.strategies import Request, installed
from planning.strategies.fgd import FGD
from planning.typical import Kind
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
    nodes.write_text("sn,cpu_milli,memory_mib,gpu\na,8000,9,4\nb,8000,9,8\n")
    pods.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\none,1,1,1,500\ntwo,1,1,2,1000\n")
    command = [
        "strategies",
        "--nodes",
        str(nodes),
        "--pods",
        str(pods),
        "--seeds",
        "1-3",
        "--busy",
        "3",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", command)
    strategies.main()
    found = json.loads(file.read_text())
    by_name = found["unallocated on pods.csv"]
    assert set(by_name) == {strategies.PUBLISHED, *strategies.COMPARED} and set(strategies.COMPARED) <= set(installed())
    assert by_name[strategies.PUBLISHED]["minus_published"] == {"mean": 0.0, "sd": 0.0}
    assert found["decisions, fgd, 2 nodes"]["decisions"] > 0
    busy = found["busy, fgd, 3 nodes"]
    assert busy["gpus"] == 24 and 50 < busy["allocated_gpu_percent"] <= 100 and busy["decisions"] == 20_000


def recorded(name: str, gpus: int, seconds: float, milli: int = WHOLE) -> Recorded:
    return Recorded(Arrival(name, Shape(Resources(gpus, 1000, GIB, 1, milli)), Kind(gpus, milli, 1000)), "", 0, seconds)


def test_predicted_is_what_a_gpuworkload_could_be() -> None:
    found = predictions.workloads(
        [recorded("a", 1, 60), recorded("cpu", 0, 60), recorded("part", 1, 60, 500), recorded("long", 1, 1e6)]
    )
    assert list(found) == ["a"]
    pod, spec = found["a"]
    assert (spec.gpu_count, pod.tenant, pod.arrival.shape) == (1, "openb", shape_of(spec, Settings()))
    assert pod.arrival.shape.requests == Resources(1, 1000, GIB, 1)


def test_errors_of_predictions_are_told_against_what_was(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("predictions")
    made = [(100.0, 200.0, 150.0), (100.0, 200.0, 50.0), (10.0, 20.0, 30.0), (None, None, 9.0)]
    predictions.tell(report, [predictions.Prediction(*each, started=True) for each in made])
    assert report.values["predictions"] == 4 and report.values["told"] == 3
    assert (report.values["error_seconds_median"], report.values["error_seconds_p90"]) == (50, 50)
    assert report.values["relative_error_median"] == pytest.approx(2 / 3, abs=0.001)
    assert report.values["later_than_likely"] == report.values["within_nine_in_ten"] == pytest.approx(2 / 3, abs=0.001)


def test_of_what_never_started_counts_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """It waited so long at least: late is who was to have started before that, of the others nobody knows."""
    report = Report("predictions")
    made = [(100.0, 200.0, 150.0, True), (100.0, 200.0, 50.0, False), (100.0, 200.0, 150.0, False),
            (100.0, 200.0, 900.0, False)]  # fmt: skip
    predictions.tell(report, [predictions.Prediction(*each) for each in made])
    assert (report.values["told"], report.values["never_started"]) == (4, 3)
    assert report.values["error_seconds_median"] == report.values["error_seconds_p90"] == 50
    assert report.values["later_than_likely"] == 1 and report.values["within_nine_in_ten"] == 0.5


def test_what_will_end_as_it_always_did_is_predicted_well() -> None:
    pods = [recorded(f"p{i}", 2, 300) for i in range(20)]
    found = predictions.workloads(pods)
    offer = offered([pod for pod, _ in found.values()], 4000, 1.05, 1)
    specs = {name: spec for name, (_, spec) in found.items()}
    told = predictions.predictions([node("a", 2), node("b", 2)], offer, specs, count=12, seconds=60)
    assert len(told) == 12 and all(each.started and each.likely is not None for each in told)
    errors = sorted(abs((each.likely or 0.0) - each.actual) / max(each.actual, 60) for each in told)
    assert errors[6] < 0.2


def test_predictions_run_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["predictions", "--gpus", "20", "--load", "70", "--count", "1", "--json", str(file)]
    )
    predictions.main()
    assert json.loads(file.read_text())["predictions"] == 1


def test_pools_are_dealt_alike_and_the_emptier_of_two_that_are_able_is_taken() -> None:
    small, large = Shape(Resources(1, 1000, GIB, 1)), Shape(Resources(8, 1000, GIB, 1))
    pools = sharding.dealt([node("a", 2), node("b", 2), node("c", 8)], 60, 3, {small, large})
    assert [len(pool.nodes) for pool in pools] == [20] * 3 and sum(pool.free for pool in pools) == 240 * WHOLE
    assert len({each.name for pool in pools for each in pool.nodes}) == 60
    pools[1].able.discard(large)
    draw = random.Random(1)
    assert {tuple(sorted(sharding.drawn(pools, large, draw))) for _ in range(30)} == {(0, 2)}
    assert {index for _ in range(30) for index in sharding.drawn(pools, small, draw)} == {0, 1, 2}


def test_sharding_runs_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, pods, file = tmp_path / "nodes.csv", tmp_path / "pods.csv", tmp_path / "out.json"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu\na,64000,99,4\nb,64000,99,8\n")
    pods.write_text(
        "name,cpu_milli,memory_mib,num_gpu,creation_time,deletion_time\none,1,1,1,0,60\nthree,1,1,3,5,900\n"
    )
    command = ["sharding", "--nodes", str(nodes), "--pods", str(pods), "--count", "40", "--busy", "20"]
    monkeypatch.setattr(sys, "argv", [*command, "--pools", "1", "4", "--json", str(file)])
    sharding.main()
    found = json.loads(file.read_text())
    for pools in (found["1 pools"], found["4 pools"]):
        assert 0 <= pools["filled"]["unallocated_gpu_percent"] < 20
        assert 0 <= pools["busy"]["unallocated_gpu_percent"] < 30
        assert 0 <= pools["busy"]["mean_wait_seconds"] <= pools["busy"]["p99_wait_seconds"]
    one, four = (found[key]["filled"] for key in ("1 pools", "4 pools"))
    assert one["decisions_per_second_of_a_pool"] == one["decisions_per_second_of_all"]
    assert four["decisions_per_second_of_a_pool"] < four["decisions_per_second_of_all"]


def test_both_extract_the_same_layer(tmp_path: Path) -> None:
    extraction.triton_cache(tmp_path / "cache", 3, random.Random(1))
    report = Report("a benchmark")
    options = argparse.Namespace(turns=1)
    extraction.compare("triton", "triton", tmp_path / "cache", tmp_path, options, report)
    figures = report.values["triton"]
    assert figures["files"] == 24 and figures["ratio"] > 0 and len(figures["seconds"]["tar"]) == 1
    trees = [{path.name for path in each.rglob("*.json")} for each in tmp_path.iterdir() if each.name.startswith("tmp")]
    assert len(trees) == 4 and all({"k.json", "__grp__k.json"} <= each for each in trees)


@pytest.mark.parametrize(
    "name", ["admission", "extraction", "kueue", "placement", "predictions", "sharding", "strategies"]
)
def test_every_benchmark_tells_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    for module in [each for each in sys.modules if each.startswith(f"benchmarks.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
