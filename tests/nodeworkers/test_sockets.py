"""gRPC servers on unix sockets: whole, or not there at all."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from nodeworkers.sockets import SocketError, serve


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return path.exists() and client.connect_ex(str(path)) == 0


async def test_what_is_cancelled_while_it_begins_serves_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    for steps in range(12):
        serving = asyncio.create_task(serve(path, []))
        for _ in range(steps):
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])
        if not serving.cancelled():
            assert answers(path)
            await serving.result().stop(grace=0)
        assert not answers(path), f"cancelled after {steps} rounds of the loop"


async def test_only_root_reaches_it(tmp_path: Path) -> None:
    server = await serve(tmp_path / "s.sock", [])
    assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o600
    await server.stop(grace=0)


async def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="is too long for a socket"):
        await serve(tmp_path / ("s" * 108), [])
