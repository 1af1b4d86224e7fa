"""What decides about trust in a cache's image, and who we are to its registry, as the API server has it now.

For the look at a kernel cache. Nothing secret leaves what is returned but by the registry's client.
"""

from __future__ import annotations

from activities.cache import ClusterCache
from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from crds.settings import SETTINGS_NAMESPACE
from images.credentials import BadCredentials, Credentials
from images.signatures.verify import roots_of
from kube.client import KubeClient
from kube.errors import AccessDenied, NotFound
from kube.resources import CONFIGMAPS, SECRETS
from planning.caches.grants import missing_grant
from planning.caches.orders import CacheRef
from planning.caches.rules import concerning, fingerprint
from planning.caches.trust import Knobs


class NoCredentials(Exception):
    """The pull secret cannot be had: `reason` for a condition, the sentence says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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
    """What the cache's pull secret holds; none: anonymous. Raises NoCredentials, and KubeError where nobody answers."""
    secret, namespace = spec.oci_image.pull_secret, ref.namespace
    if secret is None:
        return Credentials()
    if isinstance(spec, TritonKernelCacheClusterSpec):
        namespace = spec.oci_image.pull_secret_namespace or ""
        if not namespace:
            raise NoCredentials("PullSecretMissing", "its pullSecret needs a pullSecretNamespace: give both")
    try:
        return Credentials.from_secret(await kube.get(SECRETS, secret, namespace))
    except AccessDenied:
        raise NoCredentials("PullSecretNotGranted", missing_grant(namespace, secret)) from None
    except NotFound:
        raise NoCredentials(
            "PullSecretMissing", f"Secret {namespace}/{secret}, its pullSecret, does not exist"
        ) from None
    except BadCredentials as wrong:
        raise NoCredentials("PullSecretUnreadable", f"Secret {namespace}/{secret} cannot be used: {wrong}") from None
