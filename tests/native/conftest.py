"""A seat proxy of its own for each test, built before the first one: outside any test's time limit. Without cargo its
tests are skipped; sources that do not build are a failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stack import Lines, StackError
from stack.native import cargo, ensure, find
from tests.native.rig import Proxy

_missing = ""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the proxy if one of its tests is to run."""
    global _missing
    here = Path(__file__).parent
    if session.config.option.collectonly or not any(here in item.path.parents for item in session.items):
        return
    if find("seat-proxy") is not None:
        return
    try:
        cargo()
    except StackError as error:
        _missing = str(error)
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        ensure("seat-proxy", Lines())


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    """A running proxy that serves nothing yet."""
    if _missing:
        pytest.skip(f"the seat proxy cannot be had here: {_missing}")
    running = Proxy(ensure("seat-proxy"), tmp_path)
    await running.start()
    yield running
    await running.stop()
