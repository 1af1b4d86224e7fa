"""What the supervisor is told to run and what it tells: process descriptions, readiness probes, process status.

For `Stack` (which writes plans), the supervisor (which reads them), and the application, whose own processes are
described by the same `ProcessSpec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, Literal
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Probe:
    """One test of readiness. `target` is `host:port`, a URL, a file name, or for `exec` is left out for `argv`.

    An http probe is passed by a 2xx answer; `ca`, `cert` and `key` are files for TLS.
    """

    kind: Literal["tcp", "http", "file", "exec"]
    target: str = ""
    argv: tuple[str, ...] = ()
    ca: str = ""
    cert: str = ""
    key: str = ""

    async def passes(self, timeout: float = 2.0) -> bool:
        """Whether the probe passes at this moment; never raises for what the probed side does."""
        try:
            async with asyncio.timeout(timeout):
                return await self._try()
        except (OSError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError, ValueError):
            return False

    async def _try(self) -> bool:
        if self.kind == "file":
            return os.path.exists(self.target)  # noqa: ASYNC240 - one stat of a local file
        if self.kind == "exec":
            return await self._exec()
        if self.kind == "tcp":
            host, _, port = self.target.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return True
        return await self._http()

    async def _exec(self) -> bool:
        process = await asyncio.create_subprocess_exec(
            *self.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            return await process.wait() == 0
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _http(self) -> bool:
        url = urlsplit(self.target)
        context: ssl.SSLContext | None = None
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        port = url.port or (443 if context else 80)
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=context)
        try:
            path = url.path or "/"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            status = (await reader.readline()).split(b" ")
            return len(status) > 1 and status[1].startswith(b"2")
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()


@dataclass(frozen=True)
class ProcessSpec:
    """One process to be kept running.

    `after` names processes that must have been ready once before this one is started for the first time; they are also
    ended after it. All probes in `ready` must pass for it to be ready; without any it is ready when it runs. `port` is
    shown to people. `env` is added to the environment of `berth up`. `before` is a command run before every start and
    every restart; that it fails is noted and changes nothing.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    ready: tuple[Probe, ...] = ()
    port: int | None = None
    cwd: str | None = None
    stop_timeout: float = 10.0
    before: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values for the plan file."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProcessSpec:
        """From the plan file, perhaps of another version of berth: what it does not say is as by default."""
        known = {each.name for each in dataclass_fields(cls)}
        values = {name: each for name, each in value.items() if name in known}
        values["ready"] = tuple(Probe(**(probe | {"argv": tuple(probe["argv"])})) for probe in value.get("ready", ()))
        for name in ("argv", "after", "before"):
            values[name] = tuple(value.get(name, ()))
        return cls(**values)


State = Literal["waiting", "starting", "ready", "crashed", "stopping", "stopped", "unready"]


@dataclass(frozen=True)
class ProcessStatus:
    """One process as the supervisor sees it.

    `started` is in clock ticks since boot (see `proc.py`), `uptime` in seconds.
    """

    name: str
    state: State
    pid: int | None = None
    started: int | None = None
    uptime: float | None = None
    restarts: int = 0
    port: int | None = None
    last_exit: str = ""

    @property
    def ready(self) -> bool:
        """Whether it passed its probes since it was last started."""
        return self.state == "ready"


def start_order(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """The specs so that each comes after those it names. Raises ValueError for an unknown name or a circle."""
    by_name = {spec.name: spec for spec in specs}
    result: list[ProcessSpec] = []
    open_names: set[str] = set()

    def visit(spec: ProcessSpec) -> None:
        if spec in result:
            return
        if spec.name in open_names:
            raise ValueError(f"{spec.name} waits for itself")
        open_names.add(spec.name)
        for name in spec.after:
            if name not in by_name:
                raise ValueError(f"{spec.name} waits for {name}, which is not in the plan")
            visit(by_name[name])
        result.append(spec)

    for spec in specs:
        visit(spec)
    return result
