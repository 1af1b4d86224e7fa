"""Ends exactly these processes: asked first, killed when their time is over, and never one that has their pid by now.

For `cold` and for seats whose state is lost. Each is held by a pidfd before it is compared with what is known of it,
so that between the comparison and the signal nobody else can take its place (pidfd_open(2)).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from nodeworkers.seats.backend import Process
from nodeworkers.seats.cgroups import Cgroup, processes
from nodeworkers.seats.processes import there

_KILLED = 10.0  # seconds for the kernel to take a killed process down; one inside a driver's call takes as long as that


class StoppingError(Exception):
    """A process cannot be ended. The text is a sentence that names it."""


async def stop(those: Iterable[Process], grace: float, killed: float = _KILLED) -> tuple[Process, ...]:
    """SIGTERM to each, SIGKILL after `grace` seconds to those that are left: returns once all have ended, or with those
    that have not `killed` seconds later (a driver's call does not end for a signal). Raises StoppingError where a
    signal is not allowed.
    """
    with ExitStack() as held:
        ending: dict[Process, asyncio.Future[None]] = {}
        handles: dict[Process, int] = {}
        for process in sorted(set(those)):
            if (handle := held.enter_context(_held(process))) is not None:
                handles[process] = handle
                ending[process] = held.enter_context(_end(handle))
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, killed)):
            left = [process for process, end in ending.items() if not end.done()]
            for process in left:
                _signal(process, handles[process], number)
            if left:
                await asyncio.wait([ending[process] for process in left], timeout=seconds)
        return tuple(process for process, end in ending.items() if not end.done())


async def stop_container(cgroup: Cgroup, grace: float, killed: float = _KILLED) -> tuple[Process, ...]:
    """As `stop`, for all that are in a container's control group, and what these start meanwhile. Raises CgroupError as
    well. What the runtime starts in its place is in another control group, and is left alone.
    """
    until = time.monotonic() + grace + killed
    left = await stop(await asyncio.to_thread(processes, cgroup), grace, killed)
    while not left and time.monotonic() < until:
        late = await asyncio.to_thread(processes, cgroup)
        if not late:
            break
        left = await stop(late, 0.0, killed)
    return left


@contextmanager
def _held(process: Process) -> Iterator[int | None]:
    """A handle on this very process; None where it has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    except OSError as error:
        raise StoppingError(f"The process {process.pid} cannot be taken hold of: {error.strerror}.") from error
    try:
        # What is known of it is older than the handle: if they agree now, the handle is of this very process.
        yield handle if there(process) else None
    finally:
        os.close(handle)


@contextmanager
def _end(handle: int) -> Iterator[asyncio.Future[None]]:
    """Done when the process has ended: its handle becomes readable."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        loop.remove_reader(handle)
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(handle, readable)
    try:
        yield ended
    finally:
        loop.remove_reader(handle)
        ended.cancel()


def _signal(process: Process, handle: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return  # it ended by itself
    except PermissionError as error:
        raise StoppingError(f"The process {process.pid} may not be ended by berth: it must run as root.") from error
