"""A registry as berth uses it: what a tag stands for, manifests, blobs, and what refers to an image.

For the node's and the workers' activities and for `berth cache`. Every answer is somebody else's: it is bounded before
it is read, and what has a digest is believed only once that is right. Mirrors are asked first and believed no more.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from yarl import URL

from images import download, upload
from images.client import Client
from images.credentials import Credentials
from images.descriptor import OCI_INDEX, Descriptor, Malformed, Manifest
from images.endpoints import Endpoint, Settings, same_origin
from images.errors import RegistryError
from images.reference import Reference, is_digest
from images.transport import read
from planning.caches.limits import CONFIG_BYTES, LAYER_BYTES, MANIFEST_BYTES

_PARALLEL = 4  # blobs at once
_PAGES = 64  # of referrers, which are as many as fit into 4 MiB
_NEXT = re.compile(r'<([^<>]{0,2048})>\s*;\s*rel="?next"?')  # of a Link header; a cursor is kept as it is
_NO_REFERRERS = (400, 404, 405, 406)  # what registries without the API answer

Item = TypeVar("Item")


class Registry:
    """Reads and writes images with one set of credentials. `async with Registry(...) as registry`.

    `environment` is where proxies are looked for. Every method raises RegistryError.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        credentials: Credentials | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._client = Client((settings or Settings()).checked(), credentials or Credentials(), environment)

    async def __aenter__(self) -> Registry:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, value, traceback)

    async def resolve(self, reference: Reference) -> Descriptor:
        """What a reference stands for now; the digest is of bytes that were read."""
        return (await self.manifest(reference)).descriptor

    async def manifest(self, reference: Reference) -> Manifest:
        """The manifest or index that a reference stands for, of at most 4 MiB."""
        what = str(reference)
        return await self._client.anywhere(
            reference, lambda endpoint: self._client.manifest(endpoint, reference.target, what)
        )

    async def small(self, reference: Reference, blob: Descriptor) -> bytes:
        """A blob that is held in memory: a config, a signature. At most 4 MiB."""
        what = f"{reference.registry}/{reference.repository}@{blob.digest}"
        if blob.size > CONFIG_BYTES:
            raise RegistryError("too_large", what, f"it is {blob.size} bytes, where {CONFIG_BYTES} are allowed")

        async def ask(endpoint: Endpoint) -> bytes:
            url = endpoint.path(f"blobs/{blob.digest}")
            async with self._client.answer(endpoint, "GET", url, what) as response:
                data = await read(response, blob.size, what)
            _check(data, blob, endpoint, what)
            return data

        return await self._client.anywhere(reference, ask)

    async def blob(
        self,
        reference: Reference,
        blob: Descriptor,
        into: Path,
        progress: download.Progress | None = None,
        *,
        at_most: int = LAYER_BYTES,
    ) -> None:
        """A blob as a file, which is there only when its digest is right. What came of it before, in whatever process,
        is `into` with `.part` and is gone on with. Raises OSError too, where the disk does not take it."""
        what = f"{reference.registry}/{reference.repository}@{blob.digest}"
        if blob.size > at_most:
            raise RegistryError("too_large", what, f"it is {blob.size} bytes, where {at_most} are allowed")
        if blob.size == 0:
            raise RegistryError("malformed", what, "it is empty (0 bytes)")
        await download.download(self._client, reference, blob, into, progress)

    async def blobs(self, reference: Reference, wanted: Sequence[tuple[Descriptor, Path]]) -> None:
        """Several blobs side by side. The first that fails ends the others; what came of them is kept."""
        await side_by_side(wanted, lambda each: self.blob(reference, *each))

    async def referrers(self, reference: Reference) -> tuple[Descriptor, ...]:
        """What refers to the digest of this reference (signatures, above all), whatever its type: not every registry
        tells the artifact's type, so a caller that wants one must look at manifests that have none it knows.

        From the referrers API and from the fallback tag: images that were copied from another registry have their
        referrers there, and somebody's push to the one must not hide them. Of several endpoints the first who knows of
        any counts.
        """
        if not is_digest(reference.digest):
            raise ValueError(f"{reference} has no digest")
        answered = False

        async def ask(endpoint: Endpoint) -> tuple[Descriptor, ...]:
            nonlocal answered
            found: dict[str, Descriptor] = {}
            for each in (*await self._referrers(endpoint, reference), *await self._fallback(endpoint, reference)):
                found.setdefault(each.digest, each)
            answered = True
            if not found:
                raise RegistryError("not_found", str(reference), f"{endpoint.name} knows of nothing that refers to it")
            return tuple(found.values())

        try:
            return await self._client.anywhere(reference, ask)
        except RegistryError:
            if answered:
                return ()
            raise

    async def _referrers(self, endpoint: Endpoint, reference: Reference) -> tuple[Descriptor, ...]:
        what, url = str(reference), endpoint.path(f"referrers/{reference.digest}")
        found: list[Descriptor] = []
        left = MANIFEST_BYTES
        for _ in range(_PAGES):
            async with self._client.answer(
                endpoint, "GET", url, what, headers={"Accept": OCI_INDEX}, also=_NO_REFERRERS
            ) as response:
                if response.status in _NO_REFERRERS or response.content_type != OCI_INDEX:
                    return ()
                data = await read(response, left, what)
                following = _NEXT.search(", ".join(response.headers.getall("Link", [])))
            left -= len(data)
            try:
                found += Manifest.read(data, "", OCI_INDEX).listed()
            except Malformed as error:
                why = f"the list of what refers to it, of {endpoint.name}: {error}"
                raise RegistryError("malformed", what, why) from None
            if following is None:
                return tuple(found)
            try:
                url = url.join(URL(following[1], encoded=True))
            except ValueError:
                url = URL()
            if not same_origin(url, endpoint.url):
                raise RegistryError("lied", what, f"{endpoint.name} goes on with its list of referrers elsewhere")
        raise RegistryError("too_large", what, f"{endpoint.name} lists its referrers in more than {_PAGES} pages")

    async def _fallback(self, endpoint: Endpoint, reference: Reference) -> tuple[Descriptor, ...]:
        try:
            tag = upload.fallback_tag(reference.digest)
            return (await self._client.manifest(endpoint, tag, str(reference))).listed()
        except RegistryError as error:
            if error.kind == "not_found":
                return ()
            raise

    async def push_blob(self, reference: Reference, blob: Descriptor, source: Path | bytes) -> bool:
        """Whether it had to be sent; the registry has it afterwards."""
        return await upload.push_blob(self._client, reference, blob, source)

    async def push_manifest(self, reference: Reference, data: bytes, media_type: str) -> Descriptor:
        """Under the tag, or without one under its digest; byte for byte. What refers to another image can be found by
        `referrers` afterwards."""
        return await upload.push_manifest(self._client, reference, data, media_type)


async def side_by_side(items: Iterable[Item], work: Callable[[Item], Awaitable[object]]) -> None:
    """Works on a few items at once. Raises what the first that fails raised (not a group, as a TaskGroup would), when
    the others have ended too."""
    gate = asyncio.Semaphore(_PARALLEL)

    async def one(item: Item) -> None:
        async with gate:
            await work(item)

    tasks = [asyncio.ensure_future(one(each)) for each in items]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check(data: bytes, blob: Descriptor, endpoint: Endpoint, what: str) -> None:
    if len(data) != blob.size:
        raise RegistryError("lied", what, f"{endpoint.name} sent {len(data)} bytes, where {blob.size} were promised")
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != blob.digest:
        raise RegistryError("lied", what, f"what {endpoint.name} sent has another digest")
