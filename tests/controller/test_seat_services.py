"""Services of seats against a pretended API server: what is written, when, and what nobody has to write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controller.seat_services import SeatServices
from kube.events import EventRecorder
from kube.resources import ENDPOINTSLICES, EVENTS, GPUSEATGROUPS, PODS, SERVICES
from planning.seats.endpoints import MANAGER, PORT_ANNOTATION, SERVICE_ANNOTATION
from planning.seats.migration import REPLACES
from tests.controller.test_app import until
from tests.kube.fake_api import FakeApi, Fault

SEAT = {"id": "kyb-G01-s1", "phase": "Parked", "port": 31000, "heldBy": {"namespace": "team", "pod": "llama-0"}}


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as running:
        yield running


@asynccontextmanager
async def running(api: FakeApi) -> AsyncIterator[SeatServices]:
    async with await api.client() as kube:
        events = EventRecorder(kube, "berth-controller", "test")
        services = SeatServices(kube, events)
        works = [services.run(), events.run(), *(each.run() for each in services.reflectors.values())]
        tasks = [asyncio.create_task(each) for each in works]
        try:
            yield services
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def service(api: FakeApi, name: str = "llama", **spec: Any) -> None:
    meta = {"annotations": {SERVICE_ANNOTATION: "app=llama"}}
    api.put(SERVICES, name, "team", metadata=meta, spec={"ports": [{"name": "http", "port": 80}]} | spec)


def pod(api: FakeApi, name: str = "llama-0", node: str = "n1") -> None:
    meta = {"labels": {"app": "llama"}, "annotations": {PORT_ANNOTATION: "8000"}}
    api.put(PODS, name, "team", metadata=meta, spec={"nodeName": node}, status={"hostIP": "10.0.0.1"})


def group(api: FakeApi, *seats: dict[str, Any], name: str = "n1.g01", **status: Any) -> None:
    api.put(GPUSEATGROUPS, name, spec={"nodeName": "n1", "group": "G01"}, status={"seats": list(seats)} | status)


def slices(api: FakeApi) -> dict[str, list[bool]]:
    """Whether each endpoint is ready, by the slice's name."""
    found = api.store.get(ENDPOINTSLICES.plural, {})
    return {name: [each["conditions"]["ready"] for each in raw["endpoints"]] for (_, name), raw in found.items()}


def written(api: FakeApi) -> int:
    return sum(method != "GET" and "endpointslices" in path for method, path, _ in api.requests)


async def test_a_service_follows_its_pods_seats(api: FakeApi) -> None:
    service(api)
    pod(api)
    async with running(api) as services:
        await services.groups.synced.wait()
        group(api, SEAT)
        await until(lambda: slices(api) == {"llama-seats-31000": [True]})
        group(api, SEAT | {"port": 31005})
        await until(lambda: slices(api) == {"llama-seats-31005": [True]})
        group(api)
        await until(lambda: slices(api) == {})


async def test_who_is_awake_is_no_news(api: FakeApi) -> None:
    service(api)
    pod(api)
    group(api, SEAT)
    async with running(api) as services:
        await until(lambda: bool(slices(api)))
        before = len(api.requests)
        for phase in ("Waking", "Active", "Draining", "Parking", "Parked"):
            group(api, SEAT | {"phase": phase}, active="kyb-G01-s1" if phase == "Active" else "")
        await until(lambda: services.groups.resource_version >= api.version)
        service(api, "marker")
        await until(lambda: "marker-seats-31000" in slices(api))
        mine = [path for _, path, _ in api.requests[before:] if "service-name%3Dllama" in path or "llama-seats" in path]
        assert mine == [], "neither looked at nor written"


