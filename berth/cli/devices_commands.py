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
    """The devices of every node: how many, how many are in use, and what is wrong with the others."""
    from rich.console import Console

    from berth.devices.report import show_cluster

    found = _read(kubeconfig, context, None)
    if json:
        typer.echo(json_format.dumps(found, indent=2))
    else:
        show_cluster(found, Console(highlight=False))


def inspect(
    node: Annotated[
        str, typer.Argument(metavar="NODE", envvar="NODE_NAME", help="The node's name; left out: NODE_NAME.")
    ],
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: Annotated[bool, typer.Option("--json", help="Its NodeDevices as JSON.")] = False,
) -> None:
    """One node's cards with their health and its reason, who holds what, its seats, and how its cards are connected."""
    from rich.console import Console

    from berth.devices.report import show_node

    (found,) = _read(kubeconfig, context, node)
    if json:
        typer.echo(json_format.dumps(found, indent=2))
    else:
        show_node(found, Console(highlight=False))


def _read(kubeconfig: Path | None, context: str | None, node: str | None) -> list[dict[str, Any]]:
    """NodeDevices of all nodes, or of this one."""
    from berth.cli.stack_commands import errors_for_people
    from kube.client import KubeClient
    from kube.errors import AccessDenied, KubeError, NotFound
    from kube.resources import NODEDEVICES
    from stack.errors import StackError

    async def read() -> list[dict[str, Any]]:
        async with await KubeClient.connect(kubeconfig, context, user_agent="berth-devices") as kube:
            if node is not None:
                return [await kube.get(NODEDEVICES, node)]
            return (await kube.list(NODEDEVICES))[0]

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
