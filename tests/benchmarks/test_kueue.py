"""The comparison with Kueue's baseline: that both sides are asked for the same, and what is read from their runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kueue import __main__ as program
from benchmarks.kueue import ours, peer
from benchmarks.kueue.control_plane import control_plane
from benchmarks.kueue.limited_worker import BURST, PER_SECOND, Bucket
from benchmarks.kueue.load import BASELINE, Load, Stream, quotas, workload
from benchmarks.kueue.outcome import Outcome, Usage
from benchmarks.kueue.runner import JobNews, Runner, completed, job_news, let_go
from berth.demo import measure
from crds.gpuworkload import GPUWorkloadSpec
from kube.errors import Forbidden
from kube.resources import JOBS
from planning.accelerators import NVIDIA
from planning.naming import CONTROLLER_LABEL, CONTROLLER_VALUE, FINALIZER, WORKLOAD_LABEL
from planning.views import job_view, node_view
from stack import StackError
from stack.tools import Toolbox
from tests.kube.fake_api import FakeApi

TINY = Load(1, 2, 20, 100, (Stream("small", 3, 10, 50, 50, 1), Stream("large", 1, 10, 100, 200, 20)))

# --- the load --------------------------------------------------------------------------------------------------------


def test_the_baseline_is_fifteen_thousand_workloads_of_which_capacity_alone_takes_a_minute() -> None:
    assert BASELINE.workloads == 15_000
    assert len(BASELINE.namespaces) == 30 and len(set(BASELINE.namespaces.values())) == 5
    assert BASELINE.shortest == 66.0  # 1,320 core seconds on 20 cores, which is longer than creating them


def test_less_of_it_is_as_many_queues_and_every_class() -> None:
    tenth = BASELINE.scaled(0.1)
    assert [stream.count for stream in tenth.streams] == [35, 10, 5]
    assert tenth.namespaces == BASELINE.namespaces
    assert [stream.count for stream in BASELINE.scaled(0.001).streams] == [1, 1, 1]
    assert BASELINE.scaled(1.0) == BASELINE


def test_both_sides_are_asked_for_the_same() -> None:
    sets = BASELINE.generator()["cohorts"][0]["queuesSets"][0]["workloadsSets"]
    for stream, theirs in zip(BASELINE.streams, sets, strict=True):
        asked = theirs["workloads"][0]
        spec, refused = GPUWorkloadSpec.parse(workload(stream, 7, "q-0-0", preemptible=False)["spec"])
        assert spec is not None and spec.resources is not None, refused
        assert (spec.gpu_count, spec.priority_value) == (1, asked["priority"])
        assert spec.resources.requests == {"cpu": str(asked["request"])}
        assert (theirs["count"], theirs["creationIntervalMs"]) == (stream.count, stream.interval_ms)


def test_every_queue_has_a_quota_behind_its_cohorts() -> None:
    made = quotas(TINY)
    assert [each["metadata"]["name"] for each in made] == ["cohort-0", "q-0-0", "q-0-1"]
    assert made[1]["spec"] == {
        "namespaces": ["q-0-0"], "cohort": "cohort-0", "nominal": {"cpu": "20"}, "borrowingLimit": {"cpu": "100"}
    }  # fmt: skip


# --- the peer --------------------------------------------------------------------------------------------------------


def harness(folder: Path, config: object) -> peer.Harness:
    file = folder / peer.HARNESS / "configs" / "baseline" / "generator.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(config))
    return peer.Harness(folder, folder)


def test_a_baseline_that_changed_upstream_is_refused(tmp_path: Path) -> None:
    peer.check_baseline(harness(tmp_path / "same", BASELINE.generator()))
    with pytest.raises(StackError, match=r"has changed.*\"count\": 6.*\n.*load\.py"):
        peer.check_baseline(harness(tmp_path / "other", replace(BASELINE, cohorts=4).generator()))


def test_the_limit_is_taken_out_of_the_program_or_it_is_said_that_there_is_none() -> None:
    assert peer.without_limit(f"a\n\t{peer.RATE}b\n") == "a\n\tkubeConfig.QPS = -1\nb\n"
    with pytest.raises(StackError, match=r"does not set 'kubeConfig\.QPS = 50'"):
        peer.without_limit("kubeConfig.QPS = 500\n")


def test_the_module_pins_one_version_of_kueue() -> None:
    assert "\nrequire sigs.k8s.io/kueue v0.18.4\n" in (peer.MODULE / "go.mod").read_text()
    assert all(f'"{peer.KUEUE}/{peer.HARNESS}/{name}"' in (peer.MODULE / "tools.go").read_text()
               for name in (peer.RUNNER, peer.LIMITED))  # fmt: skip


def test_the_peers_figures_are_its_harness_own() -> None:
    stats = {"wallMs": 2000, "userMs": 300, "sysMs": 100, "maxrss": 2048}
    classes = {
        "small": {"count": 6, "averageTimeToAdmissionMs": 1500, "totalEvictions": 2},
        "large": {"count": 2, "averageTimeToAdmissionMs": 250, "totalEvictions": 1},
    }
    usage = Usage(dict, frozenset(), cpu={"etcd": 1.0, "minimalkueue": 0.1})
    found = peer.outcome(stats, {"workloadClasses": classes}, usage, {"POST x": 8})
    assert (found.workloads, found.wall, found.per_second, found.evictions) == (8, 2.0, 4.0, 3)
    assert found.admission == {"small": 1.5, "large": 0.25}
    assert found.cpu == {"etcd": 1.0, "minimalkueue": 0.4} and found.durable_memory == 2 * 1024 * 1024


def test_the_peers_processes_are_found_once_kueue_runs(tmp_path: Path) -> None:
    child = tmp_path / "minimalkueue-unlimited"
    child.symlink_to("/bin/sleep")
    assert peer._family(os.getpid(), child.name) == {}
    with subprocess.Popen([child, "60"]) as running:
        try:
            deadline = time.monotonic() + 10
            while not (found := peer._family(os.getpid(), child.name)):
                assert time.monotonic() < deadline
            assert found["minimalkueue"] == running.pid and found["runner"] == os.getpid()
        finally:
            running.kill()


# --- what is measured ------------------------------------------------------------------------------------------------


def test_only_what_is_used_from_the_first_look_on_counts() -> None:
    usage = Usage(lambda: {"me": os.getpid(), "gone": 2**22 + 1}, frozenset({"me"}))
    usage.sample()
    assert usage.cpu == {"me": 0.0}
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    usage.sample()
    assert 0.05 <= usage.cpu["me"] < 5.0
    assert usage.together == usage.memory["me"] > 1024 * 1024


@given(st.lists(st.floats(0, 3), max_size=300))
def test_no_span_of_time_has_more_than_the_rate_and_a_burst(pauses: list[float]) -> None:
    bucket, now, granted = Bucket(PER_SECOND, BURST), 1000.0, []
    for pause in pauses:
        now += pause / 50
        granted.append(now + bucket.take(now))
    assert granted == sorted(granted)
    for first, at in enumerate(granted):
        for last in range(first, len(granted)):
            assert last - first + 1 <= BURST + PER_SECOND * (granted[last] - at) + 1e-6


def test_the_burst_is_free_and_the_rest_comes_at_the_rate() -> None:
    bucket = Bucket(50.0, 100)
    waits = [bucket.take(10.0) for _ in range(150)]
    assert waits[:100] == [0.0] * 100
    assert waits[149] == pytest.approx(1.0)


def test_what_the_runner_sees_of_jobs_and_workloads() -> None:
    meta: dict[str, Any] = {"namespace": "q", "name": "small-1-abc-0", "labels": {WORKLOAD_LABEL: "small-1"}}
    assert job_news({"metadata": meta}) == JobNews("q", "small-1-abc-0", "small-1", False)
    status = completed(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), 1.0)
    assert job_news({"metadata": meta, **status}).ended
    assert (status["status"]["startTime"], status["status"]["completionTime"]) == (
        "2026-01-02T03:04:04Z", "2026-01-02T03:04:05Z",
    )  # fmt: skip
    held = {"metadata": {"namespace": "q", "name": "small-1", "finalizers": [FINALIZER]}}
    assert let_go(held) == (("q", "small-1"), False)
    held["metadata"]["finalizers"] = ["other/one"]
    assert let_go(held) == (("q", "small-1"), True)


def test_what_the_runner_calls_complete_is_complete_to_berth() -> None:
    raw = {"metadata": {"labels": {"gpu.warp.dev/workload-uid": "u"}}, **completed(datetime.now(UTC), 1.0)}
    view = job_view(raw, NVIDIA)
    assert view is not None and view.finished == "Complete"


def test_a_static_node_is_ready_and_quotas_bind_before_it() -> None:
    view = node_view(ours.static_node("static-000"), "nvidia.com/gpu")
    assert view.ready and view.allocatable.gpus == 8
    assert view.labels["gpu.warp.dev/simulated"] == "true"
    cores = BASELINE.nominal * len(BASELINE.namespaces)
    assert ours.NODE_COUNT * view.allocatable.gpus >= cores  # one GPU each, and no workload has less than a core
    assert view.allocatable.cpu_milli / 8 >= 1000 * max(stream.cpu for stream in BASELINE.streams)


async def test_the_runner_gives_up_in_time_and_knows_how_far_it_came() -> None:
    """Nobody is there who would make Jobs of the workloads, but one."""
    async with FakeApi() as api, await api.client() as kube:
        runner = Runner(kube, TINY)
        name = "small-0-abc-0"
        labels = {WORKLOAD_LABEL: "small-0", CONTROLLER_LABEL: CONTROLLER_VALUE}
        body = {"metadata": {"name": name, "namespace": "q-0-0", "labels": labels}, "spec": {}}
        running = asyncio.create_task(runner.run(1.5))
        deadline = time.monotonic() + 1.0
        while ("q-0-0", "small-0") not in runner.created:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await kube.create(JOBS, body, "q-0-0")
        with pytest.raises(TimeoutError):
            await running
        assert len(runner.created) == 8 and set(runner.ended) == {("q-0-0", "small-0")} and not runner.done
        assert 0 <= runner.admission()["small"] < 1.5
        assert job_news(await kube.get(JOBS, name, "q-0-0")).ended


async def test_what_the_runner_cannot_write_ends_the_run() -> None:
    async with FakeApi() as api, await api.client() as kube:
        runner = Runner(kube, replace(TINY, streams=(Stream("small", 1, 10, 50, 50, 1),)))
        api.fail(method="PATCH", status=403, reason="Forbidden")
        labels = {WORKLOAD_LABEL: "small-0", CONTROLLER_LABEL: CONTROLLER_VALUE}
        running = asyncio.create_task(runner.run(20.0))
        await asyncio.sleep(0)
        body = {"metadata": {"name": "j", "namespace": "q-0-0", "labels": labels}, "spec": {}}
        await kube.create(JOBS, body, "q-0-0")
        with pytest.raises(Forbidden):
            await running


# --- the program -----------------------------------------------------------------------------------------------------


def outcome(wall: float) -> Outcome:
    waits = {"small": 3.0, "medium": 2.0, "large": 1.0}
    return Outcome(100, wall, waits, {"POST x": 600}, {"etcd": 1.0, "worker": 2.0}, {"worker": 9}, 50 * 1024 * 1024)


def test_the_table_has_both_sides_and_their_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, bool, int]] = []

    def berth(what: ours.Asked, _: Path) -> tuple[Outcome, ours.Details]:
        asked.append(("berth", what.limited, what.load.workloads))
        return outcome(5.0), ours.Details(4.0, 4.5, 0, measure.Histories((6, 6, 9), (1, 1, 1), 0, 50, 1000, 1))

    def kueue(_: peer.Harness, load: Load, *__: Path, limited: bool, timeout: float) -> Outcome:
        asked.append(("kueue", limited, load.workloads))
        return outcome(4.0)

    monkeypatch.setattr(ours, "run", berth)
    monkeypatch.setattr(peer, "run", kueue)
    built = harness(tmp_path, BASELINE.generator())
    monkeypatch.setattr(peer, "build", lambda: built)
    monkeypatch.setattr(Toolbox, "ensure", lambda *_: {})
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["kueue", "--scale", "0.1", "--json", str(file)])
    program.main()
    assert asked == [("kueue", True, 1500), ("berth", True, 1500), ("kueue", False, 1500), ("berth", False, 1500)]
    found = json.loads(file.read_text())
    assert found["equal"]["berth"]["per_second"] == 20.0 and found["unlimited"]["kueue"]["per_second"] == 25.0
    assert found["equal"]["berth"]["histories"]["events_mean"] == 7.0
    assert found["equal"]["kueue"]["writes_per_workload"] == 6.0
    shown = capsys.readouterr().out
    assert "Kueue 25.0; ratio 0.80" in shown and "no quotas" in shown


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "much"])
def test_a_share_that_is_none_is_refused(
    share: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kueue", "--scale", share])
    with pytest.raises(SystemExit):
        program.main()
    assert "--scale" in capsys.readouterr().err


@pytest.mark.stack
@pytest.mark.parametrize("limited", [True, False])
def test_berths_side_runs_to_the_end_and_counts_what_it_wrote(tmp_path: Path, limited: bool) -> None:
    found, details = ours.run(ours.Asked(TINY, limited, quotas=False, timeout=120.0), tmp_path)
    assert TINY.workloads == 8
    assert found.writes["POST jobs.batch"] == found.writes["PATCH jobs.batch/status"] == 8
    assert found.writes["POST gpuworkloads.gpu.warp.dev"] == 8 and "DELETE jobs.batch" not in found.writes
    assert set(found.cpu) == {"etcd", "kube-apiserver", "temporal", "controller", "worker", "runner"}
    assert set(found.admission) == {"small", "large"}
    assert 0 < details.admitted <= details.ended <= found.wall
    assert len(details.histories.events) == 8 and details.taken_back == 0


@pytest.mark.stack
def test_a_control_plane_that_cannot_start_tells_why(tmp_path: Path) -> None:
    programs = {"etcd": Path("/bin/false"), "kube-apiserver": Path("/bin/false")}
    with pytest.raises(StackError, match="false did not become ready"), control_plane(tmp_path / "plane", programs):
        pass
