"""Runs a vendor's program that reports hardware, for the providers: no shell, a fixed environment, bounded in time and
in what it prints. It may be killed, for it only reads.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nodeworkers.hardware.provider import HardwareError

PATH = "/opt/rocm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHUNK = 65_536
_LAST = 1.0  # seconds that a killed program gets to be gone


@dataclass(frozen=True, slots=True)
class Printed:
    """How a program ended (its exit status; -N: signal N) and what it printed."""

    status: int
    stdout: bytes
    stderr: bytes


def find(program: str, path: str = PATH) -> str | None:
    """The program in the folders of `path`, never in those of the environment; None if it is in none of them."""
    return shutil.which(program, path=path)


def run(command: Sequence[str], timeout: float, most: int) -> Printed:
    """What `command`, a program's path and its arguments, printed. Blocks for at most `timeout` seconds and a little.
    Raises HardwareError if it cannot be started, takes longer, or prints more than `most` bytes.
    """
    name = os.path.basename(command[0])
    deadline = time.monotonic() + timeout
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8"},
            cwd="/",
            start_new_session=True,  # so that all it started is killed with it
        )
    except OSError as error:
        raise HardwareError(f"{command[0]} cannot be started: {error.strerror or error}; install it anew.") from error
    try:
        stdout, stderr = _read(process, name, deadline, most)
        status = process.wait(max(deadline - time.monotonic(), 0.0))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise HardwareError(
            f"{name} did not answer within {timeout:g} seconds, as when a driver hangs; run it on the node, and look "
            "into the node's kernel log."
        ) from None
    finally:
        _end(process)
    return Printed(status, stdout, stderr)


def _read(process: subprocess.Popen[bytes], name: str, deadline: float, most: int) -> tuple[bytes, bytes]:
    """Both outputs until they end."""
    outputs = {output.fileno(): bytearray() for output in (process.stdout, process.stderr) if output is not None}
    with selectors.DefaultSelector() as selector:
        for descriptor in outputs:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK)
                outputs[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                if len(outputs[key.fd]) > most:
                    raise HardwareError(f"{name} printed more than {most} bytes; run it on the node to see what.")
    stdout, stderr = outputs.values()
    return bytes(stdout), bytes(stderr)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leaves nothing running, unless the kernel itself holds it: then it ends when the kernel lets go."""
    for output in (process.stdout, process.stderr):
        if output is not None:
            output.close()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST)
