"""Fixtures that several rooms share: the embedded stack, real and running.

`stack` is one stack for the whole session. `make_stack` gives private ones, for tests that kill, restart or configure.
Programs are found or built before the first test, outside any test's time limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import hypothesis
import pytest

from stack import Lines, Stack, StackError, UpOptions
from stack.plan import needed_tools
from stack.realnode import unavailable
from stack.tools import Toolbox

MakeStack = Callable[..., Stack]

# Machines are shared: how long one example took by the clock says nothing about the code.
hypothesis.settings.register_profile("berth", deadline=None)
hypothesis.settings.load_profile("berth")

_MARKS = ("stack", "faults", "node")
_missing = ""


def pytest_configure() -> None:
    """What a person has set for a Temporal of theirs must not count here. And Pythons that tests start may keep what
    they compiled: else each spends two seconds of a processor on what the one before it had compiled already.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in [name for name in os.environ if name.startswith("TEMPORAL_")]:
        del os.environ[name]
    os.environ["TEMPORAL_CONFIG_FILE"] = os.devnull
    # Its handlers end one in a hundred children that are forked beside a server (before they exec), and nobody here
    # goes on with gRPC after a fork.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes the programs ready if a chosen test needs them."""
    global _missing
    if session.config.option.collectonly:
        return
    if not any(item.get_closest_marker(mark) for item in session.items for mark in _MARKS):
        return
    node = any(item.get_closest_marker("node") for item in session.items) and not unavailable()
    box, names = Toolbox(), needed_tools(UpOptions(real_node=node))
    try:
        if all(box.find(name) for name in names):
            return
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            box.ensure(names, Lines())
    except StackError as error:
        _missing = str(error)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs the stack, by name and reason, where its programs can neither be found nor built."""
    if _missing and any(item.get_closest_marker(mark) for mark in _MARKS):
        pytest.skip(f"the embedded stack cannot be had here: {_missing}")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A running stack, shared: use names of your own, and leave its processes alone."""
    shared = Stack(tmp_path_factory.mktemp("stack"))
    shared.up(UpOptions(end_with_caller=True, etcd_fsync=False))
    yield shared
    shared.down()


@pytest.fixture
def make_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeStack]:
    """`make_stack(UpOptions(...))` gives a private running stack; it is ended after the test."""
    made: list[Stack] = []

    def make(options: UpOptions | None = None) -> Stack:
        private = Stack(tmp_path_factory.mktemp("private"))
        made.append(private)
        private.up(replace(options or UpOptions(), end_with_caller=True))
        return private

    yield make
    for each in made:
        each.down()
