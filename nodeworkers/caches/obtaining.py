"""Gets the image of an order into the node's store: what is there already stays there, what is fetched is checked for
the node's GPUs before its layers come and once more when they are extracted. For `preparing.py`.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from platform import machine

from crds.kernelcache import PullPolicy
from images.errors import RegistryError
from images.extraction import extract
from images.inspection import differences
from images.reference import Reference
from images.refused import Refused
from images.registry import Registry
from nodeworkers import metrics
from nodeworkers.caches.carrying import in_thread, staged
from nodeworkers.caches.look import Look
from nodeworkers.caches.pulling import About, Chosen, Incoming, chosen_image, pick
from nodeworkers.caches.stopped import Stopped
from nodeworkers.inventory import GPUs
from nodeworkers.ledger import Ledger
from nodeworkers.store import Cached, Store


class Images:
    """The images of one node's caches."""

    def __init__(self, ledger: Ledger, store: Store, incoming: Incoming, hardware: GPUs) -> None:
        self._ledger = ledger
        self._store = store
        self._incoming = incoming
        self._hardware = hardware
        self._room = asyncio.Lock()  # of whoever decides what leaves the disk, or that something must not
        self._needed: Counter[str] = Counter()
        self._pulls: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def obtain(
        self, goal: str, policy: PullPolicy, reference: Reference, registry: Registry, look: Look, held: AsyncExitStack
    ) -> Cached:
        """The image in the store that `goal` stands for on this node. Until `held` ends nobody removes it: by then the
        ledger must name it. Raises Stopped, Refused, RegistryError and OSError.
        """
        if policy != "Always":
            known = await self._known(goal, look, held, everywhere=policy == "Never")
            if known is not None:
                return known
        if policy == "Never":
            raise Stopped("failed", "NotOnNode", f"pullPolicy is Never, and {goal} is not on this node's disk.")
        look.doing = lambda: f"reading {goal}"
        chosen = await chosen_image(registry, reference, goal, self._hardware.gpus or (), machine())
        await held.enter_async_context(self._needing(chosen.digest))
        async with self._pulling(chosen.digest):
            cached = await in_thread(self._store.get, chosen.digest)
            if cached is None:
                look.preflight(self._hardware, chosen.targets)
                cached = await self._pull(goal, reference, registry, chosen, look)
        look.about = About.of(cached)
        look.preflight(self._hardware, look.about.targets)
        return cached

    async def _known(self, goal: str, look: Look, held: AsyncExitStack, *, everywhere: bool) -> Cached | None:
        """What is on the disk already, if nobody has to be asked which image that is."""
        places = [goal, *([look.row.digest] if look.row.goal == goal and look.row.digest else [])]
        if everywhere:
            places += [each.digest for each in await in_thread(self._store.cached) if About.of(each).goal == goal]
        for place in dict.fromkeys(places):
            await held.enter_async_context(self._needing(place))
            cached = await in_thread(self._store.get, place)
            if cached is None:
                continue
            about = About.of(cached)
            if place != goal:
                if about.goal != goal:
                    continue  # it came by another index, and which image of this one is the node's must be asked
                if about.variants and pick(about.variants, self._hardware.gpus or ())[0] != place:
                    continue  # the GPUs are others now
            look.about = about
            look.preflight(self._hardware, about.targets)
            return cached
        return None

    async def _pull(self, goal: str, reference: Reference, registry: Registry, chosen: Chosen, look: Look) -> Cached:
        size = sum(layer.size for layer in chosen.image.layers)
        if size > self._store.quota:
            told = f"{chosen.digest} has {size:,} bytes, and the node keeps at most {self._store.quota:,} for caches."
            raise Refused("NoSpace", told)
        look.doing = lambda: f"fetching {chosen.digest}: {self._incoming.there(chosen.digest):,} of {size:,} bytes"
        try:
            # Orders that a newer one ended left something each, which no quota counts.
            async with self._room:
                await in_thread(self._incoming.sweep, set(self._needed))
            layers = await self._incoming.fetch(registry, reference, chosen)
            look.doing = lambda: f"extracting {chosen.digest}"
            async with staged(self._store) as content:
                begun = time.monotonic()
                extracted = await extract(layers, chosen.image.kind, content)
                metrics.extracted(time.monotonic() - begun, extracted.bytes)
                warnings = (*chosen.image.packed.problems, *differences(chosen.image, extracted, chosen.target))
                about = About.made(goal, chosen, extracted, warnings)
                look.preflight(self._hardware, about.targets)
                async with self._room:
                    # What is needed is asked first: whoever needs it no more has it in the ledger by then.
                    needed = set(self._needed)
                    in_use = needed | await in_thread(self._ledger.digests)
                    cached = await in_thread(self._store.keep, content, chosen.digest, about.told(), in_use)
                    metrics.on_disk(await in_thread(self._store.taken), self._store.quota)
        except RegistryError as error:
            if error.kind != "away":
                await self._incoming.discard(chosen.digest)
            raise
        except (Refused, Stopped, OSError):  # it will not be gone on with, and the disk may be full
            await self._incoming.discard(chosen.digest)
            raise
        await self._incoming.discard(chosen.digest)
        return cached

    @asynccontextmanager
    async def _needing(self, digest: str) -> AsyncIterator[None]:
        """Whoever makes room from here on leaves it alone."""
        async with self._room:
            self._needed[digest] += 1
        try:
            yield
        finally:
            self._needed[digest] -= 1
            if not self._needed[digest]:
                del self._needed[digest]

    @asynccontextmanager
    async def _pulling(self, digest: str) -> AsyncIterator[None]:
        """Two caches with one image fetch it once."""
        lock = self._pulls.setdefault(digest, asyncio.Lock())
        async with lock:
            yield
