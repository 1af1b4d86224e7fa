"""Whether a cache's image may be used: which KernelCachePolicies are about it, what the two knobs change, the
verdict.

For the node and `berth cache verify`. `demand` says before anything is fetched what must be checked; `judge` weighs
what `images.signatures` then found. Whatever is unknown is refused; docs/kernelcaches-trust.md has every case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from crds.kernelcachepolicy import KernelCachePolicySpec

Reason = Literal[
    "Verified",
    "VerificationDisabled",
    "ValidationSkipped",
    "UnsignedAllowed",
    "NoPolicy",
    "PolicyUnreadable",
    "NotSigned",
    "SignatureRefused",
    "VerifierFailed",
]
# By which it may not be used; where a verifier failed nobody knows.
REFUSALS: tuple[Reason, ...] = ("NoPolicy", "PolicyUnreadable", "NotSigned", "SignatureRefused")

_TOLD = 4  # signatures whose problem a message tells; a condition's message is for reading
_MESSAGE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Policy:
    """A KernelCachePolicy as it was read. Without a spec it could not be, and `problem` says why."""

    name: str
    spec: KernelCachePolicySpec | None
    problem: str = ""


RootKey = tuple[str, str]
"""A ConfigMap of berth-system and the key in it."""


def roots_of(policies: Iterable[Policy]) -> set[RootKey]:
    """Where the trusted roots lie that the policies name."""
    signers = [signer for policy in policies if policy.spec for signer in policy.spec.signers]
    holders = [holder for signer in signers for holder in (signer.keyless, signer.certificate) if holder is not None]
    return {(named.name, named.key) for holder in holders if (named := holder.trusted_root) is not None}


@dataclass(frozen=True, slots=True)
class Knobs:
    """`verifyEnabled` and `allowUnsignedImages` of berth-settings."""

    verify_enabled: bool = True
    allow_unsigned: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """What was found out about one signature that lies beside an image.

    `satisfies`: the signers, each as (policy, name), whose signature it is. None of them: `problem` says why.
    """

    place: str
    signer: str = ""
    satisfies: frozenset[tuple[str, str]] = frozenset()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """The signatures that were looked at, and how many more there are. `trouble`: why not all of them were that should
    have been, through no fault of theirs as far as is known.
    """

    signatures: tuple[Signature, ...] = ()
    more: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the image may be used, and whether that is because its signatures were verified. Of one that may not,
    VerifierFailed says nothing about the image: it is to be asked again.
    """

    admitted: bool
    verified: bool
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Demand:
    """What must be checked: all of `policies`, or that there is no signature at all where there are none.

    With a verdict there is nothing to check. `aside` is what a refusal tells beside its own reason.
    """

    policies: tuple[Policy, ...] = ()
    verdict: Verdict | None = None
    aside: str = ""


def demand(image: str, namespace: str | None, policies: Iterable[Policy], knobs: Knobs, validate: bool) -> Demand:
    """What an image (`registry/repository`) of a cache needs. `namespace` is None for a cache of the whole cluster.

    `validate` is the cache's `validateSignature`.
    """
    if not knobs.verify_enabled:
        told = "verifyEnabled is false in berth-settings: no signature was looked at"
        return Demand(verdict=Verdict(True, False, "VerificationDisabled", told))
    everything = sorted(policies, key=lambda policy: policy.name)
    for policy in everything:
        if policy.spec is None:
            told = f"KernelCachePolicy {policy.name} cannot be read, so it may be about any image: {policy.problem}"
            return Demand(verdict=Verdict(False, False, "PolicyUnreadable", _short(told)))
    found = tuple(policy for policy in everything if policy.spec and about(policy.spec, image, namespace))
    aside = ""
    if not validate:
        forbidding = [policy.name for policy in found if policy.spec and not policy.spec.allow_skipping]
        if found and not forbidding:
            told = f"validateSignature is false, which KernelCachePolicy {_names(found)} permits"
            return Demand(verdict=Verdict(True, False, "ValidationSkipped", _short(told)))
        aside = "validateSignature: false does not count: " + (
            f"KernelCachePolicy {', '.join(forbidding)} does not permit it"
            if forbidding
            else "no KernelCachePolicy is about the image and permits it"
        )
    if not found and not knobs.allow_unsigned:
        return Demand(verdict=_no_policy(image, namespace, aside), aside=aside)
    return Demand(policies=found, aside=aside)


