"""What Prometheus reads: exact names and labels, and buckets in which the durations can be told apart. What a log says:
every line is JSON, whoever writes it, and names the workflow that it is about.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from temporalio import activity
from temporalio.testing import ActivityEnvironment

from activities.tracing import workload_span
from berth.process import ProcessOptions, connect_temporal
from berth.telemetry import DURATION_BUCKETS, JsonLines, TraceIds, meter_provider, sdk_runtime


def test_series_carry_their_own_labels_only() -> None:
    registry = CollectorRegistry()
    provider = meter_provider(registry)
    meter = provider.get_meter("berth.worker")
    meter.create_counter("warp_gpuworkload_scheduled").add(1, {"strategy": "leastLoaded"})
    meter.create_gauge("berth_queue_depth").set(3)
    meter.create_histogram("berth_decision_duration", unit="s").record(0.02)
    lines = generate_latest(registry).decode().splitlines()
    provider.shutdown()
    assert 'warp_gpuworkload_scheduled_total{strategy="leastLoaded"} 1.0' in lines
    assert "berth_queue_depth 3.0" in lines
    bounds = [
        line.split('le="')[1].split('"')[0] for line in lines if "berth_decision_duration_seconds_bucket{" in line
    ]
    assert bounds == [*(str(b) for b in DURATION_BUCKETS), "+Inf"]
    assert "berth_decision_duration_seconds_count 1.0" in lines


def test_a_workload_s_spans_are_one_trace_in_every_process() -> None:
    uid = "0b2f9c0e-93f1-4c0a-9d51-3f3b2b1f6a77"
    told = InMemorySpanExporter()
    for process in ("controller", "worker"):
        provider = TracerProvider(id_generator=TraceIds())
        provider.add_span_processor(SimpleSpanProcessor(told))
        tracer = provider.get_tracer(process)
        with tracer.start_as_current_span("round"), workload_span(tracer, "look", uid, {"process": process}):
            pass
    first, round_of_it, second, _ = told.get_finished_spans()
    assert {s.context.trace_id for s in (first, second) if s.context} == {int(uid.replace("-", ""), 16)}
    assert dict(first.attributes or {}) == {"gpuworkload.uid": uid, "process": "controller"}
    assert first.parent is None and [link.context for link in first.links] == [round_of_it.context]
    assert round_of_it.context and round_of_it.context.trace_id != int(uid.replace("-", ""), 16)


@pytest.mark.parametrize("uid", ["u", "", "00000000-0000-0000-0000-000000000000"])
def test_a_span_of_what_has_no_uuid_begins_a_trace_of_its_own(uid: str) -> None:
    told = InMemorySpanExporter()
    provider = TracerProvider(id_generator=TraceIds())
    provider.add_span_processor(SimpleSpanProcessor(told))
    with workload_span(provider.get_tracer("t"), "look", uid):
        pass
    (span,) = told.get_finished_spans()
    assert span.context and span.context.is_valid and not span.links


def record(**extra: Any) -> logging.LogRecord:
    return logging.getLogger("some").makeRecord(
        "some", logging.INFO, "f.py", 1, "seen\nby %s", ("me",), None, extra=extra
    )


async def test_a_line_of_an_activity_names_its_workflow() -> None:
    @activity.defn
    async def look() -> str:
        return JsonLines().format(record())

    environment = ActivityEnvironment()
    line = await environment.run(look)
    assert "\n" not in line
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert said == {
        "level": "info",
        "logger": "some",
        "message": "seen\nby me",
        "workflowId": environment.info.workflow_id,
        "runId": environment.info.workflow_run_id,
        "activity": environment.info.activity_type,
    }


def test_a_line_of_the_sdk_about_a_workflow_names_it_too() -> None:
    said = json.loads(JsonLines().format(record(temporal_workflow={"workflow_id": "w", "run_id": "r"})))
    assert (said["workflowId"], said["runId"]) == ("w", "r")
    assert not {"workflowId", "runId", "activity"} & json.loads(JsonLines().format(record())).keys()


async def test_clients_use_the_runtime_whose_core_writes_to_the_log() -> None:
    temporal = await connect_temporal(ProcessOptions(temporal_address="127.0.0.1:1"))
    assert temporal.service_client.config.runtime is sdk_runtime()


MISREAD = """
import asyncio, json, logging, sys, time, warnings
from pathlib import Path
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner
from berth.telemetry import sdk_runtime, set_up_logging

@workflow.defn(name="GPUWorkload")
class Other:
    @workflow.run
    async def run(self, state: dict) -> str:
        logging.getLogger("workflows").info("at work")
        return "not what was recorded"

recorded = json.loads(Path(sys.argv[1]).read_text())
history = WorkflowHistory.from_json(recorded["workflowId"], recorded["history"])
set_up_logging()
warnings.warn("of Python", RuntimeWarning)
replayer = Replayer(workflows=[Other], workflow_runner=UnsandboxedWorkflowRunner(), runtime=sdk_runtime())
asyncio.run(replayer.replay_workflow(history, raise_on_replay_failure=False))
time.sleep(0.5)  # what comes over from Rust is a few milliseconds late
"""


def test_what_workflows_python_and_the_core_of_the_sdk_say_is_json() -> None:
    history = next((Path(__file__).parent.parent / "workflows" / "histories").glob("gpuworkload-succeeded--*.json"))
    done = subprocess.run(
        [sys.executable, "-c", MISREAD, str(history)], capture_output=True, text=True, check=True, timeout=60
    )
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.stdout == ""
    inside = [line for line in said if line["logger"] == "workflows"]
    assert inside and {line["workflowId"] for line in inside} == {json.loads(history.read_text())["workflowId"]}
    assert all(line["runId"] for line in inside)
    assert [line for line in said if line["logger"] == "py.warnings"]
    core = [line for line in said if line["logger"] == "temporalio.core"]
    assert core and {line["level"] for line in core} <= {"warning", "error"}
    assert "ondeterminis" in core[0]["message"]
