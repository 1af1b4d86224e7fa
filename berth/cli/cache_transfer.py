"""`berth cache push` and `pull`: an image from a folder to a registry, and back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from berth.cli.stack_commands import errors_for_people

if TYPE_CHECKING:
    from images.credentials import Credentials
    from images.descriptor import Descriptor
    from images.endpoints import Settings
    from images.reference import Reference
    from images.registry import Registry

Named = Annotated[str, typer.Argument(metavar="REFERENCE", help="Such as registry.example/team/cache:v1.")]
CredentialsFile = Annotated[
    Path | None,
    typer.Option("--credentials", metavar="FILE", help="As docker writes it; left out: docker's config.json, if any."),
]
AuthorityFile = Annotated[
    Path | None, typer.Option("--authority", metavar="FILE", help="Certificates (PEM) to trust beside the system's.")
]
Insecure = Annotated[
    list[str] | None, typer.Option("--insecure", metavar="HOST[:PORT]", help="Speak plain http to this host.")
]
Mirrors = Annotated[
    list[str] | None,
    typer.Option("--mirror", metavar="REGISTRY=MIRROR", help="Ask this before the registry; several in their order."),
]


def register(group: typer.Typer) -> None:
    group.command()(push)
    group.command()(pull)


def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An OCI image layout.")],
    reference: Named,
    credentials: CredentialsFile = None,
    authority: AuthorityFile = None,
    insecure: Insecure = None,
) -> None:
    """Push the image of an OCI layout folder to a registry.

    What the registry has already is not sent again. Proxies are taken from the environment.
    """
    from images import oci_folder

    def work(registry: Registry, named: Reference) -> Awaitable[Descriptor]:
        return oci_folder.push(registry, folder, named)

    _run(reference, credentials, authority, insecure, None, work)


def pull(
    reference: Named,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Made if it is not there.")],
    plain: Annotated[bool, typer.Option("--plain", help="manifest.json, config.json and layers instead.")] = False,
    credentials: CredentialsFile = None,
    authority: AuthorityFile = None,
    insecure: Insecure = None,
    mirror: Mirrors = None,
) -> None:
    """Pull an image, or an index with all its images, into an OCI layout folder; every digest is checked.

    What is in the folder already is not fetched again, and what was cut off is gone on with.
    """
    from images import oci_folder

    def work(registry: Registry, named: Reference) -> Awaitable[Descriptor]:
        return (oci_folder.pull_plain if plain else oci_folder.pull)(registry, named, folder)

    _run(reference, credentials, authority, insecure, mirror, work)


def _run(
    reference: str,
    credentials: Path | None,
    authority: Path | None,
    insecure: list[str] | None,
    mirrors: list[str] | None,
    work: Callable[[Registry, Reference], Awaitable[Descriptor]],
) -> None:
    from images.reference import Reference
    from images.registry import Registry

    async def run() -> Descriptor:
        async with Registry(settings, found) as registry:
            return await work(registry, named)

    with refusals_for_people():
        named = Reference.parse(reference)
        settings = settings_of(authority, insecure, mirrors)
        found = credentials_of(credentials)
        descriptor = asyncio.run(run())
    typer.echo(f"{named.registry}/{named.repository}@{descriptor.digest}")


def settings_of(authority: Path | None, insecure: list[str] | None, mirrors: list[str] | None) -> Settings:
    from images.endpoints import BadSettings, Settings

    ordered: dict[str, tuple[str, ...]] = {}
    for each in mirrors or ():
        registry, equals, mirror = each.partition("=")
        if not equals:
            raise BadSettings(f"--mirror {each!r}: must be REGISTRY=MIRROR")
        ordered[registry] = (*ordered.get(registry, ()), mirror)
    authorities = authority.read_text(encoding="utf-8", errors="replace") if authority is not None else ""
    return Settings(mirrors=ordered, insecure=frozenset(insecure or ()), authorities=authorities).checked()


def credentials_of(file: Path | None) -> Credentials:
    from images.credentials import LIMIT, Credentials

    folder = os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker"
    path = file or Path(folder) / "config.json"
    if file is None and not path.is_file():
        return Credentials()
    with path.open("rb") as opened:
        return Credentials.parse(opened.read(LIMIT + 1))


@contextmanager
def refusals_for_people() -> Iterator[None]:
    """Prints what the images' room, the disk or berth refuses as a message to a person, and ends with code 1."""
    from images.credentials import BadCredentials
    from images.endpoints import BadSettings
    from images.errors import RegistryError
    from images.oci_folder import FolderError
    from images.reference import BadReference
    from images.refused import Refused
    from stack.errors import StackError

    with errors_for_people():
        try:
            yield
        except (Refused, RegistryError, BadReference, BadSettings, BadCredentials, FolderError) as error:
            raise StackError(str(error)) from None
        except OSError as error:
            why = error.strerror or str(error)
            raise StackError(f"{why}: {error.filename}" if error.filename else why) from None
