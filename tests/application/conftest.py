"""berth as it is deployed: both processes under their own identities on the embedded stack, with simulated nodes."""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from berth.cli.application import after_up, application_processes
from berth.process import ProcessOptions, connect_temporal
from kube.client import KubeClient
from kube.errors import NotFound
from kube.resources import GPUWORKLOADS, NAMESPACES, NODES
from stack import Stack, UpOptions
from tests.application.clock import Clock
from tests.application.collector import Collector
from tests.application.tenant import Tenant

# Short, so that tests of the bind deadline need not wait half a minute.
SETTINGS = {"bindDeadlineSeconds": 4}


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
    endpoints = deployed.endpoints
    kubeconfig = endpoints.kubeconfig("admin")
    temporal = await connect_temporal(
        ProcessOptions(temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace)
    )
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    namespace = f"{words[:40].strip('-')}-{zlib.crc32(words.encode()):08x}"
    async with await KubeClient.connect(kubeconfig) as kube:
        await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        mine = Tenant(deployed, kube, temporal, namespace)
        yield mine
        # A failed test must not hand its load to the next one.
        for workload in (await kube.list(GPUWORKLOADS, namespace))[0]:
            try:
                await mine.delete(workload["metadata"]["name"])
            except NotFound:
                continue
        nodes, _ = await kube.list(NODES, label_selector=f"pool={namespace}")
        for node in nodes:
            await kube.delete(NODES, node["metadata"]["name"])
