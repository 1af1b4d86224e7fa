"""berth as it is deployed: both processes under their own identities on the embedded stack, with simulated nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from berth.cli.application import after_up, application_processes
from stack import Stack, UpOptions
from tests.application.clock import Clock
from tests.application.collector import Collector
from tests.application.tenant import Tenant, tenancy

# Short, so that tests need not wait half a minute for a bind deadline, nor a minute before anything may be preempted.
SETTINGS = {"bindDeadlineSeconds": 4, "minimumRuntimeSeconds": 2}


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    """The wall clock of controller and worker."""
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory, collector: Collector, clock: Clock) -> Iterator[Stack]:
    """One installation for all tests of this folder: each test has a namespace and nodes of its own."""
    stack = Stack(tmp_path_factory.mktemp("application"))
    options = UpOptions(end_with_caller=True, etcd_fsync=False)
    stack.up(
        options,
        processes=lambda endpoints: [
            replace(spec, env={**spec.env, **clock.environment, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint})
            for spec in application_processes(endpoints, options)
        ],
        after_up=lambda endpoints: after_up(endpoints, SETTINGS),
    )
    yield stack
    stack.down()


@pytest.fixture
async def tenant(deployed: Stack, request: pytest.FixtureRequest) -> AsyncIterator[Tenant]:
    async with tenancy(deployed, request.node.name.removeprefix("test_")) as mine:
        yield mine
        await mine.leave()
