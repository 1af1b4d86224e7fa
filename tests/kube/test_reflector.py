"""The reflector's list and watch against a server that forgets, disconnects, lies and talks nonsense."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kube.reflector
import kube.wire
from kube.reflector import Backoff, Change
from kube.resources import PODS
from tests.kube.fake_api import FakeApi
from tests.kube.reflector_rig import Impatient, Seen, Value, project, running


async def test_lists_and_watches() -> None:
    api = FakeApi()
    for name in "abc":
        api.put(PODS, name, "a", spec={"n": 1})
    async with running(api) as rig:
        await rig.watching()
        assert sorted(rig.reflector.items.values()) == [("a", 1), ("b", 1), ("c", 1)]
        assert rig.reflector.healthy()
        rig.put("a", 2)
        rig.remove("b")
        rig.put("b", 3)  # the same name, another object
        await rig.caught_up()
        assert sorted(rig.reflector.items.values())[:3] == [("a", 2), ("b", 3), ("c", 1)]
        assert rig.seen.kinds == ["added"] * 3 + ["modified", "deleted", "added", "added"]
        assert rig.reflector.relists == 0 and rig.reflector.events == 4
        with pytest.raises(TypeError):
            rig.reflector.items["x"] = ("x", 1)  # type: ignore[index]


async def test_a_lost_connection_goes_on_without_listing() -> None:
    async with running() as rig:
        await rig.watching()
        lists = rig.count(watch=False)
        for n in range(3):
            rig.put("a", n)
            await rig.caught_up()
            rig.api.drop_watches()
            rig.put("a", n + 10)
        rig.api.fail("reset", watch=True)
        rig.api.fail(status=503, watch=True)
        rig.api.drop_watches()
        rig.put("b", 1)
        await rig.caught_up()
        assert rig.count(watch=False) == lists
        assert rig.reflector.watch_restarts >= 4 and rig.reflector.relists == 0
        assert len(rig.reflector.items) == 3


async def test_forgotten_history_becomes_the_difference() -> None:
    async with running() as rig:
        await rig.watching()
        for name in ("stays", "changes", "goes", "drops"):
            rig.put(name, 1)
        await rig.caught_up()
        before = len(rig.seen.changes)
        rig.api.fail(status=503, watch=True, count=3)
        rig.api.drop_watches()
        rig.remove("goes")
        rig.put("changes", 2)
        rig.put("drops", -1)
        rig.put("comes", 1)
        rig.api.compact()
        await rig.caught_up()
        assert rig.reflector.relists == 1
        changes = rig.seen.changes[before:]
        named = sorted((c.kind, (c.new or c.old or ("", 0))[0]) for c in changes)
        assert named == [
            ("added", "comes"),
            ("deleted", "drops"),
            ("deleted", "goes"),
            ("modified", "changes"),
            ("modified", "marker"),
        ]


@pytest.mark.parametrize("as_event", [True, False])
async def test_410_in_the_stream_and_in_the_answer(as_event: bool) -> None:
    async with running(FakeApi(gone_as_event=as_event)) as rig:
        await rig.watching()
        rig.put("a", 1)
        await rig.caught_up()
        rig.api.expire_watches()
        rig.put("a", 2)
        rig.api.compact()
        await rig.caught_up()
        assert rig.reflector.relists >= 1 and rig.seen.kinds[:2] == ["added", "added"]


async def test_bookmarks_move_the_version_that_a_new_watch_begins_at() -> None:
    async with running() as rig:
        await rig.watching()
        rig.api.version += 50  # other collections were written to
        rig.api.bookmark(PODS)
        assert await rig.reflector.wait_for(rig.api.version, 5)
        rig.api.compact()
        rig.api.drop_watches()
        await rig.caught_up()
        assert rig.reflector.relists == 0
        assert rig.reflector.events == 1  # a bookmark is none


async def test_an_object_projected_to_none_counts_as_deleted() -> None:
    async with running() as rig:
        await rig.watching()
        for n in (-1, 1, -1, -1, 2):
            rig.put("a", n)
        await rig.caught_up()
        assert rig.seen.kinds == ["added", "deleted", "added", "added"]
        rig.remove("a")
        await rig.caught_up()
        assert list(rig.reflector._versions) == list(rig.reflector.items)


async def test_wait_for_gives_up() -> None:
    async with running() as rig:
        await rig.watching()
        assert not await rig.reflector.wait_for(rig.api.version + 1, 0.02)
        assert not rig.reflector._waiters


async def test_bad_events_are_got_over(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube.wire, "MAX_LINE", 4096)
    async with running() as rig:
        for bad in (
            b"<html>\n",
            b'{"type": "ADDED", "object": {}}\n',
            b'{"type": "ADDED", "object": {"metadata": {"uid": "u", "resourceVersion": "x"}}}\n',
            b'{"type": "ADDED", "object": {"metadata": 7}}\n',
            b'{"type": "BOOKMARK", "object": {"metadata": {}}}\n',
            b'{"type": "UNHEARD", "object": {"metadata": {"uid": "u", "resourceVersion": "1"}}}\n',
            b'{"type": "ERROR", "object": {"code": 500}}\n',
            b'{"type": "ERROR", "object": {"code": 418, "details": 3}}\n',
            b"x" * 5000,
        ):
            await rig.watching()
            rig.api.send_raw(bad)
            await rig.caught_up()
        assert rig.reflector.relists >= 3  # garbage, 418 and the line too long would come again
        assert rig.reflector.errors == 4
    assert "ignored an object" in caplog.text


async def test_callbacks_that_raise_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    def picky(obj: dict[str, Any]) -> Value | None:
        if obj["spec"]["n"] == 13:
            raise RuntimeError("unlucky")
        return project(obj)

    def fussy(change: Change[Value]) -> None:
        seen(change)
        if change.new and change.new[0] == "fussy":
            raise RuntimeError("no")

    api = FakeApi()
    api.put(PODS, "bad", "a", spec={"n": 13})
    async with running(api, project=picky, on_change=fussy) as rig:
        await rig.watching()
        rig.put("good", 1)
        rig.put("fussy", 1)
        uid = rig.put("turns", 1)
        rig.put("turns", 13)
        await rig.caught_up()
        assert rig.reflector.items[uid] == ("turns", 1)  # the last good state
        rig.api.expire_watches()
        await rig.caught_up()
        assert rig.reflector.items[uid] == ("turns", 1)
        rig.put("turns", 2)
        await rig.caught_up()
        assert rig.reflector.items[uid] == ("turns", 2)
        assert {name for name, _ in rig.reflector.items.values()} == {"good", "fussy", "turns", "marker"}
    assert "project failed for a/bad" in caplog.text
    assert not seen.wrong


async def test_failures_back_off_and_a_good_watch_forgives(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeApi()
    api.fail(status=500, watch=False, count=5)
    async with running(api) as rig:
        await rig.watching()
        assert rig.backoff.asked == [1, 2, 3, 4, 5]
        await rig.caught_up()
        rig.api.fail(status=500, watch=True, count=2)
        rig.api.drop_watches()
        await rig.watching()
        await rig.caught_up()
        assert rig.backoff.asked[5:] == [1, 1, 2]  # lost, refused, refused
        assert rig.reflector.last_error is None
    assert "injected 500" in caplog.text


async def test_the_first_answer_after_a_silence_is_not_made_to_wait() -> None:
    async with running() as rig:
        await rig.watching()
        rig.api.fail(status=503, watch=True, count=4)
        rig.api.fail(status=410, watch=True)
        rig.api.drop_watches()
        async with asyncio.timeout(5):
            while len(rig.backoff.asked) < 6 or not rig.api.watching:
                await asyncio.sleep(0.002)
        assert rig.backoff.asked == [1, 2, 3, 4, 5, 1]  # lost, unavailable four times, too old


async def test_an_accepted_watch_is_contact_before_it_brings_anything() -> None:
    async with running() as rig:
        await rig.watching()
        rig.api.fail(status=500, watch=True, count=2)
        rig.api.drop_watches()
        before = rig.reflector.last_contact or 0.0
        async with asyncio.timeout(5):
            while len(rig.backoff.asked) < 3 or not rig.api.watching or rig.reflector.last_error is not None:
                await asyncio.sleep(0.002)
        assert (rig.reflector.last_contact or 0.0) > before
        assert rig.seen.changes == []


async def test_a_server_that_ends_every_watch_at_once_is_not_hammered() -> None:
    async with running(watch_seconds=0, backoff=Impatient(base=0.05, cap=0.4)) as rig:
        await rig.reflector.synced.wait()
        await asyncio.sleep(0.4)
        assert rig.count(watch=True) < 40  # some 1000 without the backoff


async def test_the_servers_wish_to_wait_is_honoured() -> None:
    api = FakeApi()
    api.fail(status=429, reason="TooManyRequests", headers={"Retry-After": "1"})
    async with running(api) as rig:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rig.reflector.synced.wait(), 0.6)
        await asyncio.wait_for(rig.reflector.synced.wait(), 5)


async def test_pages_that_expire_are_fetched_again_and_never_in_one_piece(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeApi()
    for n in range(5):
        api.put(PODS, f"p{n}", "a", spec={"n": n})
    api.fail(status=410, reason="Expired", contains="continue=", count=5)
    with caplog.at_level(logging.INFO):
        async with running(api) as rig:
            await asyncio.wait_for(rig.reflector.synced.wait(), 5)
            assert len(rig.reflector.items) == 5
    assert all("limit=2" in path for _, path, _ in api.requests if "watch=" not in path)
    assert "list again" in caplog.text


async def test_metadata_only_and_selectors() -> None:
    def names(obj: dict[str, Any]) -> Value | None:
        assert "spec" not in obj
        return obj["metadata"]["name"], 0

    async with running(metadata_only=True, label_selector="mine=yes", project=names) as rig:
        await rig.watching()
        rig.put("a", 1, labels={"mine": "yes"})
        rig.put("b", 1)
        rig.put("a", 1, labels={})
        rig.put("a", 1, labels={"mine": "yes"})
        assert await rig.reflector.wait_for(rig.api.version, 5)
        assert rig.seen.kinds == ["added", "deleted", "added"]


def test_backoff_is_jittered_and_capped() -> None:
    backoff = Backoff()
    for failures, top in ((1, 0.2), (3, 0.8), (50, 30.0), (10_000, 30.0)):
        delays = [backoff.delay(failures) for _ in range(200)]
        assert 0 <= min(delays) < top / 4 and top * 3 / 4 < max(delays) <= top


# --- any sequence of events and accidents ---

NAMES = st.sampled_from("abcde")
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, st.integers(-1, 3)),
    st.tuples(st.just("put"), NAMES, st.integers(-1, 3)),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("label"), NAMES, st.booleans()),
    st.tuples(st.just("pause"), st.sampled_from([0.001, 0.005])),
    st.tuples(st.just("settle")),
    st.tuples(
        st.sampled_from(
            ["compact", "drop", "expire", "bookmark", "garbage", "cut", "500 list", "410 page", "reset", "500 watch"]
        )
    ),
)


async def _live(steps: list[tuple[Any, ...]], gone_as_event: bool, selective: bool, from_start: bool) -> None:
    api = FakeApi(gone_as_event=gone_as_event)
    accidents: dict[str, Callable[[], Any]] = {
        "compact": api.compact,
        "drop": api.drop_watches,
        "expire": api.expire_watches,
        "bookmark": lambda: api.bookmark(PODS),
        "garbage": lambda: api.send_raw(b"\x00garbage\n"),
        "cut": lambda: [api.send_raw(data) for data in (b'{"type":"MODIF', b"")],  # type: ignore[func-returns-value]
        "500 list": lambda: api.fail(status=500, watch=False),
        "410 page": lambda: api.fail(status=410, reason="Expired", contains="continue="),
        "reset": lambda: api.fail("reset"),
        "500 watch": lambda: api.fail(status=500, watch=True),
    }
    chosen: dict[str, Any] = {"label_selector": "mine=yes"} if selective else {}
    async with running(api, **chosen) as rig:
        labels: dict[str, str] = {"mine": "yes"}
        if from_start:
            await rig.watching()
        for step, *args in steps:
            key = ("a", args[0] if args else "")
            old = api.objects(PODS).get(key)
            if step == "put":
                api.put(PODS, args[0], "a", spec={"n": args[1]}, metadata={} if old else {"labels": labels})
            elif step == "label" and old:
                api.put(PODS, args[0], "a", spec=old["spec"], metadata={"labels": labels if args[1] else {}})
            elif step == "remove" and old:
                rig.remove(args[0])
            elif step == "pause":
                await asyncio.sleep(args[0])
            elif step == "settle":
                api.put(PODS, "marker", "a", spec={"n": api.version}, metadata={"labels": labels})
                assert await rig.reflector.wait_for(api.version, 10), rig.reflector.last_error
            elif step in accidents:
                accidents[step]()
        api.put(PODS, "marker", "a", spec={"n": api.version}, metadata={"labels": labels})
        assert await rig.reflector.wait_for(api.version, 10), rig.reflector.last_error
        truth = {
            obj["metadata"]["uid"]: project(obj)
            for obj in api.objects(PODS).values()
            if project(obj) is not None and (not selective or obj["metadata"]["labels"])
        }
        assert dict(rig.reflector.items) == truth
        assert rig.seen.state == truth
        assert not rig.seen.wrong
        assert set(rig.reflector._versions) == set(truth)
        assert rig.reflector.resource_version == api.version


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(STEPS, max_size=30), gone_as_event=st.booleans(), selective=st.booleans(), from_start=st.booleans()
)
def test_whatever_happens_the_picture_is_the_truth(
    steps: list[tuple[Any, ...]], gone_as_event: bool, selective: bool, from_start: bool
) -> None:
    asyncio.run(_live(steps, gone_as_event, selective, from_start))


async def test_a_kind_that_the_server_does_not_know_is_an_empty_picture_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kube.reflector, "_UNKNOWN", 0.02)
    api = FakeApi()
    unknown = api.fail(status=404, reason="NotFound", count=3)
    async with running(api, optional=True) as rig:
        await asyncio.wait_for(rig.reflector.synced.wait(), 5)
        assert not rig.reflector.items and rig.reflector.last_error is None and rig.reflector.healthy()
        uid = rig.put("a")
        async with asyncio.timeout(5):
            while uid not in rig.reflector.items:
                await asyncio.sleep(0.002)
        assert unknown.count == 0 and rig.backoff.asked == []


async def test_one_that_must_be_there_is_waited_for() -> None:
    api = FakeApi()
    api.fail(status=404, reason="NotFound", count=2)
    async with running(api) as rig:
        await asyncio.wait_for(rig.reflector.synced.wait(), 5)
        assert rig.backoff.asked == [1, 2]
