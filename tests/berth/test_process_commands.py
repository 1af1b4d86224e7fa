"""The long-running processes as the command line starts them: each has the options of all, and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from berth import controller_process, node_process, worker_process
from berth.cli import command_line
from berth.process import ProcessOptions

COMMON = ["--kubeconfig", "k", "--context", "c", "--temporal-address", "t:1", "--temporal-namespace", "n"]
COMMON += ["--health-port", "1", "--metrics-port", "2", "--bind", "127.0.0.1", "--log-level", "debug"]
GIVEN = ProcessOptions(Path("k"), "c", "t:1", "n", 1, 2, "127.0.0.1", "debug")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    for module, name in (
        (controller_process, "run_controller"), (worker_process, "run_worker"), (node_process, "run_node"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *given, **named: calls.append((*given, named)))
    return calls


def run(*arguments: str) -> None:
    result = CliRunner().invoke(command_line(), arguments)
    assert result.exit_code == 0, result.output


def test_what_is_left_out_has_its_default(started: list[tuple[Any, ...]]) -> None:
    run("controller")
    run("worker")
    run("node", "--node-name", "n1")
    assert [call[0] for call in started] == [ProcessOptions()] * 3
    assert [call[-1] for call in started[:2]] == [{"resync": 600.0, "webhook_port": 9443}, {"take_over": False}]


def test_each_gets_the_options_of_all_beside_its_own(started: list[tuple[Any, ...]]) -> None:
    run("controller", *COMMON, "--resync", "5")
    run("worker", *COMMON, "--make-current")
    run("node", *COMMON, "--node-name", "n1", "--quota", "1Ki")
    assert [call[0] for call in started] == [GIVEN] * 3
    assert started[0][-1]["resync"] == 5.0 and started[1][-1]["take_over"]
    assert (started[2][1].name, started[2][1].quota) == ("n1", 1024)
