"""The webhooks of one process against a pretended API server: what they know, what it costs, and what they wait for."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from controller.webhooks import service
from controller.webhooks.material import SECRET_NAME, SECRET_NAMESPACE, Material
from controller.webhooks.server import Server
from controller.webhooks.service import DEFAULT, PREFER_GROUP, VALIDATE, Webhooks
from crds.settings import SETTINGS_KEY, SETTINGS_NAME, SETTINGS_NAMESPACE
from kube.resources import (
    CONFIGMAPS,
    DEVICECLASSES,
    GPUQUOTAS,
    GPURESERVATIONS,
    NAMESPACES,
    NODES,
    RESOURCESLICES,
    SECRETS,
)
from planning.naming import STRATEGY_ANNOTATION
from tests.controller.test_app import until
from tests.controller.webhook_rig import (
    HOST,
    PLAIN,
    fresh,
    post,
    question,
    quota_question,
    reservation_question,
    trusting,
)
from tests.kube.fake_api import FakeApi, Fault
from tests.planning.devices.test_prefer_group import SEAT, pod

GOOD = fresh()


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as running:
        yield running


def has_certificate(api: FakeApi, material: Material = GOOD) -> None:
    api.put(SECRETS, SECRET_NAME, SECRET_NAMESPACE, data=material.data())


def namespace(api: FakeApi, name: str, strategy: str) -> None:
    api.put(NAMESPACES, name, metadata={"annotations": {STRATEGY_ANNOTATION: strategy}})


@asynccontextmanager
async def running(api: FakeApi, port: int = 0) -> AsyncIterator[Webhooks]:
    async with await api.client() as kube:
        webhooks = Webhooks(kube, "127.0.0.1", port)
        task = asyncio.create_task(webhooks.run())
        try:
            yield webhooks
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def ask(webhooks: Webhooks, path: str, body: bytes, material: Material = GOOD) -> dict[str, Any]:
    await until(lambda: bool(webhooks.server.addresses))
    url = f"https://{HOST}:{webhooks.server.addresses[0][1]}{path}"
    status, answer = await post(url, body, trusting(material.authorities))
    assert status == 200
    return dict(orjson.loads(answer)["response"])


async def test_an_answer_costs_no_request(api: FakeApi) -> None:
    has_certificate(api)
    namespace(api, "team-a", "headroom")
    async with running(api) as webhooks:
        patch = (await ask(webhooks, DEFAULT, question()))["patch"]
        assert orjson.loads(base64.b64decode(patch))[0]["value"] == "headroom"
        before = len(api.requests)
        for number in range(50):
            spec = {**PLAIN, "schedulingStrategy": "nope"} if number % 2 else PLAIN
            assert (await ask(webhooks, VALIDATE, question(spec)))["allowed"] is not (spec != PLAIN)
            await ask(webhooks, DEFAULT, question())
        assert len(api.requests) == before


async def test_what_changes_in_the_cluster_counts_at_once(api: FakeApi) -> None:
    has_certificate(api)
    async with running(api) as webhooks:
        assert "patch" not in await ask(webhooks, DEFAULT, question())
        namespace(api, "team-a", "headroom")
        await until(lambda: webhooks.installation.namespace_strategies == {"team-a": "headroom"})
        assert "patch" in await ask(webhooks, DEFAULT, question())
        api.put(NAMESPACES, "team-a", metadata={"annotations": None})
        await until(lambda: webhooks.installation.namespace_strategies == {})
        wants = question({**PLAIN, "resources": {"limits": {"example.com/gpu": "1"}}})
        assert (await ask(webhooks, VALIDATE, wants))["allowed"]
        text = "gpuResource: example.com/gpu"
        api.put(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE, data={SETTINGS_KEY: text})
        await until(lambda: webhooks.installation.settings.gpu_resource == "example.com/gpu")
        assert not (await ask(webhooks, VALIDATE, wants))["allowed"]
        api.put(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE, data={SETTINGS_KEY: "gpuResource: ["})
        api.put(NAMESPACES, "marker", metadata={"annotations": {STRATEGY_ANNOTATION: "random"}})
        await until(lambda: webhooks.settings_map.resource_version >= api.version - 1)
        assert not (await ask(webhooks, VALIDATE, wants))["allowed"], "the last valid settings stay in force"


async def test_gpuquotas_are_held_against_those_that_are_there(api: FakeApi) -> None:
    has_certificate(api)
    closing = quota_question("q", {"cohort": "p"})
    async with running(api) as webhooks:
        told = await ask(webhooks, VALIDATE, closing)
        warned = "spec.cohort: there is no GPUQuota p; until then it neither lends nor borrows"
        assert (told["allowed"], told["warnings"]) == (True, [warned])
        api.put(GPUQUOTAS, "p", spec={"cohort": "q"})
        await until(lambda: bool(webhooks.quotas.items))
        before = len(api.requests)
        told = await ask(webhooks, VALIDATE, closing)
        assert (told["allowed"], told["status"]["message"]) == (False, "spec.cohort: q → p → q is a circle")
        assert len(api.requests) == before


async def test_gpureservations_are_held_against_the_nodes_and_the_clock(api: FakeApi) -> None:
    has_certificate(api)
    spec = {"gpus": 3, "namespaces": ["ns"], "start": "2030-01-01T00:00:00Z", "end": "2030-01-02T00:00:00Z"}
    async with running(api) as webhooks:
        told = await ask(webhooks, VALIDATE, reservation_question("r", spec))
        assert told["status"]["message"] == "spec.gpus: the 0 nodes that match its nodeSelector have 0 GPUs"
        api.put(NODES, "n", status={"allocatable": {"nvidia.com/gpu": "4", "example.com/gpu": "2"}})
        await until(lambda: bool(webhooks.nodes.items))
        assert (await ask(webhooks, VALIDATE, reservation_question("r", spec)))["allowed"]
        api.put(GPURESERVATIONS, "first", spec=spec)
        await until(lambda: bool(webhooks.reservations.items))
        told = await ask(webhooks, VALIDATE, reservation_question("r", spec))
        assert told["status"]["message"].startswith("spec.gpus: with GPUReservation first 6 GPUs would be reserved")
        past = {**spec, "start": "2020-01-01T00:00:00Z", "end": "2020-01-02T00:00:00Z"}
        told = await ask(webhooks, VALIDATE, reservation_question("r", past))
        assert told["status"]["message"].startswith("spec.end: 2020-01-02T00:00:00Z is past; it is 20")


async def test_the_settings_say_what_a_gpu_is_before_nodes_are_counted(api: FakeApi) -> None:
    has_certificate(api)
    api.put(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE, data={SETTINGS_KEY: "gpuResource: example.com/gpu"})
    api.put(NODES, "n", status={"allocatable": {"nvidia.com/gpu": "4", "example.com/gpu": "2"}})
    async with running(api) as webhooks:
        await until(lambda: webhooks.nodes.synced.is_set())
        assert [view.allocatable.gpus for view in webhooks.installation.nodes] == [2]


async def test_a_renewed_certificate_is_served_as_soon_as_it_is_seen(api: FakeApi) -> None:
    has_certificate(api)
    async with running(api) as webhooks:
        await ask(webhooks, VALIDATE, question())
        webhooks.renewed.clear()
        other = fresh()
        has_certificate(api, other)
        async with asyncio.timeout(3):
            await webhooks.renewed.wait()
        assert (await ask(webhooks, VALIDATE, question(), other))["allowed"]


async def test_without_a_certificate_it_listens_nowhere_and_says_so(
    api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(api) as webhooks:
        await until(lambda: "there is no certificate in Secret berth-system/" in webhooks.trouble)
        assert webhooks.server.addresses == []
        has_certificate(api, Material(GOOD.authorities, "", GOOD.certificate, "garbage"))
        await until(lambda: "cannot be used" in webhooks.trouble)
        has_certificate(api)
        assert (await ask(webhooks, VALIDATE, question()))["allowed"]
        await until(lambda: webhooks.trouble == "")
    told = [record.getMessage() for record in caplog.records if record.name.startswith("controller.webhooks")]
    assert any("cannot be used" in line for line in told) and any("listen on port" in line for line in told)
    assert "have stopped" in told[-1]


async def test_a_right_that_is_missing_is_waited_for(api: FakeApi) -> None:
    has_certificate(api)
    denied = Fault(status=403, reason="Forbidden", contains="/secrets", count=10**6)
    api.faults.append(denied)
    async with running(api) as webhooks:
        await until(lambda: bool(webhooks.secret.last_error))
        assert "secrets" in str(webhooks.secret.last_error)
        assert webhooks.namespaces.synced.is_set()
        assert webhooks.server.addresses == []
        api.faults.remove(denied)
        await until(lambda: bool(webhooks.server.addresses), 10)


async def test_a_port_that_is_taken_is_waited_for(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PORT_PAUSE", 0.05)
    has_certificate(api)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        context = running(api, port)
        webhooks = await context.__aenter__()
        await until(lambda: f"cannot listen on port {port}" in webhooks.trouble)
    await until(lambda: bool(webhooks.server.addresses))
    assert (await ask(webhooks, VALIDATE, question()))["allowed"]
    await until(lambda: webhooks.trouble == "")
    await context.__aexit__(None, None, None)


async def test_a_server_that_is_closed_while_it_begins_leaves_no_port_taken() -> None:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port: int = chosen.getsockname()[1]
    for steps in range(20):
        server = Server("127.0.0.1", port, {})
        listening = asyncio.create_task(server.listen())
        for _ in range(steps):
            await asyncio.sleep(0)
        listening.cancel()
        await asyncio.wait([listening])
        await server.close()
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
    assert not listening.cancelled(), "every moment was tried"


def seat_slice(resource: str, driver: str = "devices.kyb.ai") -> dict[str, Any]:
    return {"driver": driver, "devices": [{"name": "s1", "attributes": {"resource": {"string": resource}}}]}


async def test_a_preferred_group_is_claimed_only_where_some_node_offers_such_seats_by_dra(api: FakeApi) -> None:
    has_certificate(api)
    api.put(DEVICECLASSES, "berth-gpu-2x-seat", spec={"extendedResourceName": SEAT})
    api.put(RESOURCESLICES, "cards", spec=seat_slice("nvidia.com/gpu"))
    api.put(RESOURCESLICES, "others", spec=seat_slice(SEAT, driver="gpu.example.com"))
    body = question(kind={"group": "", "version": "v1", "kind": "Pod"}, object=pod())
    async with running(api) as webhooks:
        assert "patch" not in await ask(webhooks, PREFER_GROUP, body), "the claim would never be served"
        api.put(RESOURCESLICES, "seats", spec=seat_slice(SEAT))
        await until(lambda: bool(webhooks.seat_slices.items))
        assert "patch" in await ask(webhooks, PREFER_GROUP, body)


@pytest.mark.parametrize("spec", [None, 7, {"driver": "devices.kyb.ai", "devices": [3, {"attributes": 1}, {}]}])
def test_a_slice_that_is_none_has_no_seats(spec: object) -> None:
    assert service.seats_in_slice({"spec": spec}) is None
