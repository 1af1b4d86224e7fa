"""The registry's client as discovery needs it: one repository, and what is false in it told from a registry that
fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from images.descriptor import Descriptor
from images.errors import RegistryError
from images.reference import Reference, is_digest
from images.registry import Registry
from images.signatures.discovery import Referrer, Unreadable

# Somebody pushed something that is not what it says: no reason to ask again, nor to give up on other signatures.
_FALSE = ("lied", "too_large", "malformed")


class ImageRepository:
    """A `discovery.Repository`. Raises RegistryError where the registry cannot be asked."""

    def __init__(self, registry: Registry, image: Reference) -> None:
        self._registry = registry
        self._image = image

    async def manifest(self, reference: str) -> bytes | None:
        named = self._image.at(reference) if is_digest(reference) else self._image.tagged(reference)
        try:
            return (await self._registry.manifest(named)).data
        except RegistryError as error:
            if error.kind == "not_found":
                return None
            if error.kind in _FALSE:
                raise Unreadable(error.why) from None
            raise

    async def blob(self, digest: str, size: int) -> bytes:
        try:
            return await self._registry.small(self._image, Descriptor("", digest, size))
        except RegistryError as error:
            if error.kind in ("not_found", *_FALSE):
                raise Unreadable(error.why) from None
            raise

    async def referrers(self, digest: str) -> Sequence[Referrer]:
        found = await self._registry.referrers(self._image.at(digest))
        return [Referrer(each.digest, each.size, each.artifact_type, each.annotations) for each in found]
