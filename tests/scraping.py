"""What Prometheus reads of one module's instruments, for tests of them: from a registry of the test's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from opentelemetry import metrics
from prometheus_client import CollectorRegistry, generate_latest

from berth.telemetry import meter_provider

Read = Callable[[], dict[str, float]]


@contextmanager
def scraping(module: ModuleType) -> Iterator[Read]:
    """Within the block the module's instruments are made anew; what it yields reads the series as they are scraped."""
    registry = CollectorRegistry()
    provider = meter_provider(registry)

    def scrape() -> dict[str, float]:
        lines = generate_latest(registry).decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("berth_")]
        return {name: float(value) for name, value in pairs}

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(metrics, "get_meter", provider.get_meter)
            importlib.reload(module)
            yield scrape
    finally:
        provider.shutdown()
        importlib.reload(module)
