"""`python -m nodeworkers.seats.helper --socket PATH --driver cuda` (or simulated:FOLDER): one group's helper, until
SIGTERM.

It begins as nobody's child and outlives whoever began it. A second one on the same socket ends at once, and one whose
socket is gone ends as if it were told to: nobody can speak to it any more.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from nodeworkers.seats.helper.driver import Driver, DriverError
from nodeworkers.seats.helper.serving import Helper

_LOOK = 1.0  # seconds between looks whether its socket is still there: nobody else can reach it


def driver_of(name: str) -> Driver:
    """Ready for calls. Raises DriverError, and ValueError for a name that is none."""
    kind, _, folder = name.partition(":")
    if kind == "simulated":
        from nodeworkers.seats.simulated_gpu.driver import SimulatedDriver

        return SimulatedDriver(Path(folder))
    if kind == "cuda":
        from nodeworkers.seats.helper.cuda_driver import CudaDriver

        return CudaDriver()
    raise ValueError(f"There is no driver {name!r}: cuda, or simulated:FOLDER.")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="seat-helper")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--driver", required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    path: Path = options.socket
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another helper serves {path}.", file=sys.stderr)
            return 1
        try:
            driver = driver_of(options.driver)
        except (DriverError, ValueError) as error:
            print(f"The GPUs' driver cannot be used: {error}", file=sys.stderr)
            return 1
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            except OSError as error:  # such as a path that is too long for a socket
                print(f"Nobody can be served on {path}: {error}", file=sys.stderr)
                return 1
            finally:
                os.umask(before)
            listener.listen(32)
            helper = Helper(driver, path)
            told = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: told.set())
            threading.Thread(target=helper.serve, args=(listener,), daemon=True).start()
            mine = _inode(path)
            while not told.wait(_LOOK) and _inode(path) == mine:
                pass
            helper.end()  # no call is ever broken off
            if _inode(path) == mine:
                path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
