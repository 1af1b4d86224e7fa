"""The driver's calls by which a card is reset, over the tree of a simulated machine: who holds a card, and what comes
of its reset, is what the machine's file says.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path

from nodeworkers.hardware.tenstorrent_reset import ASIC_RESET, DEVICE_INFO, GET_DEVICE_INFO, POST_RESET, RESET

MARKER = ".simulated-reset"  # beside a card's attributes: what comes of its reset, `works` where there is none
_PAUSE = 0.05  # seconds between two looks at whether a reset still hangs


class SimulatedKernel:
    """Calls, as `tenstorrent_reset.reset` makes them. A reset takes the card off the bus and back at once, under the
    number that it had. One that hangs does so until the machine's file says something else, or nobody waits any more.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._parent = os.getppid()
        self._cards: dict[int, tuple[Path, bool]] = {}  # by descriptor: its folder, and whether a reset took it away

    def open(self, path: str, flags: int) -> int:
        number = os.path.basename(os.path.realpath(path))
        folder = self._tree / "sys" / "class" / "tenstorrent" / f"tenstorrent!{number}"
        if not (os.path.lexists(path) and folder.exists()):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        descriptor = os.open(folder.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (self._tree / "proc" / "driver" / "tenstorrent" / number / "pids").read_text().strip():
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError:
            os.close(descriptor)
            raise
        self._cards[descriptor] = folder.resolve(), False
        return descriptor

    def close(self, descriptor: int) -> None:
        del self._cards[descriptor]
        os.close(descriptor)

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> None:
        folder, gone = self._cards[descriptor]
        if gone:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        if request == GET_DEVICE_INFO:
            place = re.fullmatch(r"([0-9a-f]{4}):(..):(..)\.(.)", (folder / "device").resolve().name)
            if place is None:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            domain, bus, device, function = (int(part, 16) for part in place.groups())
            DEVICE_INFO.pack_into(
                argument, 0, 20, 20, 0x1E52, 0, 0x1E52, 0, bus << 8 | device << 3 | function, 0, domain, 0
            )
            return
        size, step, _, _ = RESET.unpack(argument)
        if step == ASIC_RESET:
            while self._comes(folder) == "hangs" and os.getppid() == self._parent:
                time.sleep(_PAUSE)
            self._cards[descriptor] = folder, True
        RESET.pack_into(argument, 0, size, step, 8, int(step == POST_RESET and self._comes(folder) == "fails"))

    def _comes(self, folder: Path) -> str:
        try:
            return (folder / MARKER).read_text().strip()
        except OSError:
            return "works"
