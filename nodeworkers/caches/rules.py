"""What the node asks the API server before it touches an image: the cache itself, who must have signed it, how
registries are reached, and the one Secret that the cache names.

The node reads all of that itself, with its own rights: no order carries a word of it (histories hold names and digests
only). The Secret's content stays in `Credentials`, which shows nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from crds.kernelcache import CLUSTER_KIND, TritonKernelCacheSpec
from crds.settings import SETTINGS_NAME, SETTINGS_NAMESPACE, Settings
from images.credentials import BadCredentials, Credentials
from kube.client import KubeClient
from kube.errors import AccessDenied, NotFound
from kube.resources import (
    CONFIGMAPS,
    KERNELCACHEPOLICIES,
    SECRETS,
    TRITONKERNELCACHECLUSTERS,
    TRITONKERNELCACHES,
)
from nodeworkers.caches.stopped import Stopped, later
from planning.caches.grants import pull_secret
from planning.caches.model import cache_view
from planning.caches.orders import CacheRef
from planning.caches.rules import policy_of
from planning.caches.trust import Knobs, Policy, RootKey
from planning.settings import read_settings


@dataclass(frozen=True, slots=True)
class Asked:
    """A cache as its object says now."""

    spec: TritonKernelCacheSpec
    generation: int


class Rules:
    """Reads from one API server. Every method raises KubeError, or Stopped with what a person has to mend."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube

    async def cache(self, ref: CacheRef) -> Asked | None:
        """The cache; None where it is gone, or another has its name by now."""
        whole = ref.kind == CLUSTER_KIND
        resource = TRITONKERNELCACHECLUSTERS if whole else TRITONKERNELCACHES
        try:
            raw = await self._kube.get(resource, ref.name, None if whole else ref.namespace)
        except NotFound as error:
            if error.details.get("name"):
                return None
            raise  # the kind is not served: that says nothing about the cache
        view = cache_view(raw)
        if view.ref.uid != ref.uid:
            return None
        if view.deleting:
            raise Stopped("failed", "Deleting", f"{ref.told} is being deleted, so that it is not prepared.")
        if view.spec is None:
            raise Stopped("failed", "InvalidSpec", f"{ref.told} cannot be read: {view.problem}.")
        return Asked(view.spec, view.generation)

    async def settings(self) -> Settings:
        """What the platform engineer set. Settings that cannot be read admit nothing."""
        try:
            found = await self._kube.get(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE)
        except NotFound:
            return Settings()
        settings, wrong = read_settings(found.get("data"))
        if settings is None:
            raise later("SettingsRefused", f"{wrong}.")
        return settings

    async def policies(self) -> list[Policy]:
        """All KernelCachePolicies, readable or not."""
        found, _ = await self._kube.list(KERNELCACHEPOLICIES)
        return [policy_of(raw) for raw in found]

    async def roots(self, wanted: Iterable[RootKey]) -> dict[RootKey, bytes]:
        """The trusted roots that policies name, as far as there are such."""
        found: dict[RootKey, bytes] = {}
        maps: dict[str, Mapping[str, Any]] = {}
        for name, key in sorted(wanted):
            if name not in maps:
                try:
                    maps[name] = await self._kube.get(CONFIGMAPS, name, SETTINGS_NAMESPACE)
                except NotFound:
                    maps[name] = {}
            content = _content(maps[name], key)
            if content is not None:
                found[name, key] = content
        return found

    async def credentials(self, ref: CacheRef, spec: TritonKernelCacheSpec) -> Credentials:
        """Who we are to the registry: by the Secret that the cache names, if its namespace's owner granted it. Raises
        NoPullSecret too.
        """
        wanted = pull_secret(spec, ref)
        if wanted is None:
            return Credentials()
        try:
            return Credentials.from_secret(await self._kube.get(SECRETS, wanted.name, wanted.namespace))
        except AccessDenied:
            raise wanted.not_granted() from None
        except NotFound:
            raise wanted.missing() from None
        except BadCredentials as wrong:
            raise wanted.refused(wrong) from None


def knobs(settings: Settings) -> Knobs:
    """The two settings that change who is trusted."""
    return Knobs(settings.verify_enabled, settings.allow_unsigned_images)


def _content(config_map: Mapping[str, Any], key: str) -> bytes | None:
    text, binary = (config_map.get(part) or {} for part in ("data", "binaryData"))
    if isinstance(text.get(key), str):
        return str(text[key]).encode()
    try:
        return base64.b64decode(binary[key], validate=True) if key in binary else None
    except (binascii.Error, ValueError, TypeError):
        return None
