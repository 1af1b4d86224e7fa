"""The controller process: what its webhooks lack is told, and keeps it from nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import ClientConnectorError, ClientSession

from berth.candidate import candidate_name
from berth.controller_process import LEASE, serve
from berth.process import ProcessOptions
from crds.settings import SETTINGS_NAMESPACE
from kube.resources import GPUWORKLOADS, LEASES
from tests.controller.fake_temporal import FakeTemporal
from tests.controller.webhook_rig import PLAIN, bundle, installed, post, question, stored, trusting
from tests.kube.fake_api import FakeApi, Fault


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Process:
    def __init__(self, health: int, webhook: int, temporal: FakeTemporal) -> None:
        self.health, self.webhook, self.temporal = health, webhook, temporal

    async def ready(self) -> tuple[int, str]:
        try:
            async with ClientSession() as session, session.get(f"http://127.0.0.1:{self.health}/readyz") as answer:
                return answer.status, await answer.text()
        except ClientConnectorError:
            return 0, "it does not listen yet"

    async def says(self, *words: str) -> None:
        """Waits until it is ready and notes these words, and if there are none, nothing."""
        said: tuple[int, str] = 0, ""
        async with asyncio.timeout(15):
            while not (said[0] == 200 and all(word in said[1] for word in words) and (words or said[1] == "ok\n")):
                said = await self.ready()
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(api: FakeApi) -> AsyncIterator[Process]:
    health, metrics, webhook = free_ports(3)
    options = ProcessOptions(health_port=health, metrics_port=metrics, bind="127.0.0.1")
    temporal = FakeTemporal()
    async with await api.client() as kube:
        task = asyncio.create_task(
            serve(kube, cast(Any, temporal), options, resync=600.0, webhook_port=webhook), name="controller"
        )
        try:
            yield Process(health, webhook, temporal)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as running:
        yield running


async def pokes(process: Process, api: FakeApi, name: str) -> None:
    """Its own work goes on: somebody hears of a new workload."""
    process.temporal.started.clear()
    api.put(GPUWORKLOADS, name, "team-a", spec=PLAIN)
    async with asyncio.timeout(10):
        while not process.temporal.started:
            await asyncio.sleep(0.02)


async def test_with_all_it_needs_it_notes_nothing_and_answers(api: FakeApi) -> None:
    installed(api, "https://localhost:1")
    async with running(api) as process:
        async with asyncio.timeout(15):
            while "tls.crt" not in stored(api):
                await asyncio.sleep(0.02)
        await process.says()
        url = f"https://localhost:{process.webhook}/validate"
        status, _ = await post(url, question(), trusting(bundle(api)))
        assert status == 200


async def test_without_the_manifests_or_the_rights_it_does_all_else_and_says_what_is_missing(api: FakeApi) -> None:
    denied = Fault(status=403, reason="Forbidden", contains="/secrets", count=10**6)
    api.faults.append(denied)
    async with running(api) as process:
        await process.says("note: admission webhooks: waiting for the first list of secrets (", "403")
        await pokes(process, api, "first")
        api.faults.remove(denied)
        await process.says("webhook configurations berth-webhooks are not installed (deploy/webhooks)")
        await pokes(process, api, "second")


async def test_it_does_not_wait_for_the_lease_of_one_that_crashed_here(api: FakeApi) -> None:
    crashed = candidate_name().rpartition(".")[0] + ".1"  # a process of this number that was there before
    api.put(LEASES, LEASE, SETTINGS_NAMESPACE, spec={"holderIdentity": crashed, "leaseDurationSeconds": 600})
    async with running(api) as process:
        await process.says("webhook configurations berth-webhooks are not installed")  # so says who leads
        await pokes(process, api, "first")
