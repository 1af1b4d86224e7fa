"""The workflow of a kernel cache loses nothing that it is told, whenever that comes, and stays small."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.exceptions import ActivityError, RetryState

from activities.cache_signatures import CacheLook, CacheLooked, CacheState
from activities.messages import Poke
from berth.converter import data_converter
from planning.caches.orders import CacheRef, NodeOrder, Report
from planning.caches.rollout import Aim, Member, Rollout, Sent, Step, Target, applied, reported
from workflows import kernel_cache
from workflows.kernel_cache import KernelCache

REF = CacheRef("TritonKernelCache", "ns", "llama", "u")
DIGEST = "sha256:" + "a" * 64
TARGET = Target("registry.example/team/cache", DIGEST)
AIM = Aim("registry.example/team/cache:v1", TARGET, 0.0, TARGET)
FAILED = ActivityError(
    "no answer",
    scheduled_event_id=1,
    started_event_id=1,
    identity="",
    activity_type="look_at_cache",
    activity_id="1",
    retry_state=RetryState.TIMEOUT,
)


class AnewError(Exception):
    """Stands for what continue_as_new raises."""


def order(node: str, epoch: int) -> Sent:
    return Sent(node, "key", NodeOrder(epoch, "prepare", TARGET.image, DIGEST, 1))


def ready(node: str, epoch: int) -> Report:
    return Report(node, epoch, "ready", DIGEST, "Verified", "signed by release")


class World:
    """What a cache sees of Temporal. `looks`: what each look finds; `during` and `between`: what happens in the n-th
    look and the n-th sleep.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: CacheLooked | Exception) -> None:
        self.looks = list(looks)
        self.asked: list[CacheLook] = []
        self.slept: list[float | None] = []
        self.during: dict[int, Callable[[], None]] = {}
        self.between: dict[int, Callable[[], None]] = {}
        self.full = False
        self.phases: list[Any] = []
        self.details = ""
        self.workflow = KernelCache(CacheState(REF))
        stands_in = SimpleNamespace(
            execute_local_activity=self._execute,
            wait_condition=self._sleep,
            set_current_details=lambda text: setattr(self, "details", text),
            upsert_search_attributes=self.phases.append,
            info=lambda: SimpleNamespace(is_continue_as_new_suggested=lambda: self.full),
            continue_as_new=self._anew,
        )
        monkeypatch.setattr(kernel_cache, "workflow", stands_in)

    def _anew(self, state: CacheState) -> None:
        raise AnewError(state)

    async def _execute(self, _: str, look: CacheLook, **__: object) -> CacheLooked:
        self.asked.append(look)
        self.during.get(len(self.asked), lambda: None)()
        await asyncio.sleep(0)
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def _sleep(self, woken: Callable[[], bool], *, timeout: float | None, timeout_summary: str) -> None:
        self.slept.append(timeout)
        self.between.get(len(self.slept), lambda: None)()
        await asyncio.sleep(0)
        if not woken():
            raise TimeoutError

    @property
    def members(self) -> dict[str, Member]:
        return dict(self.workflow._state.rollout.members)

    async def run(self) -> str:
        return await self.workflow.run(CacheState(REF))


def looked(*orders: Sent, within: float | None = 600.0) -> CacheLooked:
    return CacheLooked("Preparing", "…", Step(AIM, orders=orders), within=within)


OVER = CacheLooked("Deleted", "gone", Step(AIM), over=True)


async def test_an_answer_that_is_here_before_its_orders_look_is_over_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, looked(order("a", 7)), OVER)
    world.during[1] = lambda: world.workflow.report(ready("a", 7))
    assert await world.run() == "Deleted"
    assert world.members["a"].outcome == "ready"
    assert world.asked[1].rollout.members["a"].outcome == "ready", "and it is looked at once more"


async def test_an_answer_between_looks_wakes_and_one_to_another_order_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, looked(order("a", 7)), looked(), OVER)

    def old() -> None:
        world.workflow.report(ready("a", 6))
        assert not world.workflow._poked

    world.between[1] = old
    world.between[2] = lambda: world.workflow.report(ready("a", 7))
    await world.run()
    assert world.asked[1].rollout.members["a"].outcome == ""
    assert world.asked[2].rollout.members["a"].outcome == "ready"


async def test_answers_outlive_a_look_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, looked(order("a", 7)), FAILED, OVER)
    world.between[1] = lambda: world.workflow.poke(Poke({"nodes": 5}))
    world.during[2] = lambda: world.workflow.report(ready("a", 7))
    await world.run()
    assert world.asked[2].rollout.members["a"].outcome == "ready"
    assert world.asked[2].fresh == {"nodes": 5}


async def test_a_node_that_changes_while_it_is_told_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, looked(order("a", 7), order("b", 7)), looked(order("a", 8)), looked(), OVER)

    def both() -> None:
        world.workflow.recheck("a")
        world.workflow.recheck("a")
        world.workflow.recheck("stranger")

    world.between[1] = both
    world.during[2] = lambda: world.workflow.recheck("a")
    await world.run()
    assert [look.rechecked for look in world.asked] == [[], ["a"], ["a"], ["a"]]


async def test_a_node_that_cannot_be_told_yet_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, looked(order("a", 7)), FAILED, looked(), OVER)
    world.between[1] = lambda: world.workflow.recheck("a")
    await world.run()
    assert [look.rechecked for look in world.asked] == [[], ["a"], ["a"], ["a"]]


async def test_what_is_carried_over_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, looked(order("a", 7)))

    def much() -> None:
        world.workflow.report(ready("a", 7))
        world.workflow.recheck("a")
        world.workflow.poke(Poke({"nodes": 9}))
        world.full = True

    world.between[1] = much
    with pytest.raises(AnewError) as anew:
        await world.run()
    state = anew.value.args[0]
    assert (state.rechecked, state.seen) == (["a"], {"nodes": 9})
    assert state.rollout.members["a"].outcome == "ready" and state.rollout.epoch == 7


async def test_a_cache_on_a_thousand_nodes_that_complain_is_carried_in_less_than_a_mebibyte() -> None:
    aim = Aim("r" * 600, TARGET, 1e9, TARGET, TARGET, DIGEST, "w" * 512, "u" * 30)
    for complaint in ('"' * 4000, "\0" * 4000, "日" * 4000, "\U0001f600" * 4000, "ü" * 4000):
        rollout = Rollout(aim)
        names = [f"ip-10-0-{number:04}.eu-central-1.compute.internal" for number in range(1000)]
        rollout = applied(rollout, Step(aim, orders=tuple(order(name, 1_700_000_000_000) for name in names)))
        for name in names:
            said = Report(name, 1_700_000_000_000, "retrying", DIGEST, "R" * 500, complaint, 12)
            rollout = reported(rollout, said)
        (payload,) = await data_converter.encode([CacheState(REF, rollout, {"nodes": 2**40}, names)])
        assert len(payload.data) < 2**20, len(payload.data)
        assert rollout.members[names[0]].message.startswith(complaint[:1].replace("\0", " "))
