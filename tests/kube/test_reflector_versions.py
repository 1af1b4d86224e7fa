"""Which version of an object counts when several are told: an own write's, a late event's, a restored server's."""

from __future__ import annotations

import asyncio
import copy

import orjson

from kube.resources import PODS
from tests.kube.reflector_rig import running


async def test_an_own_write_is_known_before_the_watch_brings_it() -> None:
    async with running() as rig:
        await rig.watching()
        rig.put("a", 1)
        await rig.caught_up()
        before, version = len(rig.seen.changes), rig.reflector.resource_version
        rig.api.drop_watches()
        written = rig.api.put(PODS, "a", "a", spec={"n": 2})
        rig.reflector.observe(written)
        assert [c.new for c in rig.seen.changes[before:]] == [("a", 2)]
        assert rig.reflector.resource_version == version, "how far the watch came is another matter"
        await rig.caught_up()
        mine = [c for c in rig.seen.changes[before:] if c.uid == written["metadata"]["uid"]]
        assert len(mine) == 1, "the watch brings the same version, which is no change any more"


async def test_an_answer_never_brings_back_what_is_older_gone_or_unreadable() -> None:
    async with running() as rig:
        await rig.watching()
        old = rig.api.put(PODS, "a", "a", spec={"n": 1})
        rig.put("a", 2)
        gone = rig.api.put(PODS, "b", "a", spec={"n": 1})
        rig.remove("b")
        await rig.caught_up()
        before = len(rig.seen.changes)
        gone["metadata"]["resourceVersion"] = str(rig.api.version + 9)
        newer = {"metadata": {**old["metadata"], "resourceVersion": str(rig.api.version + 9)}}
        for answer in (old, gone, newer, {}):
            rig.reflector.observe(answer)
        assert rig.seen.changes[before:] == []
        assert ("a", 2) in rig.reflector.items.values()


async def test_an_event_seen_before_is_ignored() -> None:
    async with running() as rig:
        await rig.watching()
        old = rig.api.put(PODS, "a", "a", spec={"n": 1})
        rig.put("a", 2)
        rig.api.send_raw(orjson.dumps({"type": "ADDED", "object": old}) + b"\n")
        await rig.caught_up()
        assert rig.seen.kinds == ["added", "modified", "added"]
        assert ("a", 2) in rig.reflector.items.values()


async def test_a_restored_backup_is_the_truth() -> None:
    async with running() as rig:
        await rig.watching()
        rig.put("a", 1)
        await rig.caught_up()
        rig.seen.versions.clear()
        rig.api.store.clear()
        rig.api.history.clear()
        rig.api.version = 90
        too_large = (
            b'{"type": "ERROR", "object": {"code": 504, "reason": "Timeout", '
            b'"details": {"causes": [{"reason": "ResourceVersionTooLarge"}]}}}\n'
        )
        rig.api.send_raw(too_large)
        async with asyncio.timeout(5):
            while rig.reflector.items:
                await asyncio.sleep(0.002)
        assert rig.reflector.resource_version == 90
        rig.seen.versions.clear()
        await rig.caught_up()


async def test_a_restored_backup_with_a_bumped_revision_is_the_truth_too() -> None:
    async with running() as rig:
        await rig.watching()
        rig.put("a", 1)
        saved = copy.deepcopy(rig.api.objects(PODS))
        rig.put("a", 2)
        await rig.caught_up()
        assert ("a", 2) in rig.reflector.items.values()
        rig.seen.versions.clear()
        rig.api.fail(status=503, watch=True, count=3)
        rig.api.drop_watches()
        rig.api.objects(PODS).clear()
        rig.api.objects(PODS).update(saved)  # at its old version, in a list that is far ahead
        rig.api.version += 1_000_000
        rig.api.compact()
        async with asyncio.timeout(5):
            while ("a", 1) not in rig.reflector.items.values():
                await asyncio.sleep(0.002)
