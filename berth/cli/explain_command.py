"""`berth explain workload NAME`: why is it pending? `berth explain seats`: which server should move where?"""

from __future__ import annotations

import asyncio
import json as json_format
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from berth.cli.process_commands import Address, Context, Kubeconfig, Namespace
from berth.cli.stack_commands import errors_for_people

if TYPE_CHECKING:
    from berth.explain.recorded import Recorded
    from planning.explanation import Explanation
    from planning.model import Snapshot


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Why something is as it is.", no_args_is_help=True)
    group.command()(workload)
    group.command()(seats)
    app.add_typer(group, name="explain")


def workload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the GPUWorkload.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: Annotated[bool, typer.Option("--json", help="Everything, with all nodes, as JSON.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Also all that Temporal recorded about it.")] = False,
    temporal_address: Address = None,
    temporal_namespace: Namespace = None,
) -> None:
    """Why a GPUWorkload waits: what keeps it off each node, who is before it, and what would help.

    Reads the cluster as it is; needs the right to list nodes, pods, Jobs, GPUWorkloads and their
    profiles in all namespaces. With --history it reads what was decided about the workload out of
    Temporal, which keeps that for some weeks.
    """
    from rich.console import Console

    from berth.explain.collect import collect
    from berth.explain.report import show, show_history
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
    recorded = _recorded(found.snapshot, told, temporal_address, temporal_namespace) if history else None
    if json:
        everything = asdict(told) | ({"history": asdict(recorded)} if recorded is not None else {})
        typer.echo(json_format.dumps(everything, indent=2))
        return
    console = Console(highlight=False)
    show(told, found.events, console)
    if recorded is not None:
        show_history(recorded, console)


def seats(
    node: Annotated[str, typer.Option("--node", help="Only of this node.")] = "",
    move: Annotated[str, typer.Option("--move", metavar="POD", help="What if this pod moved? With --to.")] = "",
    to: Annotated[str, typer.Option("--to", metavar="GROUP", help="The group that it would move to.")] = "",
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="The pod's namespace.")] = "default",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """For how much of their time groups of seats are asked, and which server should move to another.

    Reads what nodes say now; needs the right to list GPUSeatGroups and SeatMigrations of all
    namespaces. Nothing is moved: a SeatMigration does that, or a GPUSeatProfile with
    rebalance: Perform.
    """
    from rich.console import Console

    from berth.explain.seats import collect, show
    from kube.errors import KubeError
    from stack.errors import StackError

    with errors_for_people():
        if bool(move) != bool(to):
            raise StackError("--move and --to belong together.", "Such as: --move chat-0 --to G23.")
        try:
            found = asyncio.run(collect(kubeconfig, context, node, (namespace, move, to) if move else None))
        except KubeError as error:
            raise StackError(str(error)) from None
    if json:
        typer.echo(json_format.dumps(found.as_json(), indent=2))
        return
    show(found, Console(highlight=False))


def _recorded(snapshot: Snapshot, told: Explanation, address: str | None, namespace: str | None) -> Recorded:
    from rich.console import Console

    from berth.explain.recorded import Life, recorded
    from berth.process import ProcessOptions
    from planning.times import timestamp

    view = next(w for w in snapshot.workloads if (w.namespace, w.name) == (told.namespace, told.name))
    life = Life(view.uid, view.created, view.ended.told if view.ended is not None else None)
    options = ProcessOptions(temporal_address=address, temporal_namespace=namespace)
    with Console(stderr=True).status("reading Temporal's history") as status:  # shown on terminals only

        def progress(count: int, oldest: float) -> None:
            status.update(f"reading Temporal's history: {count:,} events, back to {timestamp(oldest)}")

        return asyncio.run(recorded(options, life, progress))
