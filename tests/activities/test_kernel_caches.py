"""The look at a kernel cache: what is written against an object that changed, is gone or is another by now, what a
registry's refusal becomes, and that no look costs nodes their work.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment

from activities import kernel_caches
from activities.cache import StaleCacheError
from activities.cache_signatures import TellCache
from activities.kernel_caches import (
    AGAIN,
    ASK_SOON,
    ASKING,
    AT_A_TIME,
    CHANGED,
    PULL_AGAIN,
    SENDING,
    WRITE_AGAIN,
)
from images.endpoints import BadSettings
from images.errors import RegistryError
from kube.errors import AccessDenied, Conflict, Invalid, NotFound, Unavailable
from planning.caches.model import FINALIZER, FORCE_ANNOTATION
from planning.caches.orders import Report, node_cache_id
from planning.caches.rollout import Member, Rollout
from planning.caches.warmth import CacheUse
from planning.times import timestamp
from tests.activities.cache_world import IMAGE, REF, A, World


async def test_a_tag_is_resolved_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a", "b")
    await world.ready()
    assert world.server.finalizers == [FINALIZER]
    assert world.asked == 1
    assert {(name, order.image, order.digest) for name, order in world.temporal.orders} == {
        ("a", IMAGE, A),
        ("b", IMAGE, A),
    }
    written = len(world.server.statuses)
    await world.look()
    assert len(world.server.statuses) == written, "what is shown already is not written again"
    assert ("Normal", "Ready") in world.events.told


async def test_an_object_that_changed_before_its_finalizer_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a")
    world.server.fails["finalizers"] = Conflict("changed", request="patch")
    looked = await world.look()
    assert (looked.phase, looked.within, looked.step) == ("Changed", CHANGED, None)
    assert (world.asked, world.temporal.orders) == (0, [])
    await world.look()
    assert world.temporal.orders


async def test_nothing_is_written_on_another_object_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a")
    await world.ready()
    assert world.server.cache is not None
    world.server.cache["metadata"]["uid"] = "another"
    written = len(world.server.statuses)
    looked = await world.look()
    assert looked.over and world.temporal.orders[-1][1].task == "remove"
    assert len(world.server.statuses) == written and world.server.finalizers == [FINALIZER]


async def test_who_lost_its_finalizer_is_left_by_all_nodes_and_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, "a", "b")
    await world.ready()
    assert world.server.cache is not None
    world.server.cache["metadata"]["finalizers"] = ["example.com/other"]
    world.server.delete()
    looked = await world.look()
    assert (looked.phase, looked.over) == ("Deleted", True)
    assert {(name, order.task) for name, order in world.temporal.orders[-2:]} == {("a", "remove"), ("b", "remove")}


@pytest.mark.parametrize(
    ("failure", "within"),
    [
        (Conflict("changed", request="patch"), CHANGED),
        (NotFound("gone", request="patch"), CHANGED),
        (Invalid("bad", request="patch"), WRITE_AGAIN),
        (Unavailable("away", request="patch"), WRITE_AGAIN),
    ],
)
async def test_a_status_that_cannot_be_written_costs_no_node_its_work(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, within: float
) -> None:
    world = World(monkeypatch, "a")
    world.server.fails["status"] = failure
    looked = await world.look()
    assert looked.within == within and looked.step is not None and len(looked.step.orders) == 1
    assert (world.server.statuses, world.events.told) == ([], [])
    await world.look()
    assert len(world.temporal.orders) == 1 and world.server.statuses


async def test_deletion_waits_for_pods_with_a_reason_and_keeps_others_finalizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, "a")
    await world.ready()
    assert world.server.cache is not None
    world.server.cache["metadata"]["finalizers"].append("example.com/other")
    world.server.delete()
    assert not (await world.look()).over
    world.answer("a", "busy", pods=3)
    assert (await world.look()).phase == "InUse"
    assert world.condition("Ready") == ("False", "InUse")
    world.answer("a", "removed")
    world.server.fails["finalizers"] = Conflict("changed", request="patch")
    looked = await world.look()
    assert (looked.over, looked.within) == (False, CHANGED)
    assert (await world.look()).over
    assert world.server.finalizers == ["example.com/other"]


async def test_force_and_deleted_nodes_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a", "b")
    await world.ready()
    world.server.delete()
    await world.look()
    world.answer("a", "busy", pods=3)
    world.leave("b")
    assert not (await world.look()).over
    assert world.temporal.signals == [(node_cache_id("u", "b"), "dismiss")]
    assert world.server.cache is not None
    world.server.cache["metadata"]["annotations"] = {FORCE_ANNOTATION: "true"}
    assert (await world.look()).over
    assert world.server.cache is None


async def test_a_node_that_only_this_worker_has_not_seen_is_not_taken_for_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, "a")
    await world.ready()
    world.server.delete()
    await world.look()
    world.answer("a", "busy", pods=1)
    world.cache.nodes._remove("uid-a", 2)
    with pytest.raises(StaleCacheError, match="node a"):
        await world.look()
    assert world.server.finalizers == [FINALIZER]


async def test_after_all_was_lost_deletion_waits_for_what_nodes_show(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a")
    await world.ready()
    world.cache.cache_uses._put("s", 1, CacheUse("u", "ns", "llama", "a", ready=True, pods=2))
    world.rollout = Rollout()
    world.server.delete()
    looked = await world.look()
    assert not looked.over and world.temporal.orders[-1][1].task == "remove"
    world.answer("a", "removed")
    assert (await world.look()).over


REFUSED = RegistryError("unauthorized", IMAGE, "refused")


@pytest.mark.parametrize(
    ("failure", "reason", "within"),
    [
        (REFUSED, "RegistryRefused", PULL_AGAIN),
        (RegistryError("away", IMAGE, "429", retry_after=90.0), "RegistryAway", 90.0),
        (RegistryError("not_found", IMAGE, "404"), "ImageNotFound", PULL_AGAIN),
        (BadSettings("registries.proxy: x"), "SettingsRefused", AGAIN),
    ],
)
async def test_what_a_registry_refuses_is_told_and_not_asked_again_too_soon(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str, within: float
) -> None:
    world = World(monkeypatch, "a")
    world.registry = failure
    looked = await world.look()
    assert looked.within == pytest.approx(within, abs=1)
    assert world.condition("Error") == ("True", reason) and world.condition("Ready") == ("False", reason)
    assert ("Warning", reason) in world.events.told
    await world.look()
    assert world.asked == 1, "it was asked just now, whatever else pokes"
    world.server.spec(nodeSelector={})
    await world.look()
    assert world.asked == 2, "somebody changed something"
    refused = world.rollout.aim.refused
    assert refused is not None
    world.rollout = replace(world.rollout, aim=replace(world.rollout.aim, refused=replace(refused, until=time.time())))
    world.registry = A
    await world.look()
    assert world.asked == 3 and world.rollout.aim.refused is None and world.temporal.orders


async def test_a_registry_that_is_silent_holds_up_neither_the_look_nor_other_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_caches, "RESOLVE", 0.05)
    world = World(monkeypatch, "a")
    world.slow = 60.0
    looked = await world.look()
    assert world.condition("Error") == ("True", "RegistryAway") and looked.step is not None
    world.caches._asking = ASKING
    world.rollout = Rollout()
    assert (await world.look()).within == ASK_SOON
    assert world.asked == 1


async def test_a_thousand_nodes_are_told_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"n{number:04}" for number in range(1000)]
    world = World(monkeypatch, *names)
    await world.look()
    members = {name: Member(5, "k", A, "ready", A) for name in names}
    world.rollout = Rollout(world.rollout.aim, members, 5)
    world.server.delete()
    world.temporal.orders.clear()
    world.temporal.refuses["n0003"] = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
    monkeypatch.setattr(kernel_caches, "SENDING", 60.0)  # however slow the machine is
    with pytest.raises(RPCError):
        await world.look()
    assert len(world.temporal.orders) == 999, "one that fails keeps no other from being told"
    assert 1 < world.temporal.most <= 16


def slow_temporal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of a second by the look's clock for each order that Temporal takes."""
    clock = SimpleNamespace(time=time.time, monotonic=lambda: len(world.temporal.orders) / 8)
    monkeypatch.setattr(kernel_caches, "time", clock)


