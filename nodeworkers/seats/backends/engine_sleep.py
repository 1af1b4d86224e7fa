"""Parks by the engine's own sleep: it drops its KV cache, keeps its weights in host memory, and gives the rest of its
GPU memory back. It moves less than the driver's checkpoint, and the server must offer it.

What the engine says is not believed: that memory is free again is the driver's word.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from nodeworkers.seats.backend import Held, Reading, Server
from nodeworkers.seats.backends.engines import Answer, EngineApi, NotSentError, UnansweredError, ask
from nodeworkers.seats.helper.driver import CardMemory
from nodeworkers.seats.world import LostError, Moved, UnsettledError, UntouchedError
from planning.seats.host_memory import amount

CALL = 600.0  # seconds that falling asleep and waking may take
READ = 2.0  # seconds until it is to say whether it sleeps
_FREES = 0.5  # of what it had on its GPUs, a sleeping server has at most this share left; contexts and graphs stay

Memory = Callable[[Sequence[str]], Awaitable[Mapping[str, CardMemory]]]
"""Of GPUs by UUID, as the driver says. Raises UntouchedError."""


class EngineSleep:
    """A Backend, for servers of one engine. Keeps in mind which calls are under way in this process: a process that is
    new finds out by asking the engine, which answers once it is done.
    """

    def __init__(self, api: EngineApi, memory: Memory) -> None:
        self._api, self._memory = api, memory
        self._calls: dict[str, asyncio.Task[Answer]] = {}  # by seat
        self._epochs: dict[str, int] = {}

    async def read(self, server: Server) -> Reading:
        if not server.processes or (server.parked and not set(server.parked) & set(server.processes)):
            return Reading("Gone")
        if server.seat in self._calls:
            return Reading("Changing", told="Its engine falls asleep, or wakes.")
        if not server.address:
            return Reading("Running", told="It has no address yet.")
        if not self._api.asks:
            return Reading(_by_memory(server, await self._has(server)))
        try:
            answer = await ask("GET", server.address, self._api.asks, READ)
        except NotSentError:
            return Reading("Running")  # it does not listen yet, and loads
        except UnansweredError as silent:
            raise UntouchedError(str(silent)) from silent
        asleep = _asleep(answer)
        if asleep is None:
            return Reading("Running", told=self._unable(answer) if answer.status == 404 else "")
        return Reading("Parked" if asleep else "Running")

    async def park(self, server: Server, epoch: int) -> Moved:
        self._enter(server.seat, epoch)
        if (await self._settled(server)).held == "Parked":
            return Moved(processes=_pairs(server))
        before, began = await self._has(server), time.monotonic()
        answer = await self._call(server, epoch, self._api.sleep)
        if answer.status in (404, 405):
            raise UntouchedError(self._unable(answer))
        if answer.status != 200:
            refused = f"The engine of {server.seat} answers its sleep with {answer.told}."
            if (await self.read(server)).held == "Running":
                raise UntouchedError(refused)
            raise UnsettledError(refused)
        has = await self._has(server)
        if has > _FREES * before:
            # Asleep it serves nobody, and it is to go on serving.
            await self.wake(server, epoch)
            raise UntouchedError(
                f"The engine of {server.seat} says that it sleeps, and has {amount(has)} of {amount(before)} on its "
                "GPUs still: its sleep frees nothing."
            )
        return Moved(before - has, _pairs(server), {"sleep": round(time.monotonic() - began, 4)})

    async def wake(self, server: Server, epoch: int, devices: Mapping[str, str] | None = None) -> Moved:
        if devices:
            raise UntouchedError(f"{server.seat} sleeps by its engine, which wakes on the GPUs that it has.")
        self._enter(server.seat, epoch)
        reading = await self._settled(server)
        if reading.held == "Gone":
            raise LostError(f"The server of {server.seat} has ended in its sleep.")
        if reading.held == "Running" and self._api.asks:
            return Moved()
        before, began = await self._has(server), time.monotonic()
        answer = await self._call(server, epoch, self._api.wake)
        if answer.status != 200:
            # Half awake it has parts of its memory mapped, and never lets go of them: vLLM's pull request 34600.
            raise LostError(f"The engine of {server.seat} answers its waking with {answer.told}.")
        moved = max(0, await self._has(server) - before)
        return Moved(moved, seconds={"wake": round(time.monotonic() - began, 4)})

    # ---- common

    def _enter(self, seat: str, epoch: int) -> None:
        newest = self._epochs.get(seat, 0)
        if epoch < newest:
            raise UntouchedError(f"{seat} was asked for by epoch {newest} already, which is newer than {epoch}.")
        self._epochs[seat] = epoch

    async def _settled(self, server: Server) -> Reading:
        """How it is once the call that is under way, if one is, has ended."""
        call = self._calls.get(server.seat)
        if call is not None:
            await asyncio.wait([call])
        return await self.read(server)

    async def _call(self, server: Server, epoch: int, path: str) -> Answer:
        """Sent once. It goes on where whoever waits for it is cancelled."""
        self._enter(server.seat, epoch)  # a newer one may have come while this one read
        call = asyncio.create_task(ask("POST", server.address, path, CALL))
        self._calls[server.seat] = call
        call.add_done_callback(lambda done: self._ended(server.seat, done))
        try:
            return await asyncio.shield(call)
        except NotSentError as error:
            raise UntouchedError(str(error)) from error
        except UnansweredError as error:
            raise UnsettledError(str(error)) from error

    def _ended(self, seat: str, call: asyncio.Task[Answer]) -> None:
        if self._calls.get(seat) is call:
            del self._calls[seat]
        if not call.cancelled():
            call.exception()  # whoever waited has it, or nobody does

    async def _has(self, server: Server) -> int:
        """Bytes on its GPUs."""
        pids = {process.pid for process in server.processes}
        memory = await self._memory(server.cards)
        return sum(held for each in memory.values() for pid, held in each.holders.items() if pid in pids)

    def _unable(self, answer: Answer) -> str:
        return f"Its engine cannot be put to sleep ({answer.told}): {self._api.needs}."


def _by_memory(server: Server, has: int) -> Held:
    """Of an engine that cannot be asked: it sleeps if most of what it had before has left its GPUs."""
    return "Parked" if server.had and has <= _FREES * server.had else "Running"


def _asleep(answer: Answer) -> bool | None:
    """None where it does not say."""
    try:
        told = json.loads(answer.body) if answer.status == 200 else None
    except ValueError:
        return None
    said = told.get("is_sleeping") if isinstance(told, dict) else None
    return said if isinstance(said, bool) else None


def _pairs(server: Server) -> tuple[tuple[int, int], ...]:
    return tuple((process.pid, process.started) for process in server.processes)
