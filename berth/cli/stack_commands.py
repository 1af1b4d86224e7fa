"""`berth up | down | status | logs`: the embedded stack for people.

Knows the application only by what is handed to `register`: a function that describes its processes, and one that
installs it into the cluster.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Protocol

import typer
from rich.console import Console
from rich.table import Table

from stack import (
    Endpoints,
    ExistingCluster,
    ExistingTemporal,
    Lines,
    ProcessSpec,
    ProcessStatus,
    Progress,
    Stack,
    StackError,
    Terminal,
    UpOptions,
)


class ApplicationProcesses(Protocol):
    """The processes; `simulated_gpus` are those that the one of the real node pretends to find."""

    def __call__(self, endpoints: Endpoints, options: UpOptions, *, simulated_gpus: str) -> list[ProcessSpec]: ...


class AfterUp(Protocol):
    """Installs the application; `node` is the name of the stack's real node, '' if it has none."""

    def __call__(self, endpoints: Endpoints, *, node: str) -> None: ...


Data = Annotated[
    Path | None, typer.Option("--data", help="Data folder; left out: berth/default in the XDG data folder.")
]


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Prints a StackError as what it is, a message to a person, and ends with code 1."""
    try:
        yield
    except StackError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]error:[/] {_escape(error.message)}")
        if error.hint:
            console.print(f"[bold]hint:[/]  {_escape(error.hint)}")
        raise typer.Exit(1) from None


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Bars on a terminal, lines in a pipe or a CI log."""
    if sys.stderr.isatty():
        with Terminal() as bars:
            yield bars
    else:
        yield Lines()


def register(app: typer.Typer, application_processes: ApplicationProcesses, after_up: AfterUp) -> None:
    """Adds the four commands to the app."""

    @app.command()
    def up(
        data: Data = None,
        real_node: Annotated[
            bool, typer.Option("--real-node", help="Add a real kubelet with containerd (root on Debian).")
        ] = False,
        simulated_gpus: Annotated[
            str, typer.Option(help="GPUs that the real node's `berth node` pretends to find, such as 2xH100.")
        ] = "",
        kubeconfig: Annotated[
            Path | None, typer.Option(help="Use the cluster of this kubeconfig instead of starting one.")
        ] = None,
        context: Annotated[
            str | None, typer.Option(help="Use the cluster of this context instead of starting one.")
        ] = None,
        temporal_address: Annotated[
            str | None, typer.Option(help="Use Temporal at host:port instead of starting one.")
        ] = None,
        temporal_namespace: Annotated[str, typer.Option(help="Namespace of the existing Temporal.")] = "default",
        temporal_tls: Annotated[bool, typer.Option("--temporal-tls", help="TLS with the system's roots.")] = False,
        temporal_tls_ca: Annotated[Path | None, typer.Option(help="Certificate authority of Temporal.")] = None,
        temporal_tls_cert: Annotated[Path | None, typer.Option(help="Client certificate for Temporal.")] = None,
        temporal_tls_key: Annotated[Path | None, typer.Option(help="Key of the client certificate.")] = None,
        temporal_tls_server_name: Annotated[str | None, typer.Option(help="Name in Temporal's certificate.")] = None,
        temporal_api_key_env: Annotated[
            str | None,
            typer.Option(help="Environment variable with Temporal's API key; TEMPORAL_API_KEY if that is set."),
        ] = None,
        services_only: Annotated[
            bool, typer.Option("--services-only", help="Without berth's own processes, to run them by hand.")
        ] = False,
        tool: Annotated[list[str] | None, typer.Option(help="NAME=PATH of a program to use; may be repeated.")] = None,
    ) -> None:
        """Start Temporal, a Kubernetes control plane and berth on this machine (or use existing ones)."""
        with errors_for_people():
            temporal = None
            if temporal_address is not None:
                key = temporal_api_key_env or ("TEMPORAL_API_KEY" if os.environ.get("TEMPORAL_API_KEY") else None)
                temporal = ExistingTemporal(
                    temporal_address,
                    temporal_namespace,
                    temporal_tls,
                    temporal_tls_ca,
                    temporal_tls_cert,
                    temporal_tls_key,
                    temporal_tls_server_name,
                    key,
                )
            cluster = ExistingCluster(kubeconfig, context) if kubeconfig or context else None
            options = UpOptions(cluster=cluster, temporal=temporal, real_node=real_node, tools=_tools(tool or []))
            if simulated_gpus:
                _check_simulated(simulated_gpus, options)
            stack = Stack(data)
            began = time.monotonic()
            with shown_progress() as progress:
                endpoints = stack.up(
                    options,
                    progress,
                    None
                    if services_only
                    else lambda endpoints: application_processes(endpoints, options, simulated_gpus=simulated_gpus),
                    lambda endpoints: after_up(endpoints, node=options.node_name if options.has_real_node else ""),
                )
            _print_endpoints(endpoints)
            Console(highlight=False).print(f"Up in {time.monotonic() - began:.1f} s. End it with `berth down`.")

    @app.command()
    def down(data: Data = None) -> None:
        """End what `berth up` started, and nothing else. Keeps all data."""
        with errors_for_people(), shown_progress() as progress:
            if not Stack(data).down(progress):
                progress.finish("stack", "nothing was running")

    @app.command()
    def status(
        data: Data = None,
        as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    ) -> None:
        """Show the stack's processes and addresses; ends with code 1 unless all of them are ready."""
        with errors_for_people():
            stack = Stack(data)
            endpoints, processes = stack.endpoints, stack.probe()
        if as_json:
            value = {"processes": [asdict(each) for each in processes], "endpoints": endpoints.to_json()}
            print(json.dumps(value, indent=2))
        else:
            _print_status(processes)
            _print_endpoints(endpoints)
        if not processes or not all(each.ready for each in processes):
            raise typer.Exit(1)

    @app.command()
    def logs(
        name: Annotated[str | None, typer.Argument(help="Process; left out: all of them.")] = None,
        data: Data = None,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come in.")] = False,
        lines: Annotated[int, typer.Option("--lines", "-n", help="Lines from the end of each log.")] = 20,
    ) -> None:
        """Show the logs of the stack's processes."""
        with errors_for_people():
            stack = Stack(data)
            names = [*stack.names, "supervisor"]
            if name is not None and name not in names:
                raise StackError(f"The stack has no process {name}.", f"Known: {', '.join(names)}.")
            chosen = [name] if name else names
            _show_logs([(each, stack.log_file(each)) for each in chosen], lines, follow)


