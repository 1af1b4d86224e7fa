"""Reads KernelCachePolicies, and tells by one short word whether anything changed that decides about trust in an image:
then every node has to check it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from crds.kernelcachepolicy import KernelCachePolicySpec
from planning.caches.trust import Knobs, Policy, about
from planning.podspecs import mapping, text


def policy_of(raw: object) -> Policy:
    """A KernelCachePolicy as the API server has it, readable or not."""
    obj = mapping(raw)
    spec, problem = KernelCachePolicySpec.parse(obj.get("spec"))
    return Policy(text(mapping(obj.get("metadata")).get("name")), spec, problem)


def concerning(image: str, namespace: str | None, policies: Iterable[Policy]) -> list[Policy]:
    """Those that are about an image (`registry/repository`), by name; one that cannot be read may be about any."""
    found = [policy for policy in policies if policy.spec is None or about(policy.spec, image, namespace)]
    return sorted(found, key=lambda policy: policy.name)


def fingerprint(policies: Iterable[Policy], roots: Mapping[tuple[str, str], str], knobs: Knobs) -> str:
    """Of policies, the versions of the trusted roots that they name, and the two knobs: another one where anything of
    that is another.
    """
    parts = [f"{knobs.verify_enabled} {knobs.allow_unsigned}"]
    parts += [f"{each.name} {each.spec.model_dump_json() if each.spec else each.problem}" for each in policies]
    parts += [f"{name} {key} {version}" for (name, key), version in sorted(roots.items())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
