"""`berth cache …`: kernel cache images, for people and for CI."""

from __future__ import annotations

import typer

from berth.cli import cache_signatures, cache_transfer


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Images of compiled GPU kernels.", no_args_is_help=True)
    cache_transfer.register(group)
    cache_signatures.register(group)
    app.add_typer(group, name="cache")
