"""Stand-ins for existing services: with them a stack needs no programs, and what is left is the supervision itself."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stack import Stack
from tests.stack.outside import Outside


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Server(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.server_address[1]
        file = tmp_path_factory.mktemp("outside") / "config"
        file.write_text(
            yaml.safe_dump(
                {
                    "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}"}}],
                    "users": [{"name": "u", "user": {"client-key": "key.pem"}}],
                    "contexts": [{"name": "prod", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "prod",
                }
            )
        )
        yield Outside(port, file)
        server.shutdown()
        thread.join()


@pytest.fixture
def light(tmp_path: Path, outside: Outside) -> Iterator[Stack]:
    """A running stack without any services of its own."""
    stack = Stack(tmp_path / "data")
    stack.up(outside.options)
    yield stack
    stack.down()