async def test_what_a_look_has_no_time_to_send_the_next_one_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *(f"n{number:02}" for number in range(60)))
    slow_temporal(world, monkeypatch)
    looked, looks = await world.look(), 1
    assert looked.step is not None and looked.within == CHANGED
    assert {sent.node for sent in looked.step.orders} == {node for node, _ in world.temporal.orders}
    assert 8 <= len(looked.step.orders) <= 8 + 2 * AT_A_TIME
    while looked.within == CHANGED:
        looked, looks = await world.look(), looks + 1
    told = [node for node, _ in world.temporal.orders]
    assert len(told) == len(set(told)) == 60 and looks > 2


async def test_a_look_that_has_no_time_at_all_sends_something(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *(f"n{number:02}" for number in range(60)))
    late = count(0.0, 2 * SENDING)
    monkeypatch.setattr(kernel_caches, "time", SimpleNamespace(time=time.time, monotonic=lambda: next(late)))
    looked = await world.look()
    assert looked.within == CHANGED and 1 <= len(world.temporal.orders) <= AT_A_TIME


async def test_nodes_let_go_in_as_many_looks_as_it_takes_but_at_once_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *(f"n{number:02}" for number in range(60)))
    await world.ready()
    world.server.delete()
    world.temporal.orders.clear()
    slow_temporal(world, monkeypatch)
    looked = await world.look()
    assert looked.within == CHANGED and 0 < len(world.temporal.orders) < 60
    assert world.server.cache is not None
    world.server.cache["metadata"]["annotations"] = {FORCE_ANNOTATION: "true"}
    assert (await world.look()).over
    assert len({node for node, _ in world.temporal.orders}) == 60, "nobody looks after that"


