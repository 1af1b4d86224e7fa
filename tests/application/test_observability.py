"""What an operator sees: metrics under their exact names, probes, JSON logs, traces, search attributes."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest

from activities.messages import placement_id, workload_id
from activities.signatures import CARRY_OUT
from tests.application.collector import Collector
from tests.application.tenant import Tenant, eventually

pytestmark = pytest.mark.stack


def get(tenant: Tenant, port: str, path: str) -> str:
    url = f"http://127.0.0.1:{tenant.stack.endpoints.ports[port]}{path}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


async def test_metrics_have_the_exact_names(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("good")
    await tenant.until("good", phase="Succeeded")
    bad = await tenant.apply("bad", exit_code=1, retryPolicy={"maxRetries": 1, "backoffSeconds": 1})
    await tenant.until("bad", phase="Failed")
    await tenant.history(bad["metadata"]["uid"])  # the last look is counted when it is over
    text = await asyncio.to_thread(get, tenant, "worker-metrics", "/metrics")
    lines = [line for line in text.splitlines() if not line.startswith("#")]

    def sample(series: str) -> float:
        found = [line for line in lines if line.startswith(series + " ")]
        assert found, f"{series} is not among the metrics"
        return float(found[0].rsplit(" ", 1)[1])

    assert sample('warp_gpuworkload_scheduled_total{strategy="leastLoaded"}') >= 3
    assert sample('warp_gpuworkload_failed_total{reason="job_failed"}') >= 2
    assert sample('warp_gpuworkload_retries_total{reason="job_failed"}') >= 1
    assert sample('warp_gpuworkload_reconcile_duration_seconds_count{result="end"}') >= 1
    assert sample('warp_gpuworkload_time_to_placement_seconds_count{strategy="leastLoaded"}') >= 2
    assert sample("berth_queue_depth") >= 0
    assert sample("berth_last_round_timestamp_seconds") > 1e9


async def test_a_controller_says_whether_it_leads_and_what_its_webhooks_lack(tenant: Tenant) -> None:
    async def told() -> bool:
        lines = (await asyncio.to_thread(get, tenant, "controller-metrics", "/metrics")).splitlines()
        return {"berth_leading 1.0", "berth_webhooks_trouble 0.0"} <= set(lines)

    await eventually(told, 40, lambda: "it does not lead, or its webhooks lack something")


async def test_probes_answer(tenant: Tenant) -> None:
    for process in ("controller", "worker"):
        for path in ("/healthz", "/readyz"):
            assert await asyncio.to_thread(get, tenant, f"{process}-health", path) == "ok\n"


async def test_a_trace_leads_from_the_watch_event_to_the_job(tenant: Tenant, collector: Collector) -> None:
    await tenant.node("a", 1)
    raw = await tenant.apply("w")
    uid = raw["metadata"]["uid"]
    await tenant.until("w", phase="Succeeded")

    def told() -> set[tuple[str, str]]:
        return {(s.service, s.name) for s in collector.spans if s.trace == uid.replace("-", "")}

    async def joined() -> bool:
        return {("berth-controller", "watch GPUWorkload"), ("berth-worker", "create Job")} <= told()

    await eventually(joined, 20, lambda: f"of {len(collector.spans)} spans its trace has only {told()}")


async def test_logs_are_json_and_carry_the_workflow_id(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w")
    await tenant.until("w", phase="Succeeded")

    def logged(process: str) -> list[dict[str, Any]]:
        lines = tenant.stack.log_file(process).read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]  # what comes after the last is not a whole line yet

    def about_it() -> list[dict[str, Any]]:
        return [entry for entry in logged("worker") if f" {tenant.namespace}/w: " in entry["message"]]

    async def told() -> bool:
        return bool(about_it())

    await eventually(told, 10, lambda: "the worker's log does not say that it ended")
    (line,) = about_it()
    assert line["workflowId"] == placement_id("default")
    assert line["runId"] and line["activity"] == CARRY_OUT
    assert "Succeeded, Completed" in line["message"]
    for process in ("controller", "worker"):
        entries = logged(process)
        assert entries, f"{process} has logged nothing"
        assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)


async def test_workflows_are_found_by_their_search_attributes(tenant: Tenant) -> None:
    node = await tenant.node("a", 1)
    uid = (await tenant.apply("w", run="8s"))["metadata"]["uid"]
    await tenant.until("w", phase="Running")
    query = (
        f'BerthKind = "GPUWorkload" AND BerthNamespace = "{tenant.namespace}" AND BerthName = "w" '
        f'AND BerthNode = "{node}" AND BerthPhase = "{{}}"'
    )

    async def found(phase: str) -> bool:
        executions = [e.id async for e in tenant.temporal.list_workflows(query.format(phase))]
        return executions == [workload_id(uid)]

    assert not await tenant.followed(uid), "there is nothing to decide about it yet"
    await tenant.evict("w")
    await tenant.until("w", phase="Running", attempt=1)
    await eventually(lambda: found("Running"), 15, lambda: "not found while it runs again")
    await tenant.until("w", phase="Succeeded")
    await eventually(lambda: found("Succeeded"), 15, lambda: "not found once it ended")
