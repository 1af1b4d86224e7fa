"""Looks at one vendor's hardware time and again, in a process of its own, and tells what it sees on its stdout.

A driver may hang or crash whoever calls it; here that is nobody but this process, which `nodeworkers.hardware.watching`
starts, ends and starts again. It stays small, for each node has one of them for each vendor that it has cards of.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.source import Source
from nodeworkers.hardware.wire import WireError, encode
from planning.devices.cards import Sight, Vendor

# A new vendor is one line here: where its Source is made, from nothing.
SOURCES: dict[str, str] = {
    "nvidia": "nodeworkers.hardware.nvidia:Nvidia",
    "tenstorrent": "nodeworkers.hardware.tenstorrent:Tenstorrent",
}
# And, where it can be simulated, one line here: from a machine's YAML file and a folder for its tree.
SIMULATED: dict[str, str] = {
    "nvidia": "nodeworkers.hardware.machine_nvidia:simulated",
    "tenstorrent": "nodeworkers.hardware.machine_tenstorrent:simulated",
}
LOOK_SECONDS = 2.0  # from one look to the next where nothing happens: each line is also the sign of life
SHORTEST_SECONDS = 0.1  # from one look to the next where much happens
_SET_PDEATHSIG = 1  # of prctl(2)


def watch(source: Source, output: int, seconds: float = LOOK_SECONDS) -> NoReturn:
    """Writes a line for each look to the file descriptor `output`, until the process is ended or nobody reads it."""
    with contextlib.closing(source):
        while True:
            began = time.monotonic()
            _write(output, _line(source))
            source.wait(seconds)
            time.sleep(max(0.0, began + SHORTEST_SECONDS - time.monotonic()))


def _line(source: Source) -> bytes:
    try:
        return encode(source.look())
    except (HardwareError, WireError) as error:
        return encode(Sight(source.vendor, problem=str(error).encode(errors="replace").decode()))


def _write(output: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(output, rest) :]


def _source(vendor: Vendor, simulated: Path | None, tree: Path | None) -> Source:
    place = SOURCES[vendor] if simulated is None else SIMULATED[vendor]
    module, _, name = place.partition(":")
    make = getattr(importlib.import_module(module), name)
    return cast("Source", make() if simulated is None else make(simulated, tree))


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


def _die_with(parent: int | None) -> None:
    """Ends this process when the thread that started it is gone, also if it went before this was called."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if parent is not None and os.getppid() not in (parent, 0):  # 0: it lives in another namespace of processes
        raise SystemExit("the process that started it is gone")


def _own_stdout() -> int:
    """Where lines go. What else writes to stdout, such as a driver's library, writes to stderr from now on."""
    own = os.dup(1)
    os.dup2(2, 1)
    return own


def main(arguments: Sequence[str]) -> None:
    """`watcher VENDOR [--simulated FILE --tree DIR]`; `--parent` is the process without which it is not to live."""
    parser = argparse.ArgumentParser(prog="nodeworkers.hardware.watcher", description=__doc__)
    parser.add_argument("vendor", choices=sorted(SOURCES))
    parser.add_argument("--simulated", type=Path, metavar="FILE", help="the YAML file of a simulated machine")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="where the simulated machine's files lie")
    parser.add_argument("--parent", type=int, metavar="PID", help="the process with which this one ends")
    asked = parser.parse_args(arguments)
    if (asked.simulated is None) != (asked.tree is None):
        parser.error("--simulated and --tree belong together")
    _die_with(asked.parent)
    signal.signal(signal.SIGTERM, _end)
    output = _own_stdout()
    with contextlib.suppress(BrokenPipeError):
        watch(_source(asked.vendor, asked.simulated, asked.tree), output)


if __name__ == "__main__":
    main(sys.argv[1:])
