"""Events: what is written, how repeats become a series, and that recording never blocks, grows or raises."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kube.client import KubeClient
from kube.events import EventRecorder, ObjectRef
from kube.reflector import Backoff
from kube.resources import EVENTS
from tests.kube.fake_api import FakeApi

POD = ObjectRef("v1", "Pod", "p", "a", "uid-p")


@pytest_asyncio.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


@pytest_asyncio.fixture
async def client(api: FakeApi) -> AsyncIterator[KubeClient]:
    async with await api.client() as client:
        yield client


def recorder(client: KubeClient, **options: Any) -> EventRecorder:
    return EventRecorder(client, "berth.dev/controller", "host-1", backoff=Backoff(0.001, 0.002), **options)


def record(to: EventRecorder, note: str = "no room", regarding: ObjectRef = POD) -> None:
    to.record(regarding=regarding, type="Warning", reason="Pending", action="Place", note=note)


def stored(api: FakeApi) -> list[dict[str, Any]]:
    return list(api.objects(EVENTS).values())


async def test_an_event_says_all_that_the_server_requires(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client)
    events.record(regarding=POD, type="Normal", reason="Placed", action="Place", note="on n")
    assert await events.flush(1)
    (event,) = stored(api)
    assert event["eventTime"].endswith("Z") and len(event["eventTime"]) == 27
    assert event["metadata"]["name"].startswith("p.") and event["metadata"]["namespace"] == "a"
    wanted = {"type": "Normal", "reason": "Placed", "action": "Place", "note": "on n"}
    assert wanted.items() <= event.items() and "series" not in event
    assert event["regarding"] == {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "a", "uid": "uid-p"}
    assert (event["reportingController"], event["reportingInstance"]) == ("berth.dev/controller", "host-1")


async def test_cluster_objects_and_odd_names(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client)
    record(events, regarding=ObjectRef("rbac.authorization.k8s.io/v1", "ClusterRole", "system:Odd" + "x" * 250))
    assert await events.flush(1)
    (event,) = stored(api)
    assert event["metadata"]["namespace"] == "default"
    assert event["metadata"]["name"].startswith("system-odd") and len(event["metadata"]["name"]) < 253


async def test_notes_are_cut_to_what_the_server_takes(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client)
    for note in ("x" * 1024, "x" * 1025, "ü" * 2000, "\ud800"):
        record(events, note)
    assert await events.flush(1)
    notes = [event["note"] for event in stored(api)]
    assert all(len(note.encode()) <= 1024 for note in notes)
    assert notes[0] == "x" * 1024 and notes[1].endswith("x…") and notes[2].endswith("ü…")


async def test_repeats_become_a_series(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client, repeat_seconds=0.15)
    task = asyncio.create_task(events.run())
    try:
        for _ in range(3):
            record(events)
        record(events, "another reason")
        async with asyncio.timeout(10):
            while len(stored(api)) < 2:
                await asyncio.sleep(0.005)
        assert sorted(event.get("series", {}).get("count", 1) for event in stored(api)) == [1, 3]
        began = time.monotonic()
        for _ in range(40):
            record(events)
            await asyncio.sleep(0.005)
        patches = len([r for r in api.requests if r[0] == "PATCH"])
        assert patches <= 1 + (time.monotonic() - began) / 0.15  # not one for each
        assert await events.flush(1)
        by_note = {event["note"]: event for event in stored(api)}
        assert by_note["no room"]["series"]["count"] == 43
        assert by_note["no room"]["series"]["lastObservedTime"] > by_note["no room"]["eventTime"]
        assert len(by_note) == 2 and events.dropped == 0
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_series_whose_event_expired_begins_anew(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client)
    record(events)
    assert await events.flush(1)
    api.remove(EVENTS, stored(api)[0]["metadata"]["name"], "a")
    record(events)
    assert await events.flush(1)
    assert stored(api)[0]["series"]["count"] == 2


async def test_the_queue_is_bounded(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client, queue_size=10)
    for n in range(25):
        record(events, f"note {n}")
    assert events.dropped == 15
    assert await events.flush(2)
    assert len(stored(api)) == 10 and events.written == 10


async def test_memory_of_series_is_bounded(client: KubeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kube.events._SERIES", 5)
    events = recorder(client)
    for n in range(25):
        record(events, f"note {n}")
    assert len(events._series) == 5
    assert await events.flush(2)


async def test_a_server_that_is_away_is_waited_for_but_not_for_ever(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client)
    record(events)
    api.fail(status=503, count=3)
    assert await events.flush(2)
    assert len(stored(api)) == 1 and events.dropped == 0
    record(events, "second")
    api.fail(status=503, count=100)
    assert await events.flush(2)
    assert events.dropped == 1


async def test_a_lost_answer_does_not_double_the_event(client: KubeClient, api: FakeApi) -> None:
    events = recorder(client)
    record(events)
    api.fail("lost", method="POST")
    assert await events.flush(2)
    assert len(stored(api)) == 1


async def test_refusals_and_hangs_do_no_harm(
    client: KubeClient, api: FakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    events = recorder(client)
    api.fail(status=403, reason="Forbidden", method="POST")
    record(events, "refused")
    record(events, "written")
    assert await events.flush(1)
    assert [event["note"] for event in stored(api)] == ["written"] and events.dropped == 1
    assert "was not written" in caplog.text
    api.fail("hang")
    record(events, "hangs")
    assert not await events.flush(0.1)
    assert await events.flush(1)  # nothing was lost by giving up
    assert len(stored(api)) == 2
