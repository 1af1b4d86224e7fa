"""Orders to one node: the newest counts, each is answered to the cache's workflow, and long tries begin a new run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.exceptions import ActivityError, ApplicationError, RetryState

from activities.cache_signatures import NodeCacheState, TellCache
from planning.caches.orders import SUPERSEDED, CacheRef, NodeOrder, NodeTask, Outcome, Report
from workflows import node_kernel_cache
from workflows.node_kernel_cache import LATER, NodeKernelCache

REF = CacheRef("TritonKernelCache", "ns", "llama", "u")
DIGEST = "sha256:" + "a" * 64


class AnewError(Exception):
    """Stands for what continue_as_new raises."""


def order(epoch: int = 1, task: Any = "prepare") -> NodeOrder:
    return NodeOrder(epoch, task, "registry.example/team/cache", DIGEST if task == "prepare" else "", 1)


def answer(outcome: Outcome, epoch: int = 1, pods: int = 0, within: float = 0.0) -> Report:
    return Report("a", epoch, outcome, "", outcome.capitalize(), "…", pods, within)


def failed(cause: Exception | None = None) -> ActivityError:
    error = ActivityError(
        "failed",
        scheduled_event_id=1,
        started_event_id=1,
        identity="",
        activity_type="prepare_cache",
        activity_id="1",
        retry_state=RetryState.TIMEOUT,
    )
    error.__cause__ = cause
    return error


class World:
    """What the workflow sees of Temporal and the node. `answers`: what the node says, in turn, a callable: once that
    happened, and never; `untold`: how often telling fails; `between`: what happens in the n-th back-off.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *answers: Report | Exception | Callable[[], None],
        state: NodeCacheState | None = None,
    ) -> None:
        self.state = state or NodeCacheState(REF, "a")
        self.answers = list(answers)
        self.tasks: list[NodeTask] = []
        self.told: list[Report] = []
        self.untold = 0
        self.slept: list[float] = []
        self.between: dict[int, Callable[[], None]] = {}
        self.cancelled = 0
        self.full = False
        self.workflow = NodeKernelCache(self.state)
        stands_in = SimpleNamespace(
            start_activity=self._start,
            execute_local_activity=self._tell,
            wait_condition=self._wait,
            random=lambda: random.Random(7),
            set_current_details=lambda _: None,
            info=lambda: SimpleNamespace(is_continue_as_new_suggested=lambda: self.full),
            continue_as_new=self._anew,
        )
        monkeypatch.setattr(node_kernel_cache, "workflow", stands_in)

    def _anew(self, state: NodeCacheState) -> None:
        raise AnewError(state)

    def _start(self, _: str, task: NodeTask, **__: object) -> asyncio.Future[Report]:
        self.tasks.append(task)
        work: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        said = self.answers.pop(0)
        if isinstance(said, Report):
            work.set_result(said)
        elif isinstance(said, Exception):
            work.set_exception(said)
        else:
            said()
            work.add_done_callback(lambda done: setattr(self, "cancelled", self.cancelled + done.cancelled()))
        return work

    async def _tell(self, _: str, tell: TellCache, **__: object) -> None:
        await asyncio.sleep(0)
        if self.untold:
            self.untold -= 1
            raise failed()
        self.told.append(tell.report)

    async def _wait(
        self, woken: Callable[[], bool], *, timeout: float | None = None, timeout_summary: str = ""
    ) -> None:
        if timeout is not None:
            self.slept.append(timeout)
            self.between.get(len(self.slept), lambda: None)()
        await asyncio.sleep(0)
        if not woken():
            assert timeout is not None, "it would wait for ever"
            raise TimeoutError

    async def run(self, *orders: NodeOrder) -> str:
        for each in orders:
            self.workflow.order(each)
        return await self.workflow.run(self.state)

    @property
    def said(self) -> list[str]:
        return [report.outcome for report in self.told]


async def test_an_order_is_carried_out_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, answer("ready"))
    assert await world.run(order()) == "ready"
    assert (world.said, world.slept) == (["ready"], [])
    assert world.tasks == [NodeTask(REF, "a", order())]


