"""The simulated GPUs of one machine: a folder that all who use them share, and nothing else. Whose memory is on which
card is told by files there; what happened, by a log that anybody may check afterwards.

    cards.json      [{"uuid": "GPU-…", "bytes": 1073741824}]
    lock            whoever changes something holds it
    log.jsonl       one line for each thing that happened
    memory/UUID/ID  the memory of one process on one card: a file of so many bytes
    use/ID          the socket of the process ID; once nobody listens there, it is dead and its memory is free
    faults.json     {"server name": ["fault", …]}: see FAULTS
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAULTS = {
    "lock-times-out": "a lock never succeeds; the process goes on",
    "lock-kills": "the process dies when it is locked",
    "checkpoint-fails": "a checkpoint ends with an error, and the process stays locked",
    "checkpoint-breaks": "a checkpoint ends with an error, and the process is failed for ever",
    "checkpoint-hangs": "a checkpoint takes until the fault is taken back",
    "restore-out-of-memory": "a restore ends with an error, and the process stays checkpointed for ever",
    "restore-hangs": "a restore takes until the fault is taken back",
    "dies-when-parked": "the process dies once it is checkpointed",
    "corrupts": "what is restored is not what was taken",
    "sleeps-falsely": "the engine says that it sleeps, and frees nothing",
}
"""What a server can be made to suffer: by its name in faults.json, for as long as it stands there."""


class SimulatedOutOfMemoryError(Exception):
    """A card has no room. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class SimulatedCard:
    """A card with so many bytes."""

    uuid: str
    bytes: int


class SimulatedMachine:
    """The folder. Any number of processes may use it at once, those in containers too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path, cards: Sequence[SimulatedCard]) -> SimulatedMachine:
        """Lays the folder out, anew where there is one. Containers' users may write there."""
        made = cls(folder)
        for name in ("", "memory", "use", *(f"memory/{card.uuid}" for card in cards)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name).chmod(0o777)
        for name in ("lock", "log.jsonl"):
            (folder / name).touch()
            (folder / name).chmod(0o666)
        told = [{"uuid": card.uuid, "bytes": card.bytes} for card in cards]
        (folder / "cards.json").write_text(json.dumps(told))
        return made

    def cards(self) -> dict[str, SimulatedCard]:
        """All cards by UUID, in order."""
        found = json.loads((self.folder / "cards.json").read_text())
        return {each["uuid"]: SimulatedCard(each["uuid"], each["bytes"]) for each in found}

    def faults(self, server: str) -> frozenset[str]:
        """What this server suffers now."""
        try:
            return frozenset(json.loads((self.folder / "faults.json").read_text()).get(server, ()))
        except FileNotFoundError:
            return frozenset()

    def suffer(self, faults: Mapping[str, Sequence[str]]) -> None:
        """From now on, and until this is called again. Raises ValueError for a fault that is none."""
        if unknown := {each for those in faults.values() for each in those} - FAULTS.keys():
            raise ValueError(f"{', '.join(sorted(unknown))}: no such fault; there are {', '.join(FAULTS)}")
        written = self.folder / "faults.json.new"
        written.write_text(json.dumps({name: list(those) for name, those in faults.items()}))
        written.replace(self.folder / "faults.json")

    # ---- memory; all with the lock held

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """While somebody changes whose memory is where; the dead have none from its begin on."""
        with (self.folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._bury()
            yield

    def used(self, uuid: str) -> dict[str, int]:
        """Bytes on a card by process."""
        return {each.name: each.stat().st_size for each in (self.folder / "memory" / uuid).iterdir()}

    def room(self, uuid: str, size: int) -> None:
        """Raises SimulatedOutOfMemoryError."""
        used, whole = self.used(uuid), self.cards()[uuid].bytes
        if sum(used.values()) + size > whole:
            raise SimulatedOutOfMemoryError(
                f"{uuid} has {whole - sum(used.values())} bytes free of {whole}, not {size}"
            )

    def tell(self, op: str, server: str, id: str, **facts: Any) -> None:
        """Writes what happened into the log."""
        line = json.dumps({"time": time.time(), "op": op, "server": server, "id": id, "pid": os.getpid(), **facts})
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(line + "\n")

    def _bury(self) -> None:
        for place in (self.folder / "use").iterdir():
            if not alive(place):
                place.unlink(missing_ok=True)
        living = {place.name for place in (self.folder / "use").iterdir()}
        for held in (self.folder / "memory").glob("*/*"):
            if held.name not in living:
                size = held.stat().st_size
                held.unlink()
                self.tell("buried", "", held.name, card=held.parent.name, bytes=size)


def alive(place: Path) -> bool:
    """Whether anybody listens on a process's socket."""
    try:
        with connected(place):
            return True
    except (ConnectionRefusedError, FileNotFoundError):
        return False


@contextlib.contextmanager
def connected(place: Path) -> Iterator[socket.socket]:
    """A connection to a process's socket, however long its path is. Raises OSError."""
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            made.connect(f"/proc/self/fd/{folder}/{place.name}")
            yield made
    finally:
        os.close(folder)
