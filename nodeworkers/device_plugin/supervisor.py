"""Keeps every resource of a node registered with its kubelet, and asks the kubelet whether it really advertises them.

The self-check is the fourth signal beside those of `registration.py`: a kubelet may keep a stream open and have lost
what came over it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from nodeworkers.device_plugin.registration import PREFIX, Folders, Registration, Status
from nodeworkers.devices.frontend import Devices
from nodeworkers.devices.holdings import PodResourcesError

_CHECK_SECONDS = 30.0
# What a kubelet takes for the end of a stream just begun is lost soon after a registration, or not at all: for so long
# it is asked more often, so that capacity is back within 5 s.
_YOUNG_SECONDS, _YOUNG_CHECK_SECONDS = 20.0, 1.5
_AGAIN_SECONDS = 2.0  # what was sent may be under way: drift is what is there twice
_NAMED = 3
_OURS = re.compile(re.escape(PREFIX) + r"[0-9a-f]{12}-[0-9]+\.sock")
_log = logging.getLogger(__name__)


class Advertised(Protocol):
    """What the kubelet advertises, as `PodResources` asks it."""

    async def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Healthy devices' ids by resource. Raises PodResourcesError."""


class Supervisor:
    """All resources of one node. `unchecked` is the sentence why the kubelet could not be asked last time, else ''."""

    def __init__(
        self,
        devices: Devices,
        advertised: Advertised,
        folders: Folders,
        gated: Callable[[str], bool] = lambda resource: False,
    ) -> None:
        """`gated`: of which resources `Devices.before_start` is asked before each start of a container."""
        self.unchecked = ""
        self._devices = devices
        self._advertised = advertised
        self._folders = folders
        self._gated = gated
        self._life = secrets.token_hex(8)
        self._registrations: dict[str, Registration] = {}

    def statuses(self) -> tuple[Status, ...]:
        """How each resource stands with the kubelet, by name."""
        return tuple(self._registrations[resource].status for resource in sorted(self._registrations))

    async def run(self) -> None:
        """Until cancelled; then all servers are ended, and their sockets gone."""
        remove_stale(self._folders.sockets)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_always())
            while True:
                version = self._devices.version
                for resource in self._devices.offered():
                    if resource not in self._registrations:
                        registration = Registration(
                            resource, self._devices, self._folders, self._life, self._gated(resource)
                        )
                        self._registrations[resource] = registration
                        group.create_task(registration.run())
                await self._devices.changed(version)

    async def _check_always(self) -> None:
        while True:
            await self._pause()
            try:
                await self.check()
            except Exception:
                _log.exception("Asking the kubelet what it advertises.")

    async def _pause(self) -> None:
        """Until the kubelet is to be asked again: soon after something was registered."""
        until = time.monotonic() + _CHECK_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(_YOUNG_CHECK_SECONDS)
            since = [status.registered_since for status in self.statuses() if status.registered_since is not None]
            if since and time.time() - max(since) < _YOUNG_SECONDS:
                return

    async def check(self) -> tuple[str, ...]:
        """Asks the kubelet what it advertises and registers anew what it has otherwise than served: sentences."""
        try:
            drifting = await self._drifting()
            if drifting:
                await asyncio.sleep(_AGAIN_SECONDS)
                again = await self._drifting()
                drifting = {key: sentence for key, sentence in again.items() if key in drifting}
        except PodResourcesError as error:
            if not self.unchecked:
                _log.warning("%s Whether it advertises what is served is not known.", error)
            self.unchecked = str(error)
            return ()
        self.unchecked = ""
        for (resource, _, _), sentence in drifting.items():
            self._registrations[resource].renew(sentence)
        return tuple(drifting.values())

    async def _drifting(self) -> dict[tuple[str, int, frozenset[str]], str]:
        """Sentences by resource, generation and what is served: one that stays is of the same three."""
        advertised = await self._advertised.allocatable()
        found: dict[tuple[str, int, frozenset[str]], str] = {}
        for resource, registration in self._registrations.items():
            if registration.plugin is None or not registration.status.serving:
                continue
            served, has = registration.plugin.healthy(), advertised.get(resource, frozenset())
            if served != has:
                found[resource, registration.status.generation, served] = (
                    f"The kubelet advertises {_counted(len(has))} of {resource}, and {_counted(len(served))} should be"
                    f"{_differing('it lacks', served - has)}{_differing('it also has', has - served)}. They are "
                    f"registered anew."
                )
        return found


def remove_stale(folder: Path) -> None:
    """Removes the sockets that former lives of this process left there: those of our names that nobody serves."""
    try:
        entries = [each for each in folder.iterdir() if _OURS.fullmatch(each.name)]
    except OSError:
        return  # the kubelet makes the folder when it comes
    for path in entries:
        try:
            if stat.S_ISSOCK(path.lstat().st_mode) and not _served(path):
                path.unlink()
                _log.info("Removed %s, which a former process left.", path)
        except OSError as error:
            _log.warning("%s, which a former process left, cannot be removed: %s.", path, error.strerror)


def _served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # somebody with many calls waiting
        return True


def _counted(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _differing(what: str, ids: Iterable[str]) -> str:
    names = sorted(ids)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"; {what} {', '.join(names[:_NAMED])}{more}" if names else ""
