"""`berth cache …`: kernel caches as OCI images, from a cache folder to a registry and back."""

from __future__ import annotations

import asyncio
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from berth.cli import cache_export, cache_signatures, cache_transfer
from berth.cli.cache_transfer import refusals_for_people

if TYPE_CHECKING:
    from planning.caches.compatibility import Target
    from planning.caches.labels import Kind


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Kernel caches as OCI images.")
    group.command()(build)
    group.command()(inspect)
    cache_transfer.register(group)
    cache_signatures.register(group)
    cache_export.register(group)
    app.add_typer(group, name="cache")


def build(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A cache of Triton's, or a VLLM_CACHE_ROOT.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="A new OCI layout folder.")],
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="Its name within the folder, such as v1.")] = None,
    index: Annotated[bool, typer.Option("--index", help="One image for each GPU, and an index of them.")] = False,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="triton or vllm; left out: as it lies there.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU", help="Such as cuda:90:32 or hip:gfx942:64, where the cache does not tell it."),
    ] = None,
    triton_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="What triton_key() said where it was compiled.")
    ] = None,
    triton_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Of Triton, where the cache does not tell it.")
    ] = None,
    ptxas_version: Annotated[
        str | None, typer.Option(metavar="TEXT", help="As ptxas --version said it, where the cache does not.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What was set for the compiler, where the cache does not tell it."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="What was built as JSON.")] = False,
) -> None:
    """Pack a cache folder into an OCI image, with labels that say what a hit depends on. The same folder gives the same
    digest, on any machine; what its labels say is read from the folder, never from the machine.
    """
    from rich.console import Console

    from berth.cache.report import built_as_json, show_built
    from images.build import Said, read
    from images.build import build as pack

    said = Said(
        kind=_kind(kind),
        targets=tuple(_target(each) for each in target or ()),
        triton_key=triton_key,
        triton_version=triton_version,
        ptxas=ptxas_version,
        environment=dict(_variable(each) for each in env) if env else None,
    )
    with refusals_for_people():
        built = pack(read(folder, said), out, tag=tag, index=index)
    if json:
        typer.echo(json_format.dumps(built_as_json(built), indent=2))
    else:
        show_built(built, out, Console(highlight=False))


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An OCI layout folder.")],
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="Of several in it: by its tag there, or its digest.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """What cache images say, what really lies in them, and what differs. Code 1 if a node would refuse one."""
    from rich.console import Console

    from berth.cache.report import inspected_as_json, show_inspected
    from images.inspection import inspect as look

    with refusals_for_people():
        found = asyncio.run(look(folder, image))
    if json:
        typer.echo(json_format.dumps([inspected_as_json(each) for each in found], indent=2))
    else:
        show_inspected(found, Console(highlight=False))
    if any(each.refused for each in found):
        raise typer.Exit(1)


def _kind(text: str | None) -> Kind | None:
    from planning.caches.labels import KINDS

    if text is None:
        return None
    for each in KINDS:
        if each == text:
            return each
    raise typer.BadParameter(f"{text!r} is none of {', '.join(KINDS)}", param_hint="--kind")


def _target(text: str) -> Target:
    from planning.caches.compatibility import target

    backend, _, rest = text.partition(":")
    arch, _, warp = rest.rpartition(":")
    found = target(backend, arch, int(warp)) if warp.isascii() and warp.isdigit() and len(warp) < 5 else None
    if found is None:
        raise typer.BadParameter(f"{text!r} is no GPU such as cuda:90:32 or hip:gfx942:64", param_hint="--target")
    return found


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--env")
    return name, value
