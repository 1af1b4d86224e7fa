"""The driver of simulated GPUs: asks the processes that use them, as `device.py` answers."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeworkers.seats.helper.driver import CardMemory, DriverError
from nodeworkers.seats.simulated_gpu.machine import SimulatedMachine, connected

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class SimulatedDriver:
    """Over a folder of `machine.py`."""

    def __init__(self, folder: Path) -> None:
        self._machine = SimulatedMachine(folder)
        self._pids: dict[str, int] = {}  # by a process's id there

    def version(self) -> str:
        return "simulated"

    def devices(self) -> Sequence[str]:
        return list(self._machine.cards())

    def state(self, pid: int) -> str | None:
        try:
            return str(self._ask(pid, {"op": "state"})["state"])
        except DriverError:
            return None

    def lock(self, pid: int, seconds: float) -> None:
        try:
            self._ask(pid, {"op": "lock", "timeout": seconds})
        except DriverError as error:
            raise DriverError(error.code, timed_out=error.code == "CUDA_ERROR_NOT_READY") from error

    def checkpoint(self, pid: int) -> None:
        self._ask(pid, {"op": "checkpoint"})

    def restore(self, pid: int, devices: Mapping[str, str]) -> None:
        # As CUDA's driver: a map that leaves a GPU out is refused.
        if devices and not set(devices) == set(devices.values()) == set(self.devices()):
            raise DriverError("CUDA_ERROR_INVALID_VALUE")
        self._ask(pid, {"op": "restore", "devices": dict(devices)})

    def unlock(self, pid: int) -> None:
        self._ask(pid, {"op": "unlock"})

    def memory(self, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        if strange := set(cards) - self._machine.cards().keys():
            raise DriverError(f"that there is no GPU {', '.join(sorted(strange))}")
        with self._machine.changing():
            there, used = self._machine.cards(), {card: self._machine.used(card) for card in cards}
        if any(id not in self._pids for each in used.values() for id in each):
            self._find()
        return {
            card: CardMemory(
                there[card].bytes - sum(used[card].values()),
                there[card].bytes,
                # One whose process nobody can tell is told all the same: it holds memory.
                {self._pids.get(id, -1): size for id, size in used[card].items()},
            )
            for card in cards
        }

    # ---- processes

    def _ask(self, pid: int, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if pid not in list(self._pids.values()):
            self._find()
        # Several threads ask at once: each looks at a copy.
        id = next((each for each, its in list(self._pids.items()) if its == pid), None)
        if id is None:
            raise DriverError("CUDA_ERROR_NOT_INITIALIZED")
        try:
            with connected(self._machine.folder / "use" / id) as connection, connection.makefile("rwb") as stream:
                if _peer(connection) != pid:
                    raise DriverError("CUDA_ERROR_NOT_INITIALIZED")
                stream.write(json.dumps(asked).encode() + b"\n")
                stream.flush()
                line = stream.readline()
        except OSError as error:
            self._pids.pop(id, None)
            raise DriverError("CUDA_ERROR_NOT_INITIALIZED") from error
        if not line:  # it died of it
            raise DriverError("CUDA_ERROR_UNKNOWN")
        told: Mapping[str, Any] = json.loads(line)
        if "error" in told:
            raise DriverError(told["error"])
        return told

    def _find(self) -> None:
        """Which process is which: by who listens, for in a container it does not know its pid here."""
        places = {place.name: place for place in (self._machine.folder / "use").iterdir()}
        found = {id: pid for id, pid in list(self._pids.items()) if id in places}
        for id, place in places.items():
            if id not in found:
                try:
                    with connected(place) as connection:
                        found[id] = _peer(connection)
                except OSError:
                    continue
        self._pids = found


def _peer(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[0])
