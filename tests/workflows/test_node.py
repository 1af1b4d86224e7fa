"""A node's workflow: whatever it was told is looked at, also where a new run begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from temporalio.exceptions import ActivityError, RetryState

from activities.cache_signatures import NodeLook, NodeLooked, NodeState
from planning.caches.orders import Inventory
from workflows import node
from workflows.node import Node

WAIT, END = NodeLooked("wait", "as it was"), NodeLooked("end", "it is gone")
FAILED = ActivityError(
    "no answer",
    scheduled_event_id=1,
    started_event_id=1,
    identity="",
    activity_type="look_at_node",
    activity_id="1",
    retry_state=RetryState.TIMEOUT,
)


class AnewError(Exception):
    """Stands for what continue_as_new raises."""


class World:
    """What it sees of Temporal. `between`: what happens in the n-th wait, `during`: in the n-th look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: NodeLooked | Exception, known: str = "f1") -> None:
        self.looks = list(looks)
        self.asked: list[bool] = []
        self.waits = 0
        self.between: dict[int, Callable[[], None]] = {}
        self.during: dict[int, Callable[[], None]] = {}
        self.full = False
        self.workflow = Node(NodeState("a", known))
        stands_in = SimpleNamespace(
            execute_local_activity=self._execute,
            wait_condition=self._wait,
            set_current_details=lambda _: None,
            info=lambda: SimpleNamespace(is_continue_as_new_suggested=lambda: self.full),
            continue_as_new=self._anew,
        )
        monkeypatch.setattr(node, "workflow", stands_in)

    def _anew(self, state: NodeState) -> None:
        raise AnewError(state)

    async def _execute(self, _: str, look: NodeLook, **__: object) -> NodeLooked:
        self.asked.append(look.changed)
        self.during.get(len(self.asked), lambda: None)()
        await asyncio.sleep(0)
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def _wait(self, woken: Callable[[], bool]) -> None:
        if not woken():
            self.waits += 1
            self.between[self.waits]()
        assert woken(), "it would wait for ever"

    def finds(self, fingerprint: str) -> None:
        self.workflow.inventory(Inventory("a", fingerprint))

    async def run(self) -> str:
        return await self.workflow.run(NodeState("a"))


async def test_only_what_is_another_than_it_was_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, END, known="")
    for fingerprint in ("f1", "f1"):
        world.finds(fingerprint)
        assert not world.workflow._changed
    world.between[1] = lambda: world.finds("f2")
    await world.run()
    assert world.asked == [True]


async def test_that_it_changed_is_told_until_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, FAILED, WAIT, END)
    world.between[1] = lambda: world.finds("f2")
    world.between[2] = lambda: world.workflow.poke()
    await world.run()
    assert world.asked == [True, True, False]


async def test_what_comes_during_a_look_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, WAIT, END)
    world.between[1] = lambda: world.workflow.poke()
    world.during[1] = lambda: world.finds("f2")
    await world.run()
    assert world.asked == [False, True]


@pytest.mark.parametrize("comes", ["between", "during"])
async def test_a_poke_is_not_lost_where_a_new_run_is_due(monkeypatch: pytest.MonkeyPatch, comes: str) -> None:
    world = World(monkeypatch, WAIT, WAIT)

    def full() -> None:
        world.full = True
        world.workflow.poke()

    world.between[1] = full if comes == "between" else lambda: world.workflow.poke()
    world.during[1] = full if comes == "during" else lambda: None
    with pytest.raises(AnewError) as anew:
        await world.run()
    assert world.asked == [False] * (1 if comes == "between" else 2), "looked at before, for it is not carried over"
    assert anew.value.args[0] == NodeState("a", "f1")
