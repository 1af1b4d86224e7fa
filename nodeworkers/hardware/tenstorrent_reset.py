"""The reset of a Tenstorrent card that nobody holds, by its driver's own lock: for whoever was asked to have cards
reset between their tenants, and for nobody else.

A reset takes the card from every process that has it open. The driver does not ask whose it is, so this does: the card
stays open exclusively (tt-kmd 2.10) from the proof that it is idle to the end of the reset.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planning.devices.cards import Card

# tt-kmd ioctl.h: _IO(0xFA, n), structures of an in part and an out part.
GET_DEVICE_INFO = 0xFA00
RESET_DEVICE = 0xFA06
ASIC_RESET = 4
POST_RESET = 6
DEVICE_INFO = struct.Struct("=I I4H H H H H")  # in: size of out; out: size, ids, bus_dev_fn, dma bits, domain, reserved
RESET = struct.Struct("=II II")  # in: size of out, flags; out: size, result
_INFO_OUT, _RESET_OUT = DEVICE_INFO.size - 4, 8

EXCLUSIVE = os.O_RDWR | os.O_EXCL | os.O_NONBLOCK | os.O_APPEND | os.O_CLOEXEC  # O_APPEND: the card is not powered up
FIRST_EXCLUSIVE = (2, 10)  # tt-kmd before that ignores O_EXCL
_SETTLE = 0.5  # seconds that a Wormhole takes to begin (tt-kmd tools/reset.c)
_RESET_SECONDS = 5.0  # until the card has reset itself (likewise)
_NODE_SECONDS = 10.0  # until its node is there anew (likewise)
_PAUSE = 0.1
_COMMAND, _PARITY = 4, 0x40  # of PCI's configuration space: the driver's marker, which a reset clears
_GONE = (errno.ENODEV, errno.ENXIO, errno.ENOENT)


class ResetError(Exception):
    """A card that was not reset, or not to its end. The text is a sentence: why, and what to do. `begun`: it may be in
    the middle of it.
    """

    begun = False


class Calls(Protocol):
    """The system calls that reach a driver."""

    def open(self, path: str, flags: int) -> int: ...

    def close(self, descriptor: int) -> None: ...

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> None:
        """Changes `argument` in place."""


class Kernel:
    """Calls, to the real driver."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> None:
        fcntl.ioctl(descriptor, request, argument, True)


@dataclass(frozen=True, slots=True)
class Patience:
    """How time passes, in seconds."""

    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep


