"""Whether a seat's server answers, asked the way its clients would: for the end of a switch, before its door opens.

One line of the answer is read, whatever else comes, so that a server which talks without end costs nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re

_MOST_LINE, _MOST_LINES = 8 * 1024, 128  # bytes of a line, and lines: of answers that only announce another (1xx)
_STATUS = re.compile(rb"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: [^\r\n]*)?\r?\n")
_PREFACE = 9  # bytes of a frame's head (RFC 9113, section 4.1)
_SETTINGS = 4


async def serves(address: str, path: str = "/health", timeout: float = 2.0) -> str:
    """Why the server on `address` ("ip:port") does not answer a GET of `path` within `timeout` seconds; '' if it does:
    any status below 500 will do, and so does one that speaks nothing but HTTP/2.
    """
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not _is_address(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return f"{address!r} is no address of a server: it is to be ip:port."
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
        return f"{path!r} is no path that a server can be asked for."
    try:
        async with asyncio.timeout(timeout):
            status = await _ask(host, int(port), address, path)
    except TimeoutError:
        return f"The server on {address} does not answer {path} within {timeout:g} s."
    except ConnectionRefusedError:
        return f"The server on {address} does not listen."
    except OSError as error:
        return f"The server on {address} does not answer {path}: {error.strerror or error}."
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        return f"What the server on {address} answers to {path} is no HTTP."
    if status >= 500:
        return f"The server on {address} answers {path} with status {status}."
    return ""


def _is_address(text: str) -> bool:
    """Not a name: looking one up may take as long as it likes."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


async def _ask(host: str, port: int, address: str, path: str) -> int:
    """The status that it answers with, 200 where it speaks HTTP/2 only."""
    reader, writer = await asyncio.open_connection(host, port, limit=_MOST_LINE)
    try:
        lines = (f"GET {path} HTTP/1.1", f"Host: {address}", "User-Agent: berth", "Accept: */*", "Connection: close")
        writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        await writer.drain()
        head = await reader.readexactly(_PREFACE)
        if not head.startswith(b"HTTP/1."):
            # Such a server introduces itself before it reads anything: SETTINGS, of stream 0, no flags.
            length = int.from_bytes(head[:3])
            if head[3:] == bytes((_SETTINGS, 0, 0, 0, 0, 0)) and length % 6 == 0:
                return 200
            raise ValueError
        line = head + await reader.readuntil(b"\n")
        for _ in range(_MOST_LINES):
            if (found := _STATUS.fullmatch(line)) is None:
                raise ValueError
            if (status := int(found[1])) >= 200:
                return status
            while (line := await reader.readuntil(b"\n")).strip():
                pass
            line = await reader.readuntil(b"\n")
        raise ValueError
    finally:
        writer.transport.abort()
