"""berth as it is deployed: both processes under their own identities on the embedded stack, with simulated nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio

from berth.cli.application import after_up, application_processes
from stack import Stack, UpOptions
from tests.application.clock import Clock
from tests.application.collector import Collector
from tests.application.stories import Begun, Places, Stories, side_by_side
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def long_stories(
    request: pytest.FixtureRequest, deployed: Stack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Begun]:
    """The stories of the modules `test_long_*` of which a test was chosen: each waits for minutes, all wait together.

    They go on only while a test of the session's loop is awaited, so nothing else comes between these modules.
    """
    places = Places(deployed, tmp_path_factory.mktemp, asyncio.Lock())
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = {test.path: test.module for test in tests if "long_stories" in test.fixturenames}
    stories: Stories = {}
    for module in chosen.values():
        stories |= module.begin(places)
    async with side_by_side(stories) as begun:
        yield begun
