"""The workflow of devices: every poke is looked at, also one that comes during a look or where a new run begins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from temporalio.exceptions import ActivityError, RetryState

from activities.device_signatures import DevicesLook, DevicesShown, DevicesState
from activities.messages import Poke
from workflows import devices
from workflows.devices import Devices

DONE = DevicesShown("1 status written")
FAILED = ActivityError(
    "no answer", scheduled_event_id=1, started_event_id=1, identity="", activity_type="show_devices", activity_id="1",
    retry_state=RetryState.TIMEOUT,
)  # fmt: skip


class EndError(Exception):
    """Nobody pokes any more."""


class AnewError(Exception):
    """Stands for what continue_as_new raises."""


class World:
    """What it sees of Temporal. `during`: what happens in the n-th look; `between`: in the n-th wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: DevicesShown | Exception) -> None:
        self.looks, self.full = list(looks), False
        self.asked: list[dict[str, int]] = []
        self.timeouts: list[float | None] = []
        self.during: dict[int, Callable[[], None]] = {}
        self.between: dict[int, Callable[[], None]] = {}
        self.workflow = Devices(DevicesState())
        stands_in = SimpleNamespace(
            execute_local_activity=self._execute,
            wait_condition=self._wait,
            set_current_details=lambda _: None,
            info=lambda: SimpleNamespace(is_continue_as_new_suggested=lambda: self.full),
            continue_as_new=self._anew,
        )
        monkeypatch.setattr(devices, "workflow", stands_in)

    def poke(self, version: int) -> None:
        self.workflow.poke(Poke({"nodedevices": version}))

    async def run(self) -> None:
        with pytest.raises(EndError):
            await self.workflow.run(DevicesState())

    def _anew(self, state: DevicesState) -> None:
        raise AnewError(state)

    async def _execute(self, _: str, look: DevicesLook, **__: object) -> DevicesShown:
        self.asked.append(dict(look.fresh))
        self.during.get(len(self.asked), lambda: None)()
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def _wait(self, woken: Callable[[], bool], *, timeout: float | None, timeout_summary: str) -> None:
        if woken():
            return
        self.timeouts.append(timeout)
        if len(self.timeouts) not in self.between:
            raise EndError
        self.between[len(self.timeouts)]()
        if not woken():
            raise TimeoutError


async def test_a_poke_is_a_look_and_one_during_a_look_another(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, DONE, DONE, DONE)
    world.during[1] = lambda: world.poke(5)
    world.between[1] = lambda: world.poke(7)
    await world.run()
    assert world.asked == [{}, {"nodedevices": 5}, {"nodedevices": 7}]


async def test_what_was_refused_is_looked_at_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, DevicesShown("refused", 30.0), FAILED, DONE)
    world.between[1] = lambda: None
    await world.run()
    assert len(world.asked) == 3 and world.timeouts == [30.0, None]


async def test_a_new_run_begins_with_a_look_at_what_was_heard_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, DONE)

    def full() -> None:
        world.full = True
        world.poke(9)

    world.during[1] = full
    with pytest.raises(AnewError) as anew:
        await world.workflow.run(DevicesState())
    assert anew.value.args[0] == DevicesState(seen={"nodedevices": 9})
