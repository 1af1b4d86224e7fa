"""A process that has memory on a GPU and can tell whether it is still what it was: what `benchmarks.seats_gpu` parks.

It says a line of JSON when it is ready and one for each order that it reads: `check`, `drop` (gives half of its pieces
back), `rate` (copies pinned memory there and back). By cuda-bindings alone; with `--simulated` on simulated GPUs, which
rehearses the benchmark and measures nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from nodeworkers.seats.simulated_gpu.device import SimulatedDevice

PIECE = 2**30  # bytes of an allocation
STRETCH = 64 * 2**20  # bytes with one word in each four
_COPIES = 8  # pieces that are copied for a rate


def word(piece: int, stretch: int) -> int:
    """What stands in each four bytes of a stretch: another in each, so that none can be taken for its neighbour."""
    return (piece * 2_654_435_761 + stretch * 40_503 + 0x5EED) % 2**32


class Memory(Protocol):
    """On one GPU."""

    def allocate(self, size: int) -> None:
        """A piece more, filled."""

    def check(self) -> str:
        """What is not what it was, '' if all is."""

    def drop(self) -> int:
        """Bytes that are left after half of the pieces were given back."""

    def rate(self) -> tuple[float, float]:
        """Bytes a second to the GPU and from it, of pinned memory."""


class CudaMemory:
    """By the driver's API, on the first GPU that is visible."""

    def __init__(self, cuda: Any = None) -> None:
        """`cuda`: the driver's API as cuda-bindings has it, by default that itself."""
        self._cuda = cuda or importlib.import_module("cuda.bindings.driver")
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", 0)
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", device))
        self._pieces: list[tuple[int, Any, int]] = []

    def allocate(self, size: int) -> None:
        number, place = len(self._pieces), self._call("cuMemAlloc", size)
        for at in range(0, size, STRETCH):
            self._call("cuMemsetD32", int(place) + at, word(number, at // STRETCH), min(STRETCH, size - at) // 4)
        self._call("cuCtxSynchronize")
        self._pieces.append((number, place, size))

    def check(self) -> str:
        buffer = bytearray(STRETCH)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for number, place, size in self._pieces:
            for at in range(0, size, STRETCH):
                length = min(STRETCH, size - at)
                self._call("cuMemcpyDtoH", address, int(place) + at, length)
                expected = word(number, at // STRETCH).to_bytes(4, sys.byteorder) * (length // 4)
                if memoryview(buffer)[:length] != expected:
                    return f"piece {number}, at {at}: it is not what was written"
        return ""

    def drop(self) -> int:
        for _, place, _ in self._pieces[1::2]:
            self._call("cuMemFree", place)
        self._pieces = self._pieces[::2]
        return sum(size for _, _, size in self._pieces)

    def rate(self) -> tuple[float, float]:
        place, host = self._call("cuMemAlloc", PIECE), self._call("cuMemHostAlloc", PIECE, 0)
        try:

            def to_gpu() -> None:
                self._call("cuMemcpyHtoD", place, host, PIECE)

            def from_gpu() -> None:
                self._call("cuMemcpyDtoH", host, place, PIECE)

            return _rate(to_gpu), _rate(from_gpu)
        finally:
            self._call("cuMemFreeHost", host)
            self._call("cuMemFree", place)

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._cuda, name)(*arguments)
        if int(result) != 0:
            raise RuntimeError(f"{name}: {getattr(result, 'name', result)}")
        return values[0] if values else None


class SimulatedMemory:
    """On a simulated GPU, which knows by itself whether its memory is what it was."""

    def __init__(self, folder: Path, card: str) -> None:
        self._device, self._card, self._has = SimulatedDevice(folder, f"holder-{os.getpid()}"), card, 0

    def allocate(self, size: int) -> None:
        if self._has:
            raise ValueError(f"a simulated GPU is rehearsed with one piece, of {PIECE} bytes at most")
        self._device.allocate(self._card, size)
        self._has = size

    def check(self) -> str:
        self._device.work()
        return ""

    def drop(self) -> int:
        return self._has

    def rate(self) -> tuple[float, float]:
        source, size = bytearray(STRETCH), STRETCH
        began = time.perf_counter()
        bytes(source)
        rate = size / (time.perf_counter() - began)
        return rate, rate


def _rate(copy: Callable[[], None]) -> float:
    copy()  # the first touches what the others use
    began = time.perf_counter()
    for _ in range(_COPIES):
        copy()
    return _COPIES * PIECE / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_holder", description=str(__doc__).split("\n")[0])
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--cpus", help="numbers with commas: where it runs, and so where its memory on the host is")
    parser.add_argument("--simulated", type=Path, metavar="FOLDER")
    parser.add_argument("--card", default="", help="of the simulated GPUs")
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, {int(each) for each in options.cpus.split(",")})
    memory: Memory = SimulatedMemory(options.simulated, options.card) if options.simulated else CudaMemory()
    for at in range(0, options.bytes, PIECE):
        memory.allocate(min(PIECE, options.bytes - at))
    _say(ready=options.bytes)
    for line in sys.stdin:
        match line.strip():
            case "check":
                _say(wrong=memory.check())
            case "drop":
                _say(left=memory.drop())
            case "rate":
                to_gpu, from_gpu = memory.rate()
                _say(to_gpu=to_gpu, from_gpu=from_gpu)
    return 0


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main())