async def test_of_several_orders_the_newest_counts_whichever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, answer("ready", 5))
    await world.run(order(3), order(5), order(4))
    assert [task.order.epoch for task in world.tasks] == [5]


async def test_a_newer_order_replaces_one_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda: world.workflow.order(order(2, "remove")), answer("removed", 2))
    assert await world.run(order()) == "removed"
    assert [task.order.task for task in world.tasks] == ["prepare", "remove"]
    await asyncio.sleep(0)
    assert world.cancelled == 1


async def test_what_fails_for_now_is_tried_again_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, *[answer("retrying", within=20.0)] * 7, answer("ready"))
    assert await world.run(order()) == "ready"
    assert world.said == ["retrying", "ready"], "what is said already is not told again"
    assert world.slept == sorted(world.slept) and world.slept[0] >= 20 and world.slept[-1] == 300


async def test_a_node_that_names_no_time_is_not_asked_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, answer("retrying"), answer("retrying"), answer("ready"))
    await world.run(order())
    assert min(world.slept) >= 1.0


async def test_a_removal_waits_for_pods_on_the_node_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    again = [answer("busy", pods=2), answer("busy", pods=1), answer("removed")]
    world = World(monkeypatch, *again)
    assert await world.run(order(1, "remove")) == "removed"
    assert [task.pods for task in world.tasks] == [-1, 2, 1]
    assert (world.said, world.slept) == (["busy", "busy", "removed"], [])


async def test_a_node_that_says_the_same_again_at_once_is_not_asked_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    again = [answer("busy", pods=2), answer("busy", pods=2), answer("removed")]
    world = World(monkeypatch, *again)
    await world.run(order(1, "remove"))
    assert len(world.slept) == 1 and world.said == ["busy", "removed"]


async def test_what_the_node_cannot_do_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, failed(ApplicationError("a bug", non_retryable=True)), answer("ready"))
    assert await world.run(order()) == "ready"
    assert world.told[0].outcome == "retrying" and "a bug" in world.told[0].message
    assert world.slept[0] >= LATER


async def test_an_order_older_than_one_that_the_node_has_begun_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, failed(ApplicationError("older", type=SUPERSEDED, non_retryable=True)))
    assert await world.run(order()) == "superseded"
    assert world.told == []


async def test_an_answer_that_could_not_be_told_for_an_hour_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, answer("ready"))
    world.untold = 2
    assert await world.run(order()) == "ready"
    assert world.said == ["ready"]


async def test_who_is_dismissed_says_that_the_order_was_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda: world.workflow.dismiss())
    assert await world.run(order(4)) == "dismissed"
    assert [(report.outcome, report.epoch) for report in world.told] == [("removed", 4)]
    idle = World(monkeypatch)
    idle.workflow.dismiss()
    assert (await idle.run(), idle.told) == ("dismissed", [])


async def test_long_tries_begin_a_new_run_that_knows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, answer("retrying", within=20.0), answer("retrying", within=20.0))
    world.between[2] = lambda: setattr(world, "full", True)
    with pytest.raises(AnewError) as anew:
        await world.run(order(3))
    state = anew.value.args[0]
    assert state == NodeCacheState(REF, "a", order(3), 2, -1, answer("retrying", within=20.0))
    new = World(monkeypatch, answer("retrying", within=20.0), answer("ready", 3), state=state)
    assert await new.run() == "ready"
    assert new.said == ["ready"] and new.slept[0] >= 80, "as long a wait as it had come to, and no word twice"


async def test_a_new_run_obeys_an_order_that_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    state = NodeCacheState(REF, "a", order(3), 5, -1, answer("retrying"))
    world = World(monkeypatch, answer("retrying", 4, within=20.0), answer("removed", 4), state=state)
    assert await world.run(order(2), order(4, "remove")) == "removed"
    assert [task.order.epoch for task in world.tasks] == [4, 4]
    assert world.slept[0] < 25, "its tries are its own"
