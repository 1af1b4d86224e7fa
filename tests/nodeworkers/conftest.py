"""What Prometheus reads of a node's process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import metrics
from prometheus_client import CollectorRegistry, generate_latest

from berth.telemetry import meter_provider
from nodeworkers import metrics as node_metrics

Read = Callable[[], dict[str, float]]


@pytest.fixture
def scraped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """The series as they are scraped; the module's instruments are made anew, for a registry of the test's own."""
    registry = CollectorRegistry()
    provider = meter_provider(registry)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    importlib.reload(node_metrics)

    def scrape() -> dict[str, float]:
        lines = generate_latest(registry).decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("berth_")]
        return {name: float(value) for name, value in pairs}

    yield scrape
    provider.shutdown()
    monkeypatch.undo()
    importlib.reload(node_metrics)