SECRET = {"kind": "Secret", "type": "kubernetes.io/dockerconfigjson", "data": {}}


@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        (None, "PullSecretMissing"),
        (AccessDenied("forbidden", request="get"), "PullSecretNotGranted"),
        (SECRET, "PullSecretRefused"),
    ],
)
async def test_a_pull_secret_that_cannot_be_had_is_told(
    monkeypatch: pytest.MonkeyPatch, secret: Any, reason: str
) -> None:
    world = World(monkeypatch, "a")
    monkeypatch.undo()  # the registry is not reached
    world.server.spec(ociImage={"image": f"{IMAGE}:v1", "pullSecret": "pull"})
    if secret is not None:
        world.server.objects["Secret", "pull"] = secret
    looked = await world.look()
    assert looked.within == pytest.approx(PULL_AGAIN, abs=1)
    assert world.condition("Error") == ("True", reason)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"ociImage": {"image": "NOT A REFERENCE"}}, "InvalidSpec"),
        ({"ociImage": {"image": "registry.example/UPPER:v1"}}, "InvalidSpec"),
        ({"ociImage": {"image": f"{IMAGE}:v1", "pullPolicy": "Never"}}, "NotResolved"),
    ],
)
async def test_a_spec_that_stands_for_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], reason: str
) -> None:
    world = World(monkeypatch, "a")
    world.server.spec(**spec)
    await world.look()
    assert world.condition("Error") == ("True", reason) and not world.temporal.orders


async def test_a_tag_that_is_followed_is_asked_for_again_at_its_interval_and_no_more_once_nobody_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, "a")
    image, follow = {"image": f"{IMAGE}:v1"}, {"type": "OnTagChange", "intervalSeconds": 300}
    world.server.spec(ociImage=image, updatePolicy=follow)
    assert (await world.look()).within == pytest.approx(300, abs=1)
    assert (await world.look()).within == pytest.approx(300, abs=1) and world.asked == 1
    aim = world.rollout.aim
    world.rollout = replace(world.rollout, aim=replace(aim, asked_at=aim.asked_at - 300))
    assert (await world.look()).within == pytest.approx(300, abs=1) and world.asked == 2
    world.rollout = replace(world.rollout, aim=replace(aim, asked_at=aim.asked_at - 300))
    world.server.spec(ociImage={**image, "pullPolicy": "Never"}, updatePolicy=follow)
    assert world.server.cache is not None
    world.server.cache["status"]["updated"] = timestamp(0)  # so that it need not wait to be written
    assert (await world.look()).within == AGAIN and world.asked == 2, "nothing is due, so nobody is in a hurry"


async def test_a_digest_is_nobodys_to_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a")
    world.server.spec(ociImage={"image": f"{IMAGE}@{A}"})
    await world.ready()
    assert world.asked == 0 and world.server.statuses[-1]["resolvedDigest"] == A


async def test_a_node_that_is_not_ready_is_counted_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "a")
    world.join("b", ready=False)
    await world.look()
    world.answer("a")
    assert (await world.look()).phase == "Preparing"
    assert world.server.statuses[-1]["counts"]["nodes"] == 2
    assert [name for name, _ in world.temporal.orders] == ["a"]


async def test_answers_go_to_the_cache_and_to_nobody_where_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    tell = TellCache(REF, Report("a", 1, "ready"))
    await ActivityEnvironment().run(world.caches.tell, tell)
    assert world.temporal.signals == [("kernelcache/u", "report")]
    world.temporal.refuses["kernelcache/u"] = RPCError("over", RPCStatusCode.NOT_FOUND, b"")
    await ActivityEnvironment().run(world.caches.tell, tell)
    world.temporal.refuses["kernelcache/u"] = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
    with pytest.raises(RPCError):
        await ActivityEnvironment().run(world.caches.tell, tell)
