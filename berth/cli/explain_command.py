"""`berth explain workload NAME`: why is it pending?"""

from __future__ import annotations

import asyncio
import json as json_format
from dataclasses import asdict
from typing import Annotated

import typer

from berth.cli.process_commands import Context, Kubeconfig
from berth.cli.stack_commands import errors_for_people


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Why something is as it is.", no_args_is_help=True)
    group.command()(workload)
    app.add_typer(group, name="explain")


def workload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the GPUWorkload.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: Annotated[bool, typer.Option("--json", help="Everything, with all nodes, as JSON.")] = False,
) -> None:
    """Why a GPUWorkload waits: what keeps it off each node, who is before it, and what would help.

    Reads the cluster as it is; needs the right to list nodes, pods, Jobs, GPUWorkloads and their
    profiles in all namespaces.
    """
    from rich.console import Console

    from berth.explain.collect import collect
    from berth.explain.report import show
    from berth.extensions import load_strategies
    from kube.errors import AccessDenied, KubeError
    from planning.explanation import explain
    from stack.errors import StackError

    load_strategies()
    with errors_for_people():
        try:
            found = asyncio.run(collect(kubeconfig, context, namespace, name))
        except AccessDenied as error:
            raise StackError(
                f"You may not read all that decides: {error.message}.",
                "Ask for the right to list nodes, pods, Jobs, namespaces, GPUWorkloads and GPUModelProfiles of all "
                "namespaces.",
            ) from None
        except KubeError as error:
            raise StackError(str(error)) from None
        told = explain(found.snapshot, found.settings, namespace, name)
        if told is None:
            others = sorted(w.namespace for w in found.snapshot.workloads if w.name == name)
            hint = (
                f"There is one in namespace {others[0]}: -n {others[0]}."
                if others
                else "`kubectl get gpuw -A` lists them."
            )
            raise StackError(f"There is no GPUWorkload {name!r} in namespace {namespace!r}.", hint)
    if found.assumed:
        typer.echo(f"note: {found.assumed}; the defaults are assumed", err=True)
    if json:
        typer.echo(json_format.dumps(asdict(told), indent=2))
    else:
        show(told, found.events, Console(highlight=False))
