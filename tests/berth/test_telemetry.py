"""What Prometheus reads: exact names and labels, and buckets in which the durations can be told apart."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from berth.telemetry import DURATION_BUCKETS, meter_provider


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
