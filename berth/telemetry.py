"""Logs, metrics and traces of a berth process: JSON lines that carry the workflow id, Prometheus text, OTLP spans."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from functools import cache

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from prometheus_client import REGISTRY, CollectorRegistry
from temporalio import activity, workflow
from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

from activities.tracing import trace_begun

ANSWER_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0)
DURATION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WAIT_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class JsonLines(logging.Formatter):
    """One JSON object a line; inside an activity or a workflow it names the workflow, its run and the activity."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_origin(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _origin(record: logging.LogRecord) -> dict[str, str | None]:
    if activity.in_activity():
        doing = activity.info()
        return {
            "workflowId": doing.workflow_id,
            "runId": doing.workflow_run_id,
            "activity": doing.activity_type,
        }
    if workflow.in_workflow():
        running = workflow.info()
        return {"workflowId": running.workflow_id, "runId": running.run_id}
    # The SDK says by this of which workflow it speaks when it is not inside.
    told = getattr(record, "temporal_workflow", None)
    return {"workflowId": told["workflow_id"], "runId": told["run_id"]} if told else {}


def set_up_logging(level: str = "info") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # The SDK reports every failed activity attempt with its trace; the workflow's history has it already.
    logging.getLogger("temporalio.activity").setLevel(logging.ERROR)


@cache
def sdk_runtime() -> Runtime:
    """What the core of the SDK has to say becomes records like all others; by itself it writes coloured text."""
    core = LogForwardingConfig(logger=logging.getLogger("temporalio.core"), append_target_to_name=False)
    # The SDK's own choice: each line less is one that need not come over from Rust.
    chosen = TelemetryFilter(core_level="WARN", other_level="ERROR")
    return Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter=chosen, forwarding=core)))


def meter_provider(registry: CollectorRegistry = REGISTRY) -> MeterProvider:
    """Instruments made through OpenTelemetry's API are exposed by a registry of prometheus_client. Series carry the
    labels that the code gives them and no others, so that a query names them exactly.
    """
    buckets = {
        "warp_gpuworkload_reconcile_duration": DURATION_BUCKETS,
        "warp_gpuworkload_time_to_placement": WAIT_BUCKETS,
        "berth_decision_duration": DURATION_BUCKETS,
        "berth_admission_duration": ANSWER_BUCKETS,
        "berth_cache_extraction": WAIT_BUCKETS,
    }
    views = [
        View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(bounds))
        for name, bounds in buckets.items()
    ]
    return MeterProvider([PrometheusMetricReader(scope_info_enabled=False, registry=registry)], views=views)


def set_up_metrics() -> None:
    metrics.set_meter_provider(meter_provider())


class TraceIds(RandomIdGenerator):
    """Random ids, but a workload's own spans. UIDs are random too: sampling by trace id takes whole lives."""

    def generate_trace_id(self) -> int:
        return trace_begun() or super().generate_trace_id()


def set_up_traces(service: str) -> TracerProvider | None:
    """Spans go to an OTLP endpoint when the standard variables name one; else None. Whoever ends the process shuts the
    provider down, which sends what is left.
    """
    if not (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return None
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), id_generator=TraceIds(), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider
