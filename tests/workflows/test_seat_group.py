"""A group's slot: one switch after the other, whatever comes meanwhile, and never two runs of one group at work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.exceptions import ActivityError, ApplicationError, RetryState

from activities.seat_signatures import GroupState
from planning.seats.orders import SUPERSEDED_RUN, TURN, GroupTask, Turned
from workflows import seat_group
from workflows.seat_group import LATER, SeatGroup

IDLE = Turned("Active", "kyb-G01-s1", reason="nobody waits")
SWITCH = Turned("Active", "kyb-G01-s2", switched=True, reason="s2 waits")
GONE = Turned("Empty", gone=True)


def failed(cause: Exception | None) -> ActivityError:
    error = ActivityError(
        "failed",
        scheduled_event_id=1,
        started_event_id=1,
        identity="",
        activity_type=TURN,
        activity_id="1",
        retry_state=RetryState.NON_RETRYABLE_FAILURE,
    )
    error.__cause__ = cause
    return error


class AnewError(Exception):
    """Stands for what continue_as_new raises."""


class World:
    """What the workflow sees of Temporal and its node. `answers`: what the node says in turn, a callable: once that
    happened, and never; `between`: what happens in the n-th wait, by default time passes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any, full: bool = False) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.waits: list[float | None] = []
        self.between: dict[int, Callable[[], None]] = {}
        self.details: list[str] = []
        self.cancelled = 0
        self.workflow = SeatGroup(GroupState("n", "G01"))
        stands_in = SimpleNamespace(
            start_activity=self._start,
            wait_condition=self._wait,
            set_current_details=self.details.append,
            info=lambda: SimpleNamespace(is_continue_as_new_suggested=lambda: full, run_id="r1"),
            continue_as_new=self._anew,
        )
        monkeypatch.setattr(seat_group, "workflow", stands_in)
        self.meanwhile: Callable[[], None] = lambda: None

    def _anew(self, state: GroupState) -> None:
        raise AnewError(state)

    def _start(self, name: str, task: GroupTask, *, task_queue: str, **_: object) -> Any:
        assert (name, task, task_queue) == (TURN, GroupTask("n", "G01", "r1"), "node-n-seats")
        self.asked += 1
        self.meanwhile()
        answer = self.answers.pop(0)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if callable(answer):
            answer()
        elif isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        future.add_done_callback(lambda each: setattr(self, "cancelled", self.cancelled + each.cancelled()))
        return future

    async def _wait(self, holds: Callable[[], bool], timeout: Any = "work", timeout_summary: str = "") -> None:
        if timeout == "work":
            assert holds(), "the workflow would wait for ever"
            return
        assert timeout_summary
        self.waits.append(None if timeout is None else timeout.total_seconds())
        if (happens := self.between.get(len(self.waits))) is not None:
            happens()
        if not holds():
            assert timeout is not None, "the workflow would wait for ever"
            raise TimeoutError

    async def run(self) -> str:
        return await self.workflow.run(GroupState("n", "G01"))


async def test_a_switch_is_one_activity_and_the_node_says_when_to_look_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, replace(SWITCH, within=12.5), IDLE, GONE)
    world.between[2] = world.workflow.news
    assert "no group G01" in await world.run()
    assert world.asked == 3
    assert world.waits == [12.5, None]


async def test_news_that_came_during_a_switch_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, SWITCH, GONE)
    world.meanwhile = world.workflow.news
    await world.run()
    assert world.waits == [None] and world.asked == 2, "it looks again at once, though the node did not ask for it"


async def test_a_node_that_cannot_carry_it_out_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, failed(ApplicationError("disk full")), GONE)
    await world.run()
    assert world.waits == [LATER.total_seconds()] and "disk full" in world.details[0]


async def test_a_run_that_a_node_took_for_an_older_one_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, failed(ApplicationError("…", type=SUPERSEDED_RUN)))
    with pytest.raises(AnewError):
        await world.run()


async def test_a_long_history_is_ended_between_two_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, SWITCH, full=True)
    with pytest.raises(AnewError):
        await world.run()
    assert world.asked == 1


async def test_a_node_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda: None)
    world.meanwhile = world.workflow.dismiss
    assert await world.run() == "n is gone"
    await asyncio.sleep(0)
    assert world.cancelled == 1, "what it was asked is called off"


async def test_dismissed_while_it_waits_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, IDLE)
    world.between[1] = world.workflow.dismiss
    assert await world.run() == "n is gone"


def test_it_tells_people_who_has_the_slot_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, IDLE, SWITCH, GONE)
    world.between = {1: world.workflow.news, 2: world.workflow.news}
    asyncio.run(world.run())
    assert world.details[0].startswith("**Active** kyb-G01-s1") and "0 switches" in world.details[0]
    assert world.details[1].startswith("**Active** kyb-G01-s2") and "1 switches" in world.details[1]
