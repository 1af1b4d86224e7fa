"""`berth cache export`: what a pod compiled into its kernel cache's volume, as a folder that `berth cache build` takes.

For the engineer at a node whose pods have warmed up. It reads the node's ledger and the pod's private layer, changes
neither, and works whether `berth node` runs or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from berth.cli.cache_transfer import refusals_for_people
from berth.cli.process_commands import size_of

if TYPE_CHECKING:
    from nodeworkers.ledger import Mount


def register(group: typer.Typer) -> None:
    group.command()(export)


def export(
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The folder to copy into: a new one, or empty.")
    ] = None,
    root: Annotated[Path, typer.Option(help="What berth node has as --root.")] = Path("/var/lib/berth"),
    pod: Annotated[str, typer.Option(metavar="NAMESPACE/NAME", help="Whose kernels.")] = "",
    volume: Annotated[str, typer.Option(metavar="ID", help="Of several volumes: which, as --list names it.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Say what there is, and copy nothing.")] = False,
    most: Annotated[str, typer.Option(metavar="SIZE", help="Refuse to copy more than that.")] = "8Gi",
) -> None:
    """Copy what a pod compiled, on the node where it runs and as root, into a folder for `berth cache build`.

    Regular files only, without owners and modes: the pod wrote them, so look at what you sign.
    """
    if listed == (out is not None):
        raise typer.BadParameter("either OUT, to copy, or --list", param_hint="OUT")
    limit = size_of(most, "--most")
    from nodeworkers.csi.export import ExportError, copy_compiled
    from nodeworkers.ledger import LedgerError
    from nodeworkers.mounted import mounted
    from stack.errors import StackError

    with refusals_for_people():
        try:
            found = [each for each in mounted(root) if _named(each, pod, volume)]
            if out is None:
                _show(found)
                return
            mount = _the_one(found, pod, volume)
            copied = copy_compiled(_layer(mount), out, limit)
        except (ExportError, LedgerError, LookupError) as refused:
            raise StackError(str(refused)) from None
    size = sum(each.size for each in copied)
    typer.echo(f"{_count(len(copied))}, {size:,} bytes, of volume {mount.volume_id} of pod {_pod(mount)} are in {out}.")
    typer.echo(f"They were compiled at {mount.mount_path}. Next: berth cache build {out} --out IMAGE")


def _show(found: list[Mount]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not found:
        typer.echo("No such volume of a kernel cache is mounted on this node.")
        return
    table = Table("POD", "VOLUME", "CACHE", "COMPILED", box=None, pad_edge=False, header_style="")
    for mount in found:
        cells = (_pod(mount), mount.volume_id, mount.cache_name, _compiled(mount))
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    Console(highlight=False).print(table)


def _compiled(mount: Mount) -> str:
    """What there is of one volume, or why that cannot be told; one pod's layer does not hide another's."""
    from nodeworkers.csi.export import ExportError, compiled

    try:
        files = compiled(_layer(mount))
    except (ExportError, LookupError) as refused:
        return str(refused)
    except OSError as error:
        return f"It cannot be read: {error.strerror}."
    return f"{_count(len(files))}, {sum(each.size for each in files):,} bytes"


def _named(mount: Mount, pod: str, volume: str) -> bool:
    return pod in ("", _pod(mount)) and volume in ("", mount.volume_id)


def _the_one(found: list[Mount], pod: str, volume: str) -> Mount:
    """Raises LookupError, with a sentence, unless exactly one volume was meant."""
    if not pod and not volume:
        raise LookupError("Say whose kernels: --pod NAMESPACE/NAME. --list shows what there is on this node.")
    if not found:
        asked = " ".join(filter(None, (pod and f"of pod {pod}", volume and f"with the id {volume}")))
        raise LookupError(f"No volume {asked} is mounted on this node. --list shows those that are.")
    if len(found) > 1:
        ids = ", ".join(f"{each.volume_id} ({each.cache_name})" for each in found)
        raise LookupError(f"Pod {pod} has {len(found)} volumes of kernel caches: {ids}. Say which with --volume.")
    return found[0]


def _layer(mount: Mount) -> Path:
    """The pod's own layer. Raises LookupError, with a sentence, where there is none."""
    if not mount.upper:
        raise LookupError("It is mounted readOnly, so that nothing was compiled into it.")
    if not Path(mount.upper).is_dir():
        raise LookupError(
            f"{mount.upper} cannot be seen from here. Run this as root, where berth node sees it: on the node, or in "
            "the node's own pod of berth."
        )
    return Path(mount.upper)


def _pod(mount: Mount) -> str:
    return f"{mount.pod_namespace}/{mount.pod_name}"


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files:,} files"
