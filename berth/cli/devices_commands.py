"""`berth devices` and `berth node inspect`: which accelerators there are, how they are, and who holds them."""

from __future__ import annotations

import asyncio
import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from berth.cli.process_commands import Context, Kubeconfig


def devices(
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: Annotated[bool, typer.Option("--json", help="The NodeDevices of all nodes as JSON.")] = False,
) -> None:
    """The devices of every node: how many, how many are in use, what is wrong with others, who has which slot."""
    from rich.console import Console

    from berth.devices.report import show_cluster
    from berth.devices.seats import show_slots

    found, groups = _read(kubeconfig, context, None)
    if json:
        typer.echo(json_format.dumps(found, indent=2))
    else:
        console = Console(highlight=False)
        show_cluster(found, console)
        show_slots(groups, console)


def inspect(
    node: Annotated[
        str, typer.Argument(metavar="NODE", envvar="NODE_NAME", help="The node's name; left out: NODE_NAME.")
    ],
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: Annotated[bool, typer.Option("--json", help="Its NodeDevices as JSON.")] = False,
) -> None:
    """One node's cards with their health and its reason, who holds what, how its cards are connected, and its seats."""
    from rich.console import Console

    from berth.devices.report import show_node
    from berth.devices.seats import show_groups

    (found,), groups = _read(kubeconfig, context, node)
    if json:
        typer.echo(json_format.dumps(found, indent=2))
    else:
        console = Console(highlight=False)
        show_node(found, console)
        show_groups(groups, console)


_Objects = list[dict[str, Any]]


def _read(kubeconfig: Path | None, context: str | None, node: str | None) -> tuple[_Objects, _Objects]:
    """NodeDevices of all nodes, or of this one, and the GPUSeatGroups there: none where one may not see any."""
    from berth.cli.stack_commands import errors_for_people
    from kube.client import KubeClient
    from kube.errors import AccessDenied, KubeError, NotFound
    from kube.resources import GPUSEATGROUPS, NODEDEVICES
    from stack.errors import StackError

    async def read() -> tuple[_Objects, _Objects]:
        async with await KubeClient.connect(kubeconfig, context, user_agent="berth-devices") as kube:
            found = (await kube.list(NODEDEVICES))[0] if node is None else [await kube.get(NODEDEVICES, node)]
            chosen = f"spec.nodeName={node}" if node is not None else ""
            try:
                return found, (await kube.list(GPUSEATGROUPS, field_selector=chosen))[0]
            except (AccessDenied, NotFound):
                return found, []

    with errors_for_people():
        try:
            return asyncio.run(read())
        except NotFound:
            raise StackError(
                f"Node {node!r} tells nothing of its devices." if node else "This cluster does not know NodeDevices.",
                "`kubectl get nodedevices` lists the nodes that do; `berth node` has to run there."
                if node
                else "Install berth's CRDs (deploy/crds).",
            ) from None
        except AccessDenied as error:
            raise StackError(
                f"You may not read it: {error.message}.", "Ask for the right to get and list nodedevices.gpu.warp.dev."
            ) from None
        except KubeError as error:
            raise StackError(str(error)) from None
