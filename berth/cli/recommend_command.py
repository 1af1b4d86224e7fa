"""`berth recommend [MODEL]`: what to ask for instead?"""

from __future__ import annotations

import asyncio
import json as json_format
from typing import Annotated

import typer

from berth.cli.process_commands import Context, Kubeconfig
from berth.cli.stack_commands import errors_for_people


def register(app: typer.Typer) -> None:
    app.command()(recommend)


def recommend(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="As GPUWorkloads name it; else all.")] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Of the GPUWorkloads.")] = "default",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """What to ask for, from what a model's runs did with the GPUs that they were given. Nothing is applied.

    Reads GPUModelProfiles, which the worker writes a minute or so after runs ended.
    """
    from rich.console import Console

    from berth.recommend.collect import collect
    from berth.recommend.report import as_json, show
    from kube.errors import AccessDenied, KubeError
    from stack.errors import StackError

    with errors_for_people():
        try:
            found = asyncio.run(collect(kubeconfig, context, namespace))
        except AccessDenied as error:
            raise StackError(
                f"You may not read what was learned: {error.message}.",
                f"Ask for the right to list GPUModelProfiles and GPUWorkloads in namespace {namespace}.",
            ) from None
        except KubeError as error:
            raise StackError(str(error)) from None
        rows = [row for row in found.rows if model in (None, row.model)]
        if model is not None and not rows:
            others = ", ".join(sorted({row.model for row in found.rows})[:5])
            raise StackError(
                f"Nothing was learned of model {model!r} in namespace {namespace!r}.",
                f"There it is known of {others}." if others else "A run is learned a minute or so after it ended.",
            )
    if found.assumed:
        typer.echo(f"note: {found.assumed}", err=True)
    if json:
        typer.echo(json_format.dumps(as_json(rows), indent=2))
    elif rows:
        show(rows, Console(highlight=False))
    else:
        typer.echo(f"Nothing was learned in namespace {namespace} yet: no GPUWorkload of it has ended.")
