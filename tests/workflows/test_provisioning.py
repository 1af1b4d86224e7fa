"""The workflow of an order: what was made is taken back before anything else is done, whatever ends or replaces it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.exceptions import ActivityError, CancelledError, RetryState

from activities.messages import Poke, ProvisioningState
from activities.signatures import ARRANGE, Arranged, ArrangeRequest, TakeBack, WorkloadRef
from planning.model import Order
from workflows import provisioning
from workflows.provisioning import Provisioning

REF = WorkloadRef("u", "ns", "w")


def order(generation: int = 1) -> Order:
    return Order("u", "ns", "w", generation)


def wait(stage: Any = "ordered", attempt: int = 0) -> Arranged:
    return Arranged("wait", "waits", attempt, 300.0, stage)


def retry(attempt: int) -> Arranged:
    return Arranged("retry", "failed", attempt, 60.0)


OVER = Arranged("over", "over", 0)


class World:
    """What an order sees of Temporal. `looks`: what each look finds, in turn; `during`: what happens in each sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Arranged | Exception) -> None:
        self.looks, self.during = list(looks), dict[int, Callable[[], None]]()
        self.done: list[Any] = []
        self.slept: list[tuple[float, str]] = []
        self.meanwhile: Callable[[TakeBack], None] = lambda _: None
        self.workflow = Provisioning(ProvisioningState(REF))
        stands_in = SimpleNamespace(
            execute_local_activity=self._execute,
            wait_condition=self._sleep,
            random=lambda: random.Random(7),
            set_current_details=lambda _: None,
            time=lambda: 5.0,
            info=lambda: SimpleNamespace(is_continue_as_new_suggested=lambda: False),
        )
        self.temporal = stands_in
        monkeypatch.setattr(provisioning, "workflow", stands_in)

    async def _execute(self, name: str, request: Any, **_: object) -> Any:
        self.done.append(request)
        if name == ARRANGE:
            found = self.looks.pop(0)
            if isinstance(found, Exception):
                raise found
            return found
        self.meanwhile(request)
        return None

    async def _sleep(self, woken: Callable[[], bool], *, timeout: float, timeout_summary: str) -> None:
        self.slept.append((timeout, timeout_summary))
        self.during.get(len(self.slept), lambda: None)()
        await asyncio.sleep(0)
        if not woken():
            raise TimeoutError

    async def run(self) -> str:
        self.workflow.order(order())
        return await self.workflow.run(ProvisioningState(REF))

    @property
    def taken_back(self) -> list[tuple[int, int, str]]:
        return [(each.generation, each.attempt, each.state) for each in self.done if isinstance(each, TakeBack)]

    @property
    def looked(self) -> list[tuple[int, int, bool, str]]:
        """Generation, attempt, whether it is known to be made, what was told: of each look."""
        return [(r.generation, r.attempt, r.known, r.told) for r in self.done if isinstance(r, ArrangeRequest)]


async def test_an_order_is_followed_until_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, wait(), wait("accepted"), wait("provisioned"), OVER)
    world.during = {1: lambda: world.workflow.poke(Poke({"jobs": 7}))}
    assert await world.run() == "over"
    told = [told for _, _, _, told in world.looked]
    assert told == ["", "ordered", "accepted", "provisioned"]
    assert [known for _, _, known, _ in world.looked] == [False, True, True, True]
    assert world.taken_back == [(1, 0, "over")]
    assert world.done[1].fresh == {"jobs": 7}


async def test_a_poke_during_a_look_is_followed_by_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, wait(), OVER)
    real = world._execute

    async def poked(name: str, request: Any, **options: object) -> Any:
        if len(world.done) == 0:
            world.workflow.poke(Poke())
        return await real(name, request, **options)

    monkeypatch.setattr(world.temporal, "execute_local_activity", poked)
    woken: list[bool] = []

    async def sleep(condition: Callable[[], bool], **_: object) -> None:
        woken.append(condition())

    monkeypatch.setattr(world.temporal, "wait_condition", sleep)
    await world.run()
    assert woken == [True]


