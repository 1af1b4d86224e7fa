"""Parks by the driver: all that a process has on its GPUs becomes memory of its own on the host, and comes back as it
was. The process is told nothing, and its calls wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from nodeworkers.seats.backend import Reading, Server
from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.helper.phases import Result
from nodeworkers.seats.world import LostError, Moved, UnsettledError, UntouchedError


class CudaCheckpoint:
    """A Backend, by a group's helper."""

    def __init__(self, helper: HelperClient) -> None:
        self._helper = helper

    async def read(self, server: Server) -> Reading:
        return await self._helper.read(server.processes)

    async def park(self, server: Server, epoch: int) -> Moved:
        return _moved(await self._helper.park(server.processes, epoch))

    async def wake(self, server: Server, epoch: int, devices: Mapping[str, str] | None = None) -> Moved:
        return _moved(await self._helper.wake(server.processes, server.parked, epoch, devices or {}))


def _moved(result: Result) -> Moved:
    match result.outcome:
        case "done":
            processes = tuple((process.pid, process.started) for process in result.processes)
            return Moved(processes=processes, seconds=result.seconds)
        case "untouched":
            raise UntouchedError(result.told)
        case "lost":
            raise LostError(result.told)
        case "unsettled":
            raise UnsettledError(result.told)
