"""What the API server is told of a kernel cache or a policy that somebody writes: refused where it can never work,
warned where it does nothing. For `planning.admission`.

A cache is judged by its spec alone: which policies are about its image, and what the registry has, is told by its
status. All of it is told again where the cache or the policy is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from crds.kernelcache import TritonKernelCacheSpec
from crds.kernelcachepolicy import KernelCachePolicySpec
from planning.caches.pem import certificates_problem, public_key_problem
from planning.caches.trust import pattern_matches
from planning.references import BadReference, Parts, names_a_registry, parts

_ANY = ("registry.example/a", "registry.example/a/b/c")  # what fits both, and names neither, fits everything


def cache_refusal(model: type[TritonKernelCacheSpec], new: object, old: object) -> str:
    """'' or where and why not. `old` is the spec before, None for a creation.

    An image that stood there is not refused: it may be edited away from, and pullPolicy Never then keeps the digest
    that its tag was found to stand for.
    """
    spec, invalid = model.parse(new)
    if spec is None:
        return "" if old is not None and model.parse(old)[1] == invalid else invalid
    image = spec.oci_image.image
    if _image(old) == image:
        return ""
    reference = _reference(spec)
    if isinstance(reference, str):
        return f"spec.ociImage.image: {reference}"
    if spec.oci_image.pull_policy == "Never" and not reference.digest:
        return (
            f"spec.ociImage.pullPolicy: is Never, so nobody is asked what {image} stands for: give the image with its "
            "digest"
        )
    return ""


def cache_warnings(model: type[TritonKernelCacheSpec], new: object) -> list[str]:
    """A tag that is to be followed, where there is nothing to follow."""
    spec, _ = model.parse(new)
    if spec is None or spec.update_policy.type != "OnTagChange":
        return []
    reference = _reference(spec)
    if not isinstance(reference, str) and reference.digest:
        return ["spec.updatePolicy.type: OnTagChange follows nothing here, for the image names its digest"]
    if spec.oci_image.pull_policy == "Never":
        return ["spec.updatePolicy.type: OnTagChange follows nothing here, for with pullPolicy Never nobody is asked"]
    return []


def policy_refusal(new: object, old: object) -> str:
    """'' or where and why not. `old` is the spec before, None for a creation; what was wrong in it is not refused.

    A policy that cannot be read is about every image, so it stops all caches.
    """
    spec, invalid = KernelCachePolicySpec.parse(new)
    before, was = KernelCachePolicySpec.parse(old) if old is not None else (None, "")
    if spec is None:
        return "" if invalid == was else invalid
    known = _unreadable(before) if before is not None else []
    return next((each for each in _unreadable(spec) if each not in known), "")


def policy_warnings(new: object) -> list[str]:
    """Patterns that fit less or more than they seem to."""
    spec, _ = KernelCachePolicySpec.parse(new)
    if spec is None:
        return []
    told = [
        f"spec.images: {_short(pattern)} fits no image, for it names no registry: write it with its host"
        for pattern in spec.images
        if _without_registry(pattern)
    ]
    wide = next((pattern for pattern in spec.images if _fits_everything(pattern)), None)
    if wide is not None and spec.allow_skipping:
        told.append(
            f"spec.allowSkipping: {_short(wide)} fits every image, so any cache may skip its signature "
            "(validateSignature: false) where no stricter KernelCachePolicy is about its image"
        )
    return told


def _image(raw: object) -> object:
    """The image of a spec, readable or not."""
    image = raw.get("ociImage") if isinstance(raw, Mapping) else None
    return image.get("image") if isinstance(image, Mapping) else None


def _reference(spec: TritonKernelCacheSpec) -> Parts | str:
    try:
        return parts(spec.oci_image.image)
    except BadReference as wrong:
        return str(wrong)


def _unreadable(spec: KernelCachePolicySpec) -> list[str]:
    """Signers whose PEM cannot be read, by name: their places in the list may change."""
    found = []
    for signer in spec.signers:
        if signer.key is not None and (wrong := public_key_problem(signer.key)):
            found.append(f"spec.signers[{signer.name}].key: {wrong}")
        if signer.certificate is not None and (wrong := certificates_problem(signer.certificate.authorities)):
            found.append(f"spec.signers[{signer.name}].certificate.authorities: {wrong}")
    return found


def _without_registry(pattern: str) -> bool:
    first, slash, _ = pattern.partition("/")
    return bool(slash) and "*" not in first and not names_a_registry(first)


def _short(pattern: str) -> str:
    """The API server cuts warnings after 256 characters."""
    return pattern if len(pattern) <= 80 else f"{pattern[:79]}…"


def _fits_everything(pattern: str) -> bool:
    return not pattern.strip("*/") and all(pattern_matches(pattern, image) for image in _ANY)
