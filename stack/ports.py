"""Chooses free TCP ports on loopback and keeps them as long as nobody else takes them.

For `Stack.up`. Ports come from below the kernel's range for outgoing connections: a port out of that range could be
taken by any client while a killed process is being restarted.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from stack.errors import StackError

_LOW = 10240


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT does not matter
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def choose(names: Iterable[str], kept: Mapping[str, int], preferred: Mapping[str, int] | None = None) -> dict[str, int]:
    """A free port for each name: the kept one, else the preferred one, else any.

    Ports kept for names that are not asked for stay reserved and are returned as well.
    """
    result = dict(kept)
    wanted = list(names)
    for name in wanted:
        if name in kept and not is_free(kept[name]):
            del result[name]
    top = max(_ephemeral_start(), _LOW + 4096)
    for name in wanted:
        if name in result:
            continue
        used = set(result.values())
        first = (preferred or {}).get(name)
        candidates = [first] if first is not None else []
        candidates += [random.randrange(_LOW, top) for _ in range(200)]
        for port in candidates:
            if port not in used and is_free(port):
                result[name] = port
                break
        else:
            raise StackError("No free TCP port was found on 127.0.0.1.", "Stop what listens there: ss -ltnp lists it.")
    return result
