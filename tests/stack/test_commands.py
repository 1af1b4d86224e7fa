"""`berth up | down | status | logs` as a person meets them, over existing services."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from berth.cli.application import application_processes
from berth.cli.stack_commands import register
from stack import APPLICATION_PORTS, Endpoints, ProcessSpec, Stack, UpOptions
from tests.stack.outside import Outside

CODE = "import time; print('at work', flush=True); time.sleep(1000)"


class Cli:
    """The app with an application of one process."""

    def __init__(self, data: Path, outside: Outside) -> None:
        self.data = data
        self.outside = outside
        self.installed: list[Endpoints] = []
        self.options: list[UpOptions] = []
        self.app = typer.Typer()
        register(self.app, self._processes, self._install)

    def _install(self, endpoints: Endpoints, *, node: str) -> None:
        assert not node, "an existing cluster has no node of the stack's"
        self.installed.append(endpoints)

    def _processes(self, endpoints: Endpoints, options: UpOptions, *, simulated_gpus: str) -> list[ProcessSpec]:
        assert self.installed, "the processes were asked for before the cluster was prepared"
        self.options.append(options)
        return [ProcessSpec("worker", (sys.executable, "-c", CODE), port=endpoints.ports["worker-health"])]

    def __call__(self, command: str, *arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(self.app, [command, "--data", str(self.data), *arguments])
        assert result.exit_code == code, result.output
        return result.output

    def up(self, *arguments: str) -> str:
        port = self.outside.port
        kubeconfig = self.outside.kubeconfig
        return self("up", "--kubeconfig", str(kubeconfig), "--temporal-address", f"127.0.0.1:{port}", *arguments)


@pytest.fixture
def cli(tmp_path: Path, outside: Outside) -> Iterator[Cli]:
    made = Cli(tmp_path / "data", outside)
    yield made
    Stack(made.data).down()


def test_up_status_logs_down(cli: Cli) -> None:
    shown = cli.up()
    assert "existing" in shown
    assert "export KUBECONFIG=" in shown
    assert "Up in" in shown
    assert len(cli.installed) == 1
    status = cli("status")
    assert "worker" in status
    assert "ready" in status
    told = json.loads(cli("status", "--json"))
    assert [each["name"] for each in told["processes"]] == ["worker"]
    assert told["endpoints"]["temporal_address"].startswith("127.0.0.1:")
    assert "at work" in cli("logs", "worker")
    assert "supervisor | " in cli("logs").replace("supervisor |", "supervisor | ")
    assert "ended" in cli("down")
    assert "nothing was running" in cli("down")
    assert "stopped" in cli("status", code=1)


def test_services_only(cli: Cli) -> None:
    cli.up("--services-only")
    assert Stack(cli.data).names == []
    assert len(cli.installed) == 1


def test_errors_say_what_happened_and_what_to_do(cli: Cli, tmp_path: Path) -> None:
    assert "Start one with `berth up`" in cli("status", code=1)
    cli.up()
    shown = cli("logs", "wroker", code=1)
    assert "no process wroker" in shown
    assert "Known: worker, supervisor" in shown
    shown = cli("up", "--kubeconfig", str(tmp_path / "absent"), "--temporal-address", "127.0.0.1:1", code=1)
    assert "error:" in shown
    assert "hint:" in shown
    assert "is not NAME=PATH" in cli("up", "--tool", "etcd", code=1)
    assert "Add --real-node" in cli("up", "--simulated-gpus", "2xH100", code=1)
    assert "Products are" in cli("up", "--real-node", "--simulated-gpus", "2xH1000", code=1)


def test_berths_processes_hear_of_the_embedded_temporal_alone(tmp_path: Path) -> None:
    ports = {name: number for number, name in enumerate(APPLICATION_PORTS, 1)}
    endpoints = Endpoints(
        data=tmp_path,
        temporal_address="127.0.0.1:7",
        temporal_namespace="default",
        temporal_ui=None,
        temporal_tls=False,
        temporal_tls_ca=None,
        temporal_tls_cert=None,
        temporal_tls_key=None,
        temporal_tls_server_name=None,
        temporal_api_key_env=None,
        kubeconfigs={name: tmp_path / name for name in ("admin", "berth-controller", "berth-worker")},
        embedded_cluster=True,
        embedded_temporal=True,
        ports=ports,
    )
    specs = application_processes(endpoints, UpOptions(real_node=True), simulated_gpus="2xH100")
    assert [spec.name for spec in specs] == ["controller", "worker", "node"]
    assert specs[-1].argv[specs[-1].argv.index("--simulated-gpus") + 1] == "2xH100"
    for spec in specs:
        assert {name: value for name, value in spec.env.items() if name.startswith("TEMPORAL_")} == {
            "TEMPORAL_ADDRESS": "127.0.0.1:7",
            "TEMPORAL_NAMESPACE": "default",
            "TEMPORAL_CONFIG_FILE": "/dev/null",
        }