def judge(image: str, namespace: str | None, wanted: Demand, found: Findings, knobs: Knobs) -> Verdict:
    """The verdict on an image (`registry/repository`) whose signatures were looked at."""
    if wanted.verdict is not None:
        return wanted.verdict
    if not found.signatures and not found.more:
        if knobs.allow_unsigned:
            told = f"{image} has no signature, and allowUnsignedImages is true in berth-settings"
            return Verdict(True, False, "UnsignedAllowed", _short(told))
        told = (
            f"{image} has no signature, neither a bundle beside it nor a .sig tag; "
            f"KernelCachePolicy {_names(wanted.policies)} demands one"
        )
        return Verdict(False, False, "NotSigned", _told(told, wanted.aside))
    missing = [policy for policy in wanted.policies if not _satisfied(policy, found)]
    if found.trouble and (missing or not wanted.policies):
        told = f"the signatures of {image} could not all be looked at: {found.trouble}"
        return Verdict(False, False, "VerifierFailed", _told(told, wanted.aside))
    if not wanted.policies:
        return _no_policy(image, namespace, wanted.aside, signed=True)
    if not missing:
        by = dict.fromkeys(signature.signer for signature in found.signatures if signature.satisfies)
        return Verdict(
            True,
            True,
            "Verified",
            _short(f"signed as KernelCachePolicy {_names(wanted.policies)} demands: {'; '.join(by)}"),
        )
    return Verdict(False, False, "SignatureRefused", _told(_why_none(image, missing[0], found), wanted.aside))


def about(spec: KernelCachePolicySpec, image: str, namespace: str | None) -> bool:
    """Whether a policy is about an image of a namespace's cache, or of a cluster's."""
    if spec.namespaces and namespace not in spec.namespaces:
        return False
    return any(pattern_matches(pattern, image) for pattern in spec.images)


def pattern_matches(pattern: str, image: str) -> bool:
    """Whether `registry/repository` fits: `*` stands for any characters but /, `**` for any.

    Takes time in proportion to both lengths, whatever stands in them. The default port is the same as none, in both.
    """
    host, slash, rest = image.partition("/")
    host = host.removesuffix(":443")
    if slash and not host.rpartition(":")[2].isdigit() and _fits(pattern, f"{host}:443/{rest}"):
        return True
    return _fits(pattern, host + slash + rest)


def _fits(pattern: str, text: str) -> bool:
    tokens: list[str] = []
    for character in pattern:
        if character == "*" and tokens and tokens[-1] in ("*", "**"):
            tokens[-1] = "**"
        else:
            tokens.append(character)
    reached = {0}
    for at in [*text, ""]:
        for token in sorted(reached):  # a star may stand for nothing
            while token < len(tokens) and tokens[token] in ("*", "**"):
                token += 1
                reached.add(token)
        if not at:
            break
        following = set()
        for token in reached:
            if token == len(tokens):
                continue
            if tokens[token] == "**" or (tokens[token] == "*" and at != "/"):
                following.add(token)
            elif tokens[token] == at:
                following.add(token + 1)
        reached = following
    return len(tokens) in reached


def _satisfied(policy: Policy, found: Findings) -> bool:
    return any(name == policy.name for signature in found.signatures for name, _ in signature.satisfies)


def _why_none(image: str, policy: Policy, found: Findings) -> str:
    signers = " or ".join(signer.name for signer in policy.spec.signers) if policy.spec else ""
    problems = [
        f"{signature.place}: {signature.problem or f'is signed by {signature.signer}, whom it does not name'}"
        for signature in found.signatures
    ]
    told = problems[:_TOLD]
    if len(problems) > _TOLD:
        told.append(f"and {len(problems) - _TOLD} more")
    if found.more:
        told.append(f"{found.more} more were not looked at")
    return f"{image} has no good signature by {signers}, as KernelCachePolicy {policy.name} demands: {'; '.join(told)}"


def _no_policy(image: str, namespace: str | None, aside: str, signed: bool = False) -> Verdict:
    whose = f"a cache of namespace {namespace}" if namespace is not None else "a cache of the cluster"
    told = f"no KernelCachePolicy says who must have signed {image} for {whose}"
    if signed:
        told += "; it is signed, and allowUnsignedImages is for images that are not"
    return Verdict(False, False, "NoPolicy", _told(told, aside))


def _names(policies: Sequence[Policy]) -> str:
    return ", ".join(policy.name for policy in policies)


def _told(message: str, aside: str) -> str:
    return _short(f"{message} ({aside})" if aside else message)


def _short(text: str) -> str:
    return text if len(text) <= _MESSAGE_LIMIT else f"{text[: _MESSAGE_LIMIT - 1]}…"
