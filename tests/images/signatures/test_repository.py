"""What a registry's refusals mean for signatures: what is false is told, and a registry that fails is an error."""

from __future__ import annotations

import pytest

from images.descriptor import Descriptor, Manifest
from images.errors import Kind, RegistryError
from images.reference import Reference
from images.registry import Registry
from images.signatures.discovery import Unreadable
from images.signatures.repository import ImageRepository
from tests.images.signatures.rig import DIGEST

IMAGE = Reference("registry.example", "team/cache", "v1", DIGEST)


class Refusing(Registry):
    """Refuses everything in one way, and keeps what it was asked for."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.asked = ""

    async def manifest(self, reference: Reference) -> Manifest:
        self.asked = str(reference)
        raise RegistryError(self.kind, "it", "the reason")

    async def small(self, reference: Reference, blob: Descriptor) -> bytes:
        raise RegistryError(self.kind, "it", "the reason")


@pytest.mark.parametrize("kind", ["lied", "too_large", "malformed"])
async def test_what_is_false_is_told(kind: Kind) -> None:
    repository = ImageRepository(Refusing(kind), IMAGE)
    with pytest.raises(Unreadable, match="the reason"):
        await repository.manifest(DIGEST)
    with pytest.raises(Unreadable, match="the reason"):
        await repository.blob(DIGEST, 3)


async def test_a_manifest_that_is_not_there_is_none_and_a_blob_that_should_be_is_false() -> None:
    registry = Refusing("not_found")
    repository = ImageRepository(registry, IMAGE)
    assert await repository.manifest("sha256-1.sig") is None
    assert registry.asked == "registry.example/team/cache:sha256-1.sig"
    assert await repository.manifest("sha256:" + "1" * 64) is None
    assert registry.asked.endswith("@sha256:" + "1" * 64)
    with pytest.raises(Unreadable, match="the reason"):
        await repository.blob(DIGEST, 3)


@pytest.mark.parametrize("kind", ["away", "unauthorized"])
async def test_a_registry_that_fails_is_an_error(kind: Kind) -> None:
    repository = ImageRepository(Refusing(kind), IMAGE)
    with pytest.raises(RegistryError):
        await repository.manifest(DIGEST)
    with pytest.raises(RegistryError):
        await repository.blob(DIGEST, 3)