def _tools(named: list[str]) -> dict[str, Path]:
    result = {}
    for each in named:
        name, separator, path = each.partition("=")
        if not separator:
            raise StackError(f"--tool {each} is not NAME=PATH.", "Example: --tool etcd=/usr/local/bin/etcd")
        result[name] = Path(path)
    return result


def _check_simulated(text: str, options: UpOptions) -> None:
    from nodeworkers.hardware.simulated import simulated_gpus

    if not options.has_real_node:
        raise StackError(
            "--simulated-gpus are those of a real node's `berth node`, and this stack gets none.", "Add --real-node."
        )
    try:
        simulated_gpus(text)
    except ValueError as wrong:
        raise StackError(f"--simulated-gpus: {wrong}", "Example: --simulated-gpus 2xH100") from None


def _print_status(processes: list[ProcessStatus]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("PROCESS", "STATE", "PID", "UPTIME", "RESTARTS", "PORT", "LAST END"):
        table.add_column(column, justify="right" if column in ("PID", "UPTIME", "RESTARTS", "PORT") else "left")
    colours = {"ready": "green", "stopped": "dim", "stopping": "dim"}
    for each in processes:
        table.add_row(
            each.name,
            f"[{colours.get(each.state, 'yellow')}]{each.state}[/]",
            str(each.pid or ""),
            _duration(each.uptime),
            str(each.restarts),
            str(each.port or ""),
            each.last_exit,
        )
    Console().print(table)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"
    return (
        f"{whole // 86400}d{whole % 86400 // 3600:02}h"
        if whole >= 86400
        else f"{whole // 3600}h{whole % 3600 // 60:02}m"
    )


def _print_endpoints(endpoints: Endpoints) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print()
    console.print(f"data        {endpoints.data}")
    owned = "" if endpoints.embedded_temporal else " (existing)"
    console.print(f"Temporal    {endpoints.temporal_address}, namespace {endpoints.temporal_namespace}{owned}")
    if endpoints.temporal_ui:
        console.print(f"Temporal UI {endpoints.temporal_ui}")
    console.print(f"cluster     {endpoints.apiserver}{'' if endpoints.embedded_cluster else ' (existing)'}")
    console.print(f"kubectl     export KUBECONFIG={endpoints.kubeconfig()}")
    if "kubectl" in endpoints.tools:
        console.print(f"            {endpoints.tools['kubectl']}")


def _show_logs(files: list[tuple[str, Path]], lines: int, follow: bool) -> None:
    width = max(len(name) for name, _ in files)
    opened: dict[str, IO[str]] = {}

    def show(name: str, text: str) -> None:
        prefix = f"{name:<{width}} | " if len(files) > 1 else ""
        for line in text.splitlines():
            print(prefix + line, flush=True)

    for name, path in files:
        if path.is_file():
            opened[name] = path.open(errors="replace")
            show(name, "\n".join(opened[name].read().splitlines()[-lines:] if lines else []))
    try:
        while follow:
            time.sleep(0.3)
            for name, path in files:
                if name not in opened and path.is_file():
                    opened[name] = path.open(errors="replace")
                if name in opened:
                    if path.stat().st_size < opened[name].tell():  # it was cut because it had grown too long
                        opened[name].seek(0)
                    show(name, opened[name].read())
    except KeyboardInterrupt:
        pass
    finally:
        for file in opened.values():
            file.close()
