"""berth's NRI plugin, for the node process: every container with a seat is created when the ledger says so, or not yet.

containerd closes a plugin that answers late, and creates containers without asking it from then on (as it does while
no plugin is there). So the plugin has a thread of its own, which refuses in time whatever the node process is busy
with, and which is back soon after containerd is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from nodeworkers.nri.session import Runtime, Session, SessionError
from nodeworkers.nri.values import Adjustment, Container, Happening, Pod, Refused, seat_by_env

SOCKET = Path("/var/run/nri/nri.sock")  # pkg/api/plugin.go
NAME, INDEX = (
    "berth",
    "90",
)  # plugins are asked in the order of their index: seat-init goes before what others put there

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_MOST_DECIDING = 1.0  # seconds, of the 2 that containerd waits
_SETS_ARGS = (2, 2)  # the first containerd with NRI 0.10, whose plugins may change the command line
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """`connected`: no container with a seat is created without being granted. `message` is a sentence that says what is
    wrong, or empty. `sets_args`: the runtime takes command lines, so that seat-init works.
    """

    connected: bool
    message: str
    runtime: str = ""
    sets_args: bool = False


class Plugin:
    """Keeps connected to containerd's NRI while `run` runs.

    `decide` is asked, in the event loop of `run`, for every container that is to be created with a seat: it returns
    what the container gets (`Adjustment()` for nothing) or raises Refused. It has a second, then it is cancelled and
    the container refused; what it granted then the kubelet asks for once more. `observe` is called in the same loop, in
    the order in which things happen, and for all containers; the answers do not wait for it.

    `seat_of` tells which containers have a seat. It is called in the plugin's thread and must return at once; where it
    raises, `seat_by_env` counts.
    """

    def __init__(
        self,
        decide: Callable[[str, Pod, Container], Awaitable[Adjustment]],
        observe: Callable[[Happening], None],
        *,
        socket: Path = SOCKET,
        seat_of: Callable[[Pod, Container], str | None] = seat_by_env,
    ) -> None:
        self._decide, self._observe, self._seat_of, self._socket = decide, observe, seat_of, socket
        self._status = Status(False, "berth has not tried to connect to NRI yet")
        self._caller: asyncio.AbstractEventLoop
        self._request_seconds = 2.0

    @property
    def status(self) -> Status:
        """How it stands now. Any thread may ask."""
        return self._status

    async def run(self) -> None:
        """Until cancelled."""
        self._caller = asyncio.get_running_loop()
        ended, own = asyncio.Event(), asyncio.new_event_loop()
        stop = asyncio.Event()

        def thread() -> None:
            try:
                own.run_until_complete(self._until(stop))
            finally:
                own.close()
                self._call(ended.set)

        threading.Thread(target=thread, name="nri", daemon=True).start()
        try:
            await ended.wait()
        finally:
            with contextlib.suppress(RuntimeError):  # it ended by itself
                own.call_soon_threadsafe(stop.set)
            await asyncio.shield(asyncio.ensure_future(ended.wait()))
            self._status = Status(False, "berth's NRI plugin was stopped")

    async def _until(self, stop: asyncio.Event) -> None:
        connecting = asyncio.ensure_future(self._keep_connected())
        await stop.wait()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)

    async def _keep_connected(self) -> None:
        pause = _SHORTEST_PAUSE
        while True:
            try:
                await self._connect_once()
            except Exception as error:
                if self._status.connected:
                    pause = _SHORTEST_PAUSE
                self._lost(error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _connect_once(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        session = Session(reader, writer, self._grant, self._tell, self._connected)
        await session.run(NAME, INDEX)

    def _connected(self, runtime: Runtime) -> None:
        self._request_seconds = runtime.request_seconds
        named = f"{runtime.name} {runtime.version}".strip()
        sets_args = takes_arguments(runtime.name, runtime.version)
        message = "" if sets_args else f"{named} cannot put seat-init before a container's command line: 2.2 is needed"
        self._status = Status(True, message, named, sets_args)
        _log.info("berth is asked about containers by %s.", named)

    def _lost(self, error: Exception) -> None:
        match error:
            case FileNotFoundError() | ConnectionRefusedError():
                why = f"No container runtime listens on {self._socket}: it is away, or its configuration disables NRI"
            case PermissionError():
                why = f"berth may not connect to {self._socket}: it must run as root"
            case SessionError() | OSError():
                why = f"The connection to NRI on {self._socket} ended: {error}"
            case _:
                _log.error("berth's NRI plugin failed.", exc_info=error)
                why = f"berth's NRI plugin failed: {error!r:.200}"
        if why != self._status.message:
            _log.warning("%s. Containers start without being granted their seat meanwhile.", why)
        self._status = Status(False, why)

    async def _grant(self, pod: Pod, container: Container) -> Adjustment | None:
        """What one container gets. Raises Refused."""
        try:
            seat = self._seat_of(pod, container)
        except Exception:
            _log.exception(
                "Whether container %s of pod %s/%s has a seat is not known.", container.name, pod.namespace, pod.name
            )
            seat = seat_by_env(pod, container)
        if seat is None:
            return None
        asked = asyncio.run_coroutine_threadsafe(self._ask(seat, pod, container), self._caller)
        try:
            async with asyncio.timeout(min(_MOST_DECIDING, self._request_seconds / 2)):
                return await asyncio.wrap_future(asked)
        except Refused:
            raise
        except TimeoutError as error:
            raise Refused(f"Seat {seat} is not granted: berth is too busy to say when. It is asked again.") from error
        except Exception as error:
            _log.error("Seat %s of pod %s/%s is not decided.", seat, pod.namespace, pod.name, exc_info=error)
            raise Refused(f"Seat {seat} is not granted: berth failed ({type(error).__name__}). See its log.") from error

    async def _ask(self, seat: str, pod: Pod, container: Container) -> Adjustment:
        return await self._decide(seat, pod, container)

    def _tell(self, happening: Happening) -> None:
        self._call(self._observe, happening)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the process ends
            self._caller.call_soon_threadsafe(function, *arguments)


def takes_arguments(name: str, version: str) -> bool:
    """Whether the runtime lets a plugin change a container's command line; others ignore it, and tell nobody."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return name == "containerd" and numbers is not None and (int(numbers[1]), int(numbers[2])) >= _SETS_ARGS
