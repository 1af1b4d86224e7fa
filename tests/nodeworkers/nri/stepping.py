"""Stops a process where it enters a system call, so that what others do at that moment can be tested: ptrace(2), on
x86-64, from whoever started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Callable

CLONE, WAIT4 = 56, 61

_SEIZE, _INTERRUPT, _SYSCALL, _DETACH, _GETREGS = 0x4206, 0x4207, 24, 17, 12
_TRACESYSGOOD = 1
_ORIG_RAX, _RAX = 15 * 8, 10 * 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def at_entry(pid: int, number: int, first: Callable[[], None], then: Callable[[], None]) -> None:
    """Calls `first`, and `then` while the process stands before the next system call of that number that follows."""
    _ptrace(_SEIZE, pid, _TRACESYSGOOD)
    _ptrace(_INTERRUPT, pid, 0)
    os.waitpid(pid, 0)
    first()
    delivered = 0
    while True:
        _ptrace(_SYSCALL, pid, delivered)
        _, status = os.waitpid(pid, 0)
        stopped = os.WSTOPSIG(status)
        # Of a signal that is delivered, not of a stop by the tracer (a group stop's event is in the upper bits).
        delivered = stopped if stopped != signal.SIGTRAP | 0x80 and status >> 16 == 0 else 0
        if stopped == signal.SIGTRAP | 0x80 and _entering(pid, number):
            then()
            _ptrace(_DETACH, pid, 0)
            return


def _entering(pid: int, number: int) -> bool:
    """At the entry the result is -ENOSYS yet."""
    registers = ctypes.create_string_buffer(27 * 8)
    if _libc.ptrace(_GETREGS, pid, None, registers) != 0:
        raise OSError(ctypes.get_errno(), "PTRACE_GETREGS")
    asked = struct.unpack_from("q", registers, _ORIG_RAX)[0]
    return bool(asked == number and struct.unpack_from("q", registers, _RAX)[0] == -38)


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, data) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request} of {pid}: {os.strerror(ctypes.get_errno())}")
