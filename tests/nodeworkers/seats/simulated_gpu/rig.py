"""Model servers, as processes on simulated GPUs, and the helper of their group: for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodeworkers.seats.backend import Process, Server
from nodeworkers.seats.backends.cuda_checkpoint import CudaCheckpoint
from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.processes import started
from nodeworkers.seats.simulated_gpu.checker import Verdict, check
from nodeworkers.seats.simulated_gpu.driver import SimulatedDriver
from nodeworkers.seats.simulated_gpu.machine import SimulatedCard, SimulatedMachine

MIB = 2**20
CARDS = ("GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b")
ROOM = 48 * MIB  # of a card
SIZE = 32 * MIB  # of a server: two have no room beside each other


@dataclass
class Model:
    """A server's process, and its other ranks."""

    name: str
    process: subprocess.Popen[bytes]
    port: int

    @property
    def processes(self) -> list[Process]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [Process(each, started(each) or 0) for each in (pid, *map(int, children))]

    def server(self, parked: Sequence[Process] = ()) -> Server:
        return Server(self.name, CARDS, self.processes, parked, f"127.0.0.1:{self.port}")

    def ask(self, path: str, body: bytes | None = None, seconds: float = 20.0) -> bytes:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body)
        with urllib.request.urlopen(asked, timeout=seconds) as answer:
            found: bytes = answer.read()
            return found

    async def completes(self, tokens: int = 1, seconds: float = 20.0) -> bytes:
        return await asyncio.to_thread(self.ask, "/v1/completions", b'{"max_tokens": %d}' % tokens, seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Rig:
    """Of one group of two simulated GPUs."""

    def __init__(self, folder: Path, room: int) -> None:
        self.machine = SimulatedMachine.make(folder / "gpus", [SimulatedCard(uuid, room) for uuid in CARDS])
        self.socket = folder / "helper.sock"
        self.helper = HelperClient(self.socket, f"simulated:{self.machine.folder}", phase=20.0)
        self.backend = CudaCheckpoint(self.helper)
        self._models: list[Model] = []

    async def model(self, name: str, *options: str, size: int = SIZE, cards: Sequence[str] = CARDS[:1]) -> Model:
        """One that answers, or has what it wants where it has no port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = self._process(name, port, size, cards, options)
        model = Model(name, process, port)
        self._models.append(model)
        deadline = time.monotonic() + 20
        while True:
            try:
                await model.completes()
                return model
            except OSError:
                assert process.poll() is None, f"{name} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{name} does not serve"
                await asyncio.sleep(0.02)

    def _process(
        self, name: str, port: int, size: int, cards: Sequence[str], options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable, "-m", "nodeworkers.seats.simulated_gpu.server", "--folder", self.machine.folder,
                "--cards", ",".join(cards), "--bytes", str(size), "--port", str(port), "--name", name, *options,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    async def reads(self, model: Model, held: str) -> None:
        """Waits until the backend reads it so."""
        async with asyncio.timeout(20):
            while (await self.backend.read(model.server())).held != held:
                await asyncio.sleep(0.01)

    async def driver_tells(self, model: Model, state: str) -> None:
        """Waits until the process itself is in this state. The helper says Changing before it has asked the driver."""
        driver = SimulatedDriver(self.machine.folder)
        async with asyncio.timeout(20):
            while await asyncio.to_thread(driver.state, model.process.pid) != state:
                await asyncio.sleep(0.01)

    def verdict(self) -> Verdict:
        with (self.machine.folder / "log.jsonl").open() as log:
            return check(log)

    async def ended(self, pid: int) -> None:
        async with asyncio.timeout(20):
            while _runs(pid):
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.machine.suffer({})
        for model in self._models:
            with contextlib.suppress(OSError, ProcessLookupError):
                for process in model.processes[1:]:
                    os.kill(process.pid, signal.SIGKILL)
            model.kill()
        while helpers := _with(str(self.socket)):  # those too that were begun and are not there yet
            for pid in helpers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                await self.ended(pid)


def _with(argument: str) -> list[int]:
    """Processes with this argument."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in each.read_bytes().split(b"\0"):
                found.append(int(each.parent.name))
    return found


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@contextlib.asynccontextmanager
async def rig(room: int = ROOM, where: str | None = None) -> AsyncIterator[Rig]:
    """In a folder of its own with a short name, as sockets need."""
    folder = Path(tempfile.mkdtemp(prefix="seats-", dir=where))
    made = Rig(folder, room)
    try:
        yield made
    finally:
        await made.close()
        shutil.rmtree(folder)
