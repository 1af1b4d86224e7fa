"""A process's use of simulated GPUs: its memory there, its calls, and the thread in it by which the simulated driver
locks, checkpoints, restores and unlocks it, as CUDA's driver does.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nodeworkers.seats.processes import started
from nodeworkers.seats.simulated_gpu.machine import SimulatedMachine, SimulatedOutOfMemoryError

RUNNING, LOCKED, CHECKPOINTED, FAILED = "RUNNING", "LOCKED", "CHECKPOINTED", "FAILED"
CHECKPOINTING, RESTORING = "CHECKPOINTING", "RESTORING"  # as drivers of CUDA 13.4 and later show them
_STEP = 0.02  # seconds between looks whether a fault was taken back
_PIECE = 4 * 2**20  # bytes


def _die(by: signal.Signals) -> NoReturn:
    """The kernel may give the signal to another thread of the process: this one does not go on until it takes effect,
    or the driver would answer as if nothing had happened.
    """
    os.kill(os.getpid(), by)
    while True:
        time.sleep(1)


class SimulatedDriverError(Exception):
    """A driver's call ended with an error; the text is the error's name."""


class SimulatedDevice:
    """The cards as one process has them. `server`: its name in the log and in faults."""

    def __init__(self, folder: Path, server: str) -> None:
        self._machine, self.server = SimulatedMachine(folder), server
        self.id = secrets.token_hex(6)
        self.state = RUNNING
        self._turn = threading.Condition()
        self._calls = 0
        self._on: dict[str, mmap.mmap] = {}  # memory on cards, by UUID
        self._off: dict[str, mmap.mmap] = {}  # what was taken off them
        self._dead_end = False
        with self._machine.changing():  # nobody takes it for dead before it listens
            place = self._machine.folder / "use" / self.id
            inside = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"/proc/self/fd/{inside}/{place.name}")
            os.close(inside)
            place.chmod(0o666)
            self._listener.listen(16)
        self._tell("began", started=started(os.getpid()))
        threading.Thread(target=self._serve, name="simulated-driver", daemon=True).start()

    # ---- what the process does

    def allocate(self, uuid: str, size: int) -> None:
        """Takes memory on a card and fills it. Raises SimulatedOutOfMemoryError."""
        with self.call():
            with self._machine.changing():
                self._machine.room(uuid, size)
                self._place(uuid, size)
                self._tell("alloc", card=uuid, bytes=size)
            pattern = secrets.token_bytes(4096) * 256
            memory = self._on[uuid]
            for at in range(0, size, len(pattern)):
                memory[at : at + len(pattern)] = pattern[: min(len(pattern), size - at)]
            self._tell("filled", card=uuid, sum=_sum(memory))

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call of the process, which waits while it is locked or parked."""
        with self._turn:
            self._turn.wait_for(lambda: self.state == RUNNING)
            self._calls += 1
        try:
            yield
        finally:
            with self._turn:
                self._calls -= 1
                self._turn.notify_all()

    def work(self) -> None:
        """Uses all of its memory a little; what is not there any more would end the process."""
        with self.call():
            for memory in self._on.values():
                memory[len(memory) // 2]

    def put_to_sleep(self) -> None:
        """As engines do by themselves: takes its memory off the cards."""
        with self.call():
            if "sleeps-falsely" not in self._machine.faults(self.server):
                self._take_off("sleep")

    def wake_up(self) -> None:
        """Puts it back. Raises SimulatedOutOfMemoryError."""
        with self.call():
            self._put_back("wake", {})

    # ---- what the driver does

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        # Whoever asked may be gone by the answer; the call was carried out all the same.
        with contextlib.suppress(OSError), connection, connection.makefile("rwb") as stream:
            for line in stream:
                asked = json.loads(line)
                try:
                    told: Mapping[str, Any] = {"state": self.state, **self._do(asked)}
                except SimulatedDriverError as error:
                    told = {"error": str(error), "state": self.state}
                stream.write(json.dumps(told).encode() + b"\n")
                stream.flush()

    def _do(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        match asked["op"]:
            case "state":
                return {"server": self.server, "thread": os.getpid()}
            case "lock":
                self._lock(asked["timeout"])
            case "checkpoint":
                self._expect(LOCKED)
                self._checkpoint()
            case "restore":
                self._expect(CHECKPOINTED)
                self._restore(asked["devices"])
            case "unlock":
                self._expect(LOCKED)
                self._become(RUNNING)
                self._tell("unlock")
        return {}

    def _expect(self, state: str) -> None:
        if self.state != state:
            raise SimulatedDriverError("CUDA_ERROR_ILLEGAL_STATE")

    def _become(self, state: str) -> None:
        with self._turn:
            self.state = state
            self._turn.notify_all()

    def _lock(self, timeout: float) -> None:
        self._expect(RUNNING)
        faults = self._machine.faults(self.server)
        if "lock-kills" in faults:
            _die(signal.SIGSEGV)
        with self._turn:
            self.state = LOCKED  # no further call begins
            drained = self._turn.wait_for(lambda: self._calls == 0, timeout or None)
            if not drained or "lock-times-out" in faults:
                self.state = RUNNING
                self._turn.notify_all()
                raise SimulatedDriverError("CUDA_ERROR_NOT_READY")
        self._tell("lock")

    def _checkpoint(self) -> None:
        if "checkpoint-breaks" in self._machine.faults(self.server):
            self._become(FAILED)
            raise SimulatedDriverError("CUDA_ERROR_UNKNOWN")
        if "checkpoint-fails" in self._machine.faults(self.server):
            raise SimulatedDriverError("CUDA_ERROR_OUT_OF_MEMORY")
        self._become(CHECKPOINTING)
        self._hang("checkpoint-hangs")
        self._take_off("checkpoint")
        self._become(CHECKPOINTED)
        if "dies-when-parked" in self._machine.faults(self.server):
            _die(signal.SIGKILL)

    def _restore(self, devices: Mapping[str, str]) -> None:
        if self._dead_end:
            raise SimulatedDriverError("CUDA_ERROR_OPERATING_SYSTEM")
        self._become(RESTORING)
        self._hang("restore-hangs")
        fault = "restore-out-of-memory" in self._machine.faults(self.server)
        try:
            if fault:
                raise SimulatedOutOfMemoryError("by a fault")
            self._put_back("restore", devices)
        except SimulatedOutOfMemoryError as error:
            self._dead_end = True
            self._become(CHECKPOINTED)
            self._tell("restore-failed", why=str(error), fault=fault)
            raise SimulatedDriverError("CUDA_ERROR_OUT_OF_MEMORY") from error
        self._become(LOCKED)

    def _hang(self, fault: str) -> None:
        while fault in self._machine.faults(self.server):
            time.sleep(_STEP)

    # ---- memory

    def _place(self, uuid: str, size: int) -> None:
        path = self._machine.folder / "memory" / uuid / self.id
        with path.open("w+b") as file:
            file.truncate(size)
            self._on[uuid] = mmap.mmap(file.fileno(), size)

    def _take_off(self, op: str) -> None:
        for uuid, memory in list(self._on.items()):
            kept = mmap.mmap(-1, len(memory))
            _copy(memory, kept)
            self._off[uuid] = kept
            memory.close()
            del self._on[uuid]
            with self._machine.changing():
                (self._machine.folder / "memory" / uuid / self.id).unlink()
                self._tell(op, card=uuid, bytes=len(kept))

    def _put_back(self, op: str, devices: Mapping[str, str]) -> None:
        with self._machine.changing():
            for uuid, kept in self._off.items():
                self._machine.room(devices.get(uuid, uuid), len(kept))
            for uuid, kept in self._off.items():
                self._place(devices.get(uuid, uuid), len(kept))
                self._tell(op, card=devices.get(uuid, uuid), bytes=len(kept))
        corrupts = "corrupts" in self._machine.faults(self.server)
        for uuid, kept in list(self._off.items()):
            now = devices.get(uuid, uuid)
            _copy(kept, self._on[now])
            if corrupts:
                self._on[now][0] ^= 0xFF
            del self._off[uuid]
            kept.close()
            self._tell("checked", card=now, sum=_sum(self._on[now]))

    def _tell(self, op: str, **facts: Any) -> None:
        self._machine.tell(op, self.server, self.id, **facts)


def _copy(source: mmap.mmap, target: mmap.mmap) -> None:
    """In pieces: the process's other threads, such as those that answer probes, go on between them."""
    with memoryview(source) as taken, memoryview(target) as given:
        for at in range(0, len(taken), _PIECE):
            given[at : at + _PIECE] = taken[at : at + _PIECE]


def _sum(memory: mmap.mmap) -> int:
    found = 0
    with memoryview(memory) as whole:
        for at in range(0, len(whole), _PIECE):
            found = zlib.crc32(whole[at : at + _PIECE], found)
    return found
