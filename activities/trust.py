"""What decides about trust in a cache's image, and who we are to its registry, as the API server has it now.

For the look at a kernel cache. Nothing secret leaves what is returned but by the registry's client.
"""

from __future__ import annotations

from activities.cache import ClusterCache
from crds.kernelcache import TritonKernelCacheSpec
from crds.settings import SETTINGS_NAMESPACE
from images.credentials import BadCredentials, Credentials
from kube.client import KubeClient
from kube.errors import AccessDenied, NotFound
from kube.resources import CONFIGMAPS, SECRETS
from planning.caches.grants import pull_secret
from planning.caches.orders import CacheRef
from planning.caches.rules import concerning, fingerprint
from planning.caches.trust import Knobs, roots_of


async def rules_of(cache: ClusterCache, kube: KubeClient, image: str, ref: CacheRef) -> str:
    """The fingerprint of what decides about an image (`registry/repository`). Raises KubeError."""
    policies = concerning(image, ref.namespace or None, cache.policies.items.values())
    versions: dict[tuple[str, str], str] = {}
    for name, key in roots_of(policies):
        try:
            raw = await kube.get(CONFIGMAPS, name, SETTINGS_NAMESPACE)
        except NotFound:
            versions[name, key] = "missing"
        else:
            versions[name, key] = str(raw["metadata"]["resourceVersion"])
    settings = cache.settings
    return fingerprint(policies, versions, Knobs(settings.verify_enabled, settings.allow_unsigned_images))


async def credentials_of(kube: KubeClient, spec: TritonKernelCacheSpec, ref: CacheRef) -> Credentials:
    """What the cache's pull secret holds; none: anonymous. Raises NoPullSecret, and KubeError where nobody answers."""
    wanted = pull_secret(spec, ref)
    if wanted is None:
        return Credentials()
    try:
        return Credentials.from_secret(await kube.get(SECRETS, wanted.name, wanted.namespace))
    except AccessDenied:
        raise wanted.not_granted() from None
    except NotFound:
        raise wanted.missing() from None
    except BadCredentials as wrong:
        raise wanted.refused(wrong) from None
