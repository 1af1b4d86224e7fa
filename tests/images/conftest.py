"""Registries: one in this process that misbehaves where a test tells it to, and real ones, go-containerregistry's, with
the referrers API and without, each on a free port.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from images.endpoints import Settings
from images.reference import Reference
from images.registry import Registry
from stack import Lines, StackError
from stack.pki import Pair
from stack.proc import die_with_parent
from stack.tools import Toolbox
from tests.images import hostile


@dataclass(frozen=True)
class RealRegistry:
    """One that runs. `settings` reach it."""

    host: str
    referrers: bool
    process: subprocess.Popen[str]

    @property
    def settings(self) -> Settings:
        return Settings(insecure=frozenset({self.host}))

    def reference(self, rest: str) -> Reference:
        """Such as `team/cache:v1`."""
        return Reference.parse(f"{self.host}/{rest}")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[hostile.Registry]:
    """An empty one."""
    async with hostile.Registry() as server:
        yield server


@pytest_asyncio.fixture
async def registry(server: hostile.Registry) -> AsyncIterator[Registry]:
    """The client under test, which reaches `server`."""
    async with Registry(server.settings) as registry:
        yield registry


@pytest.fixture(scope="session")
def registry_program(pytestconfig: pytest.Config) -> Path:
    try:
        capture = pytestconfig.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            return Toolbox().ensure(["registry-referrers"], Lines())["registry-referrers"].path
    except StackError as error:
        pytest.skip(f"the test registry cannot be had here: {error}")


@contextmanager
def running(
    program: Path,
    *,
    referrers: bool = True,
    address: str = "127.0.0.1:0",
    password: str = "",
    tls: Pair | None = None,
    blobs: Path | None = None,
) -> Iterator[RealRegistry]:
    """The registry, until the block ends. With a password its user is `someone`."""
    command = [str(program), "-address", address, f"-referrers={'true' if referrers else 'false'}"]
    if password:
        command += ["-user", "someone"]
    if tls is not None:
        command += ["-tls-cert", str(tls.cert), "-tls-key", str(tls.key)]
    if blobs is not None:
        command += ["-blobs", str(blobs)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"REGISTRY_PASSWORD": password},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=die_with_parent,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving on "), f"the registry did not start: {line!r}"
            yield RealRegistry(line.removeprefix("serving on ").strip(), referrers, process)
        finally:
            process.kill()


@pytest.fixture(scope="session", params=[True, False], ids=["referrers-api", "fallback-tag"])
def real_registry(request: pytest.FixtureRequest, registry_program: Path) -> Iterator[RealRegistry]:
    """One of each kind, shared: use repositories of your own."""
    with running(registry_program, referrers=request.param) as registry:
        yield registry
