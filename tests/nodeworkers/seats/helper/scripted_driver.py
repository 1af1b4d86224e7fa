"""A driver that does what a test says, and keeps an account of its calls: for tests of whoever makes them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from nodeworkers.seats.helper.driver import CHECKPOINTED, LOCKED, RUNNING, CardMemory, DriverError

CARDS = ["GPU-a", "GPU-b", "GPU-c"]


class ScriptedDriver:
    """`states`: of processes by pid. `fails`: what happens instead of a call ("lock 7"): the state that it leaves and
    the error. `held_up`: a call that waits until `go_on` is set. `mute_after`: so many calls it tells no state.
    """

    def __init__(self, states: Mapping[int, str]) -> None:
        self.states = dict(states)
        self.fails: dict[str, tuple[str, DriverError]] = {}
        self.mute_after: int | None = None
        self.calls: list[str] = []
        self.maps: list[dict[str, str]] = []
        self.held_up, self.began, self.go_on = "", threading.Event(), threading.Event()

    def version(self) -> str:
        return "580.65.06"

    def devices(self) -> Sequence[str]:
        return CARDS

    def state(self, pid: int) -> str | None:
        if self.mute_after is not None and len(self.calls) >= self.mute_after:
            raise DriverError("CUDA_ERROR_UNKNOWN")
        return self.states.get(pid)

    def lock(self, pid: int, seconds: float) -> None:
        self._do("lock", pid, RUNNING, LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._do("checkpoint", pid, LOCKED, CHECKPOINTED)

    def restore(self, pid: int, devices: Mapping[str, str]) -> None:
        self.maps.append(dict(devices))
        self._do("restore", pid, CHECKPOINTED, LOCKED)

    def unlock(self, pid: int) -> None:
        self._do("unlock", pid, LOCKED, RUNNING)

    def memory(self, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        return {card: CardMemory(3, 10, {7: 7}) for card in cards}

    def _do(self, call: str, pid: int, before: str, after: str) -> None:
        self.calls.append(f"{call} {pid}")
        if self.held_up == f"{call} {pid}":
            self.began.set()
            assert self.go_on.wait(20)
        if self.states.get(pid) != before:
            raise DriverError("CUDA_ERROR_ILLEGAL_STATE")
        if f"{call} {pid}" in self.fails:
            self.states[pid], error = self.fails[f"{call} {pid}"]
            raise error
        self.states[pid] = after
