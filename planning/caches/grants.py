"""Which Secret a cache's image is pulled by, and what is said where it cannot be had: who can grant it, and how.

For both that ask registries, the look at a cache and its nodes, so that one reason has one name and one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from planning.caches.orders import CacheRef


class NoPullSecret(Exception):
    """The Secret cannot be had: `reason` is for a condition, the sentence says what to do. Somebody has to do it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PullSecret:
    """The Secret that the cache `told` (as people name it) wants to be pulled by."""

    namespace: str
    name: str
    told: str

    def not_granted(self) -> NoPullSecret:
        """berth may not read it."""
        return NoPullSecret("PullSecretNotGranted", missing_grant(self.namespace, self.name))

    def missing(self) -> NoPullSecret:
        """There is none."""
        told = f"There is no Secret {self.namespace}/{self.name}, which {self.told} names: create it"
        return NoPullSecret("PullSecretMissing", told)

    def refused(self, wrong: object) -> NoPullSecret:
        """It does not hold what it should; `wrong` says nothing of what it holds."""
        return NoPullSecret("PullSecretRefused", f"Secret {self.namespace}/{self.name} cannot be used: {wrong}")


def pull_secret(spec: TritonKernelCacheSpec, ref: CacheRef) -> PullSecret | None:
    """The Secret that a cache names; None: its registry is asked anonymously. Raises NoPullSecret where a cache of the
    cluster does not say in which namespace it is.
    """
    name, namespace = spec.oci_image.pull_secret, ref.namespace
    if name is None:
        return None
    if isinstance(spec, TritonKernelCacheClusterSpec):
        namespace = spec.oci_image.pull_secret_namespace or ""
    if not namespace:
        told = f"The pullSecret of {ref.told} needs a pullSecretNamespace: give both"
        raise NoPullSecret("PullSecretMissing", told)
    return PullSecret(namespace, name, ref.told)


def missing_grant(namespace: str, secret: str) -> str:
    """The sentence with the commands that grant exactly that Secret to those two accounts that ask registries."""
    name = f"berth-pull-{secret}"[:253]
    return (
        f"berth may not read Secret {namespace}/{secret}; whoever owns the namespace grants it with: "
        f"kubectl -n {namespace} create role {name} --verb=get --resource=secrets --resource-name={secret} && "
        f"kubectl -n {namespace} create rolebinding {name} --role={name} "
        "--serviceaccount=berth-system:berth-worker --serviceaccount=berth-system:berth-node"
    )
