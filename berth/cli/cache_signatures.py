"""`berth cache sign` and `verify`: signatures of kernel cache images, made and checked as a node checks them."""

from __future__ import annotations

import asyncio
import json as json_format
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from berth.cli.cache_transfer import (
    AuthorityFile,
    CredentialsFile,
    Insecure,
    Mirrors,
    Named,
    credentials_of,
    refusals_for_people,
    settings_of,
)

if TYPE_CHECKING:
    from planning.caches.trust import Findings, Verdict

PASSWORD = "BERTH_KEY_PASSWORD"  # noqa: S105 - the name of a variable


def register(group: typer.Typer) -> None:
    group.command()(sign)
    group.command()(verify)


def sign(
    reference: Named,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="A private key (PEM).")],
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="The key's certificate (PEM), for code signing."),
    ] = None,
    credentials: CredentialsFile = None,
    authority: AuthorityFile = None,
    insecure: Insecure = None,
) -> None:
    """Sign an image with a key, as cosign 3 does: the signature is pushed beside it, and cosign verifies it too.

    The image is signed as the registry has it now, by its digest. The key's password is taken from BERTH_KEY_PASSWORD.
    For keyless signatures, logs and time stamps sign with cosign itself.
    """
    from images.descriptor import OCI_MANIFEST, Descriptor
    from images.reference import Reference
    from images.registry import Registry
    from images.signatures import signing
    from images.signatures.keys import BadKey
    from stack.errors import StackError

    async def run() -> Descriptor:
        async with Registry(settings, found) as registry:
            image = await registry.resolve(named)
            made = signing.referring(
                signing.sign(image.digest, private, chain), image.media_type, image.digest, image.size, _now()
            )
            for digest, blob in made.blobs.items():
                await registry.push_blob(named, Descriptor("application/octet-stream", digest, len(blob)), blob)
            beside = Reference(named.registry, named.repository)
            await registry.push_manifest(beside, made.manifest, OCI_MANIFEST)
            return image

    with refusals_for_people():
        named = Reference.parse(reference)
        settings, found = settings_of(authority, insecure, None), credentials_of(credentials)
        password = os.environ.get(PASSWORD)
        file = key
        try:
            private = signing.load_private_key(key.read_bytes(), None if password is None else password.encode())
            chain = None
            if certificate is not None:
                file = certificate
                chain = signing.load_certificate(certificate.read_bytes(), private)
        except BadKey as wrong:
            raise StackError(f"{file} cannot be used to sign: {wrong}.") from None
        image = asyncio.run(run())
    typer.echo(f"{named.registry}/{named.repository}@{image.digest}")


def verify(
    reference: Named,
    policy: Annotated[
        list[Path] | None,
        typer.Option("--policy", metavar="FILE", help="KernelCachePolicies (YAML); several: all of them."),
    ] = None,
    key: Annotated[
        list[Path] | None, typer.Option("--key", metavar="FILE", help="A public key (PEM) that may have signed.")
    ] = None,
    trusted_root: Annotated[
        Path | None,
        typer.Option("--trusted-root", metavar="FILE", help="In place of the ConfigMaps that the policies name."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Of the cache; left out: a cache of the cluster.")
    ] = None,
    credentials: CredentialsFile = None,
    authority: AuthorityFile = None,
    insecure: Insecure = None,
    mirror: Mirrors = None,
    json: Annotated[bool, typer.Option("--json", help="What was found as JSON.")] = False,
) -> None:
    """Check who has signed an image, as a node does before it mounts it. Ends with code 1 if it would be refused.

    Asks the registry and nobody else.
    """
    from berth.cache import policies as given
    from images.reference import Reference
    from images.registry import Registry
    from images.signatures.repository import ImageRepository
    from images.signatures.verify import verify as check
    from planning.caches.trust import Findings, Knobs, demand, judge, roots_of
    from stack.errors import StackError

    async def run() -> tuple[str, Findings]:
        async with Registry(settings, found) as registry:
            image = await registry.resolve(named)
            if wanted.verdict is not None:
                return image.digest, Findings()
            repository = ImageRepository(registry, named)
            return image.digest, await check(
                repository, image.digest, wanted.policies, roots, time.time(), seed=secrets.randbits(64)
            )

    with refusals_for_people():
        named = Reference.parse(reference)
        settings, found = settings_of(authority, insecure, mirror), credentials_of(credentials)
        demanded = [*given.from_files(policy or ()), *given.of_keys(key or ())]
        if not demanded:
            raise StackError("There is nothing to check against.", "Give --policy FILE or --key FILE.")
        image = f"{named.registry}/{named.repository}"
        wanted = demand(image, namespace, demanded, Knobs(), True)
        raw = trusted_root.read_bytes() if trusted_root is not None else None
        roots = {} if raw is None else dict.fromkeys(roots_of(wanted.policies), raw)
        digest, findings = asyncio.run(run())
    verdict = judge(image, namespace, wanted, findings, Knobs())
    if json:
        typer.echo(json_format.dumps(_as_json(f"{image}@{digest}", findings, verdict), indent=2))
    else:
        for each in findings.signatures:
            typer.echo(f"{each.place}: {'signed by ' + each.signer if each.satisfies else each.problem}")
        typer.echo(f"{'verified' if verdict.verified else 'refused'}: {image}@{digest}")
        typer.echo(verdict.message)
    if not verdict.admitted:
        raise typer.Exit(1)


def _as_json(image: str, findings: Findings, verdict: Verdict) -> dict[str, object]:
    return {
        "image": image,
        "verified": verdict.verified,
        "reason": verdict.reason,
        "message": verdict.message,
        "signatures": [
            {
                "place": each.place,
                "signer": each.signer,
                "satisfies": [{"policy": policy, "signer": name} for policy, name in sorted(each.satisfies)],
                "problem": each.problem,
            }
            for each in findings.signatures
        ],
        "notLookedAt": findings.more,
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