async def test_while_requests_turn_to_another_somebody_is_ready_all_the_time(api: FakeApi) -> None:
    """Seen with kube-proxy: between two writes of two slices it refused requests, for nobody was ready."""
    service(api)
    pod(api)
    api.put(PODS, "llama-1", "team", metadata=moved_here(), spec={"nodeName": "n1"}, status={"hostIP": "10.0.0.1"})
    there = {"id": "kyb-G23-s1", "phase": "Active", "port": 31005, "heldBy": {"namespace": "team", "pod": "llama-1"}}
    group(api, SEAT, there)
    async with running(api):
        await until(lambda: slices(api) == {"llama-seats-31000": [True], "llama-seats-31005": [False]})
        before = len(api.requests)
        group(api, SEAT | {"passedOn": "10.0.0.1:31005"}, there)
        await until(lambda: slices(api) == {"llama-seats-31000": [False], "llama-seats-31005": [True]})
        writes = [path for method, path, _ in api.requests[before:] if method == "PATCH"]
        assert [path.rpartition("/")[2].partition("?")[0] for path in writes] == [
            "llama-seats-31005", "llama-seats-31000"
        ]  # fmt: skip
        before = len(api.requests)
        group(api, SEAT | {"port": 31010}, there | {"phase": "Absent", "heldBy": {}})
        await until(lambda: slices(api) == {"llama-seats-31010": [True]})
        made = [method for method, path, _ in api.requests[before:] if "endpointslices/" in path]
        assert made == ["PATCH", "DELETE", "DELETE"]


def moved_here() -> dict[str, Any]:
    return {"labels": {"app": "llama"}, "annotations": {PORT_ANNOTATION: "8000", REPLACES: "llama-0"}}


async def test_a_service_that_goes_takes_its_slices_along_and_others_stay(api: FakeApi) -> None:
    service(api)
    pod(api)
    group(api, SEAT)
    labels = {"kubernetes.io/service-name": "llama", "endpointslice.kubernetes.io/managed-by": "somebody-else"}
    api.put(ENDPOINTSLICES, "theirs", "team", metadata={"labels": labels}, endpoints=[])
    async with running(api):
        await until(lambda: "llama-seats-31000" in slices(api))
        api.remove(SERVICES, "llama", "team")
        await until(lambda: slices(api) == {"theirs": []})


async def test_a_service_that_cannot_be_served_says_so_once_and_loses_its_slices(api: FakeApi) -> None:
    service(api)
    pod(api)
    group(api, SEAT)
    async with running(api):
        await until(lambda: bool(slices(api)))
        service(api, selector={"app": "llama"})
        await until(lambda: slices(api) == {} and bool(api.store.get(EVENTS.plural)))
        (event,) = api.store[EVENTS.plural].values()
        assert event["reason"] == "NoSeatEndpoints" and "remove the selector" in event["note"]
        service(api)
        await until(lambda: bool(slices(api)))


async def test_what_the_api_server_does_not_take_is_tried_again(api: FakeApi) -> None:
    service(api)
    pod(api)
    group(api, SEAT)
    fault = Fault(status=403, reason="Forbidden", method="PATCH", contains="endpointslices", count=10**6)
    api.faults.append(fault)
    async with running(api) as services:
        await until(lambda: "403" in services.trouble)
        api.faults.remove(fault)
        await until(lambda: bool(slices(api)) and services.trouble == "")


async def test_after_a_restart_nothing_is_written_that_is_right(api: FakeApi) -> None:
    service(api)
    pod(api)
    group(api, SEAT)
    async with running(api):
        await until(lambda: bool(slices(api)))
    before = written(api)
    async with running(api):
        service(api, "marker")
        await until(lambda: "marker-seats-31000" in slices(api))
    assert written(api) == before + 1


async def test_a_slice_of_ours_that_is_too_many_goes_at_the_first_look(api: FakeApi) -> None:
    service(api)
    labels = {"kubernetes.io/service-name": "llama", "endpointslice.kubernetes.io/managed-by": MANAGER}
    api.put(ENDPOINTSLICES, "llama-seats-31999", "team", metadata={"labels": labels}, endpoints=[])
    async with running(api):
        await until(lambda: slices(api) == {})