async def test_another_try_takes_the_last_one_back_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, wait(), retry(0), wait("provisioned", 1), retry(1), Arranged("fail", "failed", 2))
    assert await world.run() == "failed"
    assert world.taken_back == [(1, 0, ""), (1, 1, "ordered"), (1, 2, "failed")], "a booking that is void is news"
    assert [(attempt, known, told) for _, attempt, known, told in world.looked] == [
        (0, False, ""), (0, True, "ordered"), (1, False, ""), (1, True, "provisioned"), (2, False, ""),
    ]  # fmt: skip
    assert [entry for entry in world.slept if entry[1] == "back-off"] == [(60.0, "back-off")] * 2


async def test_news_does_not_shorten_a_back_off_but_another_order_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, retry(0), wait("ordered", 0), OVER)
    ends: list[bool] = []

    async def sleep(condition: Callable[[], bool], *, timeout_summary: str, **_: object) -> None:
        if timeout_summary == "back-off":
            world.workflow.poke(Poke())
            ends.append(condition())
            world.workflow.order(order(2))
            ends.append(condition())

    monkeypatch.setattr(world.temporal, "wait_condition", sleep)
    await world.run()
    assert ends == [False, True]


async def test_the_order_of_an_edited_workload_replaces_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, wait(), wait(), OVER)
    world.during = {1: lambda: world.workflow.order(order(2))}
    await world.run()
    assert world.taken_back == [(1, 0, "over"), (2, 0, "over")]
    assert [generation for generation, *_ in world.looked] == [1, 2, 2]
    assert world.looked[1] == (2, 0, False, "")


async def test_an_order_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, wait(), OVER)
    world.during = {1: lambda: world.workflow.order(order())}
    await world.run()
    assert world.taken_back == [(1, 0, "over")]


async def test_an_order_that_comes_while_the_last_one_ends_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger has heard of the end, and ordered again, before this workflow was closed."""
    world = World(monkeypatch, OVER, wait(), OVER)

    def again(back: TakeBack) -> None:
        if len(world.taken_back) == 1:
            world.workflow.order(order())

    world.meanwhile = again
    await world.run()
    assert world.looked == [(1, 0, False, ""), (1, 0, False, ""), (1, 0, True, "ordered")]
    assert world.taken_back == [(1, 0, "over"), (1, 0, "over")]


async def test_an_hour_without_an_answer_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, silence(), wait(), OVER)
    assert await world.run() == "over"


@pytest.mark.parametrize("where", ["look", "sleep"])
async def test_whoever_cancels_it_has_the_order_taken_back(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = silence()
    cancelled.__cause__ = CancelledError()
    world = World(monkeypatch, wait(), cancelled)
    if where == "sleep":

        def cancel() -> None:
            raise asyncio.CancelledError

        world.during = {1: cancel}
    with pytest.raises((ActivityError, asyncio.CancelledError)):
        await world.run()
    assert world.taken_back == [(1, 0, "failed")]


async def test_without_an_order_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert await world.workflow.run(ProvisioningState(REF)) == "no order was given" and not world.done


async def test_what_is_known_of_an_order_outlives_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    class ContinuedAsNew(Exception):
        pass

    def continue_as_new(state: ProvisioningState) -> None:
        raise ContinuedAsNew(state)

    world = World(monkeypatch, wait("accepted"))
    suggested = iter([False, True])
    full = SimpleNamespace(is_continue_as_new_suggested=lambda: next(suggested))
    monkeypatch.setattr(world.temporal, "info", lambda: full)
    monkeypatch.setattr(world.temporal, "continue_as_new", continue_as_new, raising=False)
    world.during = {1: lambda: world.workflow.poke(Poke({"jobs": 3}))}
    with pytest.raises(ContinuedAsNew) as continued:
        await world.run()
    (state,) = continued.value.args
    assert state == ProvisioningState(REF, 1, 0, True, "accepted", {"jobs": 3})


def silence() -> ActivityError:
    return ActivityError(
        "failed", scheduled_event_id=1, started_event_id=2, identity="", activity_type=ARRANGE, activity_id="1",
        retry_state=RetryState.TIMEOUT,
    )  # fmt: skip