def exclusive(card: Card) -> bool:
    """Whether the card's driver knows exclusive opening."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", card.driver)
    return match is not None and (int(match[1]), int(match[2])) >= FIRST_EXCLUSIVE


def reset(
    card: Card,
    sys: Path = Path("/sys"),
    dev: Path = Path("/dev"),
    calls: Calls | None = None,
    patience: Patience | None = None,
) -> int:
    """Resets a card that nobody holds, and returns when it can be used again, after some seconds, with the number that
    it has then. Blocks, and must not be ended midway. Raises ResetError.

    Source of the sequence: tt-kmd tools/reset.c and chardev.c (a reset keeps the descriptor that asked for it valid).
    """
    calls, patience = calls or Kernel(), patience or Patience()
    if not exclusive(card):
        raise ResetError(
            f"{card.id} is not reset: its driver ({card.driver or 'of unknown version'}) cannot prove that nobody "
            "holds it. Update tt-kmd to 2.10 or newer."
        )
    if not card.nodes:
        raise ResetError(f"{card.id} is not reset: it has no device node.")
    run = _Reset(card, sys, dev, calls, patience)
    try:
        return run.run()
    except ResetError as error:
        error.begun = run.begun
        raise


class _Reset:
    def __init__(self, card: Card, sys: Path, dev: Path, calls: Calls, patience: Patience) -> None:
        self._card, self._dev, self._calls, self._patience = card, dev, calls, patience
        self._pci = sys / "bus" / "pci" / "devices" / card.address
        self._number = card.index
        self.begun = False

    def run(self) -> int:
        descriptor = self._open(self._card.nodes[0])
        try:
            self._is_it(descriptor)
            self._ask(descriptor, ASIC_RESET, "does not begin its reset")
            self.begun = True
            gone = self._through(descriptor)
            if gone:
                self._close(descriptor)
                descriptor = -1
                descriptor = self._again()
                self._is_it(descriptor)
            self._ask(descriptor, POST_RESET, "has reset itself but does not start again")
            return self._number
        finally:
            if descriptor >= 0:
                self._close(descriptor)

    def _open(self, path: str) -> int:
        try:
            return self._calls.open(path, EXCLUSIVE)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EBUSY):
                raise ResetError(f"{self._card.id} is not reset: a process holds it ({path}). End it.") from error
            raise ResetError(f"{self._card.id} is not reset: {path} cannot be opened: {_words(error)}.") from error

    def _is_it(self, descriptor: int) -> None:
        """A node's number may be another card's by now."""
        address = self._address(descriptor)
        if address != self._card.address:
            raise ResetError(
                f"{self._card.id} is left alone: its device node is now that of the card at {address}, not of the one "
                f"at {self._card.address}. Look at the node's cards anew."
            )

    def _address(self, descriptor: int) -> str:
        argument = bytearray(DEVICE_INFO.size)
        struct.pack_into("=I", argument, 0, _INFO_OUT)
        try:
            self._calls.ioctl(descriptor, GET_DEVICE_INFO, argument)
        except OSError as error:
            raise ResetError(f"{self._card.id} does not say which card it is: {_words(error)}.") from error
        place, _, domain = DEVICE_INFO.unpack(argument)[6:9]
        return f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"

    def _ask(self, descriptor: int, what: int, failure: str) -> None:
        argument = bytearray(RESET.pack(_RESET_OUT, what, 0, 0))
        advice = "Look into the kernel log; tt-smi -r resets it by force."
        try:
            self._calls.ioctl(descriptor, RESET_DEVICE, argument)
        except OSError as error:
            if error.errno == errno.EBUSY:
                advice = "Another device has its memory mapped (dma-buf); end what uses that."
            raise ResetError(f"{self._card.id} {failure}: {_words(error)}. {advice}") from error
        result = RESET.unpack(argument)[3]
        if result:
            raise ResetError(f"{self._card.id} {failure} (result {result}). {advice}")

    def _through(self, descriptor: int) -> bool:
        """Waits until the card has reset itself. Whether it left the bus for that, so that its node is another now."""
        self._patience.pause(_SETTLE)
        deadline, left = self._patience.clock() + _RESET_SECONDS, False
        while self._patience.clock() < deadline:
            if not self._pci.exists():
                left = True
            elif left or self._detached(descriptor):
                return True
            elif self._cleared():
                return False
            self._patience.pause(_PAUSE)
        raise ResetError(
            f"{self._card.id} has not come back from its reset within {_RESET_SECONDS:g} s. Reset it with tt-smi -r, "
            "or power the node off and on."
        )

    def _detached(self, descriptor: int) -> bool:
        """It may have left the bus and come back between two looks."""
        try:
            self._calls.ioctl(descriptor, GET_DEVICE_INFO, bytearray(struct.pack("=I", _INFO_OUT)) + bytes(_INFO_OUT))
        except OSError as error:
            return error.errno in _GONE
        return False

    def _cleared(self) -> bool:
        with suppress(OSError), (self._pci / "config").open("rb") as config:
            config.seek(_COMMAND)
            command = config.read(1)
            return len(command) == 1 and not command[0] & _PARITY
        return False

    def _again(self) -> int:
        """Opens the card under whatever number it has come back, before anybody else does."""
        deadline = self._patience.clock() + _NODE_SECONDS
        while self._patience.clock() < deadline:
            for entry in sorted(self._pci.glob("tenstorrent/tenstorrent!*")):
                number = entry.name.partition("!")[2]
                with suppress(OSError, ValueError):
                    self._number = int(number)
                    return self._calls.open(str(self._dev / "tenstorrent" / number), EXCLUSIVE)
            self._patience.pause(_PAUSE)
        raise ResetError(
            f"{self._card.id} came back from its reset at {self._card.address}, but its device node cannot be opened. "
            "Reset it with tt-smi -r."
        )

    def _close(self, descriptor: int) -> None:
        with suppress(OSError):
            self._calls.close(descriptor)


def _words(error: OSError) -> str:
    return error.strerror or str(error)
