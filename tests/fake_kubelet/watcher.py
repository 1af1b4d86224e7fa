"""The kubelet's other door: it finds sockets in its folder of plugins, asks who they are, and tells them how it went.

After pkg/kubelet/pluginmanager of Kubernetes 1.36.3, for plugins of type DevicePlugin; looks instead of inotify.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nodeworkers.rpc import pluginregistration_pb2
from tests.fake_kubelet import checks
from tests.fake_kubelet.registration import RegistrationRefused, RegistrationServer, identity_of
from tests.fake_kubelet.transcript import Transcript
from tests.fake_kubelet.wire import Caller, CallFailed

DIAL_SECONDS, INFO_SECONDS, NOTIFY_SECONDS = 10.0, 1.0, 5.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.5, 122.0
_LOOK_SECONDS = 0.1  # the kubelet's inotify is as good as at once; its reconciler goes by every second
_METHODS = pluginregistration_pb2.DESCRIPTOR.services_by_name["Registration"].methods_by_name


@dataclass
class _Found:
    identity: tuple[int, int]
    resource: str = ""
    """'' until it is registered."""


class PluginWatcher:
    """One life of it."""

    def __init__(self, folder: Path, server: RegistrationServer, transcript: Transcript) -> None:
        self._folder, self._server, self._transcript = folder, server, transcript
        self._found: dict[Path, _Found] = {}
        self._tasks: dict[Path, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _look(self) -> None:
        seen = {path: identity_of(path) for path in _sockets(self._folder)}
        for path, found in list(self._found.items()):
            if seen.get(path) != found.identity:
                del self._found[path]
                self._tasks.pop(path).cancel()
                if found.resource:
                    await self._server.disconnect(found.resource)
        for path, identity in seen.items():
            if identity is not None and path not in self._found:
                self._found[path] = _Found(identity)
                self._tasks[path] = asyncio.create_task(self._register(path, self._found[path]))

    async def _register(self, path: Path, found: _Found) -> None:
        """Tries for ever, ever more slowly."""
        wait = FIRST_RETRY_SECONDS
        while True:
            caller = Caller(path)
            try:
                await caller.dial(DIAL_SECONDS)
                info = await caller.call(_METHODS["GetInfo"], pluginregistration_pb2.InfoRequest(), INFO_SECONDS)
                self._transcript.note("GetInfo", info.name, f"{path.name}: {info.type} at {info.endpoint}")
                try:
                    await self._connect(path, info)
                except RegistrationRefused as refused:
                    await self._notify(caller, info.name, str(refused))
                else:
                    found.resource = info.name
                    await self._notify(caller, info.name, "")
                    return
            except CallFailed as error:
                self._transcript.note("refused", found.resource, f"{path.name}: {error}")
                if found.resource:  # it was not told: it is unregistered again
                    await self._server.disconnect(found.resource)
                    found.resource = ""
            finally:
                await caller.close()
            await asyncio.sleep(wait)
            wait = min(2 * wait, LAST_RETRY_SECONDS)

    async def _connect(self, path: Path, info: pluginregistration_pb2.PluginInfo) -> None:
        if info.type != "DevicePlugin":
            raise RegistrationRefused(f"no handler registered for plugin type: {info.type} at socket {path}")
        if checks.VERSION not in info.supported_versions:
            versions = list(info.supported_versions)
            self._transcript.violated("wrong-version", info.name, f"GetInfo has versions {versions}")
            raise RegistrationRefused(f"manager version, {checks.VERSION}, is not among {versions}")
        if not checks.is_extended_resource(info.name):
            self._transcript.violated("bad-resource-name", info.name, f"{info.name!r} is no extended resource")
            raise RegistrationRefused(f"invalid name of device plugin: {info.name!r}")
        await self._server.connect(info.name, Path(info.endpoint or path))

    async def _notify(self, caller: Caller, resource: str, error: str) -> None:
        status = pluginregistration_pb2.RegistrationStatus(plugin_registered=not error, error=error)
        self._transcript.note("NotifyRegistrationStatus", resource, error or "registered")
        await caller.call(_METHODS["NotifyRegistrationStatus"], status, NOTIFY_SECONDS)


def _sockets(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if not path.name.startswith(".") and path.is_socket()]
