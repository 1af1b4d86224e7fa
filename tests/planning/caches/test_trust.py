"""Which policies are about an image, and the verdict in every case of the table in docs/kernelcaches-trust.md."""

from __future__ import annotations

import itertools
import re
from fnmatch import translate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.kernelcachepolicy import KernelCachePolicySpec
from planning.caches.trust import (
    Demand,
    Findings,
    Knobs,
    Policy,
    Signature,
    Verdict,
    about,
    demand,
    judge,
    pattern_matches,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernelcaches-trust.md"
IMAGE = "registry.example/team/cache"
DEFAULT = Knobs()
KEY = "-----BEGIN PUBLIC KEY-----\nnot read here\n-----END PUBLIC KEY-----\n"


def policy(name: str, *images: str, namespaces: list[str] | None = None, skipping: bool = False) -> Policy:
    spec, problem = KernelCachePolicySpec.parse(
        {
            "images": list(images or ["registry.example/**"]),
            "namespaces": namespaces or [],
            "signers": [{"name": "release", "key": KEY}],
            "allowSkipping": skipping,
        }
    )
    assert spec is not None, problem
    return Policy(name, spec)


def weigh(
    policies: list[Policy],
    found: Findings,
    knobs: Knobs = DEFAULT,
    validate: bool = True,
    namespace: str | None = "serving",
) -> Verdict:
    return judge(IMAGE, namespace, demand(IMAGE, namespace, policies, knobs, validate), found, knobs)


def good(*policies: str) -> Signature:
    return Signature("bundle sha256:1", "the key of release", frozenset((name, "release") for name in policies))


BAD = Signature("bundle sha256:2", problem="is not by this key")

# --- the table -----------------------------------------------------------------------------------------------------

POLICIES = {
    "none": [policy("other", "elsewhere.example/**")],
    "all allow skipping": [policy("a", skipping=True), policy("b", skipping=True)],
    "one does not": [policy("a", skipping=True), policy("b")],
    "one cannot be read": [policy("a"), Policy("broken", None, "spec.images: is required")],
}
SIGNATURES = {
    "none": Findings(),
    "bad": Findings((BAD,)),
    "good for one policy of two": Findings((good("a"),)),
    "good for all": Findings((good("a"), good("b"))),
    "good for all, and a bad one": Findings((BAD, good("a", "b"))),
}


def table() -> list[list[str]]:
    section = PAGE.read_text(encoding="utf-8").split("### Every case")[1]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def fits(cell: str, value: str) -> bool:
    return cell in ("any", value) or (cell == "some" and value != "none")


@pytest.mark.parametrize(
    "case",
    list(itertools.product(("true", "false"), POLICIES, ("true", "false"), ("true", "false"), SIGNATURES)),
    ids=str,
)
def test_every_case_is_one_row_of_the_table_and_what_the_code_says(case: tuple[str, str, str, str, str]) -> None:
    found = [row for row in table() if all(fits(cell, value) for cell, value in zip(row, case, strict=False))]
    assert len(found) == 1, f"{case} is told by {len(found)} rows"
    verify, policies, validate, unsigned, signatures = case
    verdict = weigh(
        POLICIES[policies], SIGNATURES[signatures], Knobs(verify == "true", unsigned == "true"), validate == "true"
    )
    assert f"{'admitted' if verdict.admitted else 'refused'} `{verdict.reason}" == found[0][5]
    assert verdict.verified == (verdict.reason == "Verified")
    assert verdict.message


# --- messages ------------------------------------------------------------------------------------------------------


def test_a_refusal_says_who_was_demanded_and_what_was_found() -> None:
    verdict = weigh([policy("team")], Findings((BAD,), more=8))
    assert verdict.message == (
        "registry.example/team/cache has no good signature by release, as KernelCachePolicy team demands: "
        "bundle sha256:2: is not by this key; 8 more were not looked at"
    )


def test_without_a_policy_it_says_what_is_missing() -> None:
    told = "no KernelCachePolicy says who must have signed registry.example/team/cache for a cache of "
    assert weigh([], Findings()).message == told + "namespace serving"
    assert weigh([], Findings(), namespace=None).message == told + "the cluster"
    assert weigh([], Findings((BAD,)), Knobs(allow_unsigned=True)).message.endswith(
        "; it is signed, and allowUnsignedImages is for images that are not"
    )


def test_it_says_why_validate_signature_did_not_count() -> None:
    assert weigh([policy("a"), policy("b", skipping=True)], Findings(), validate=False).message.endswith(
        "(validateSignature: false does not count: KernelCachePolicy a does not permit it)"
    )
    assert weigh([], Findings(), validate=False).message.endswith(
        "(validateSignature: false does not count: no KernelCachePolicy is about the image and permits it)"
    )


def test_signatures_that_were_not_looked_at_are_not_none() -> None:
    """A flood must not make a signed image an unsigned one."""
    verdict = weigh([], Findings((), more=1), Knobs(allow_unsigned=True))
    assert not verdict.admitted


@pytest.mark.parametrize("signatures", [(), (BAD,), (good("a"), BAD)])
@pytest.mark.parametrize("knobs", [Knobs(), Knobs(allow_unsigned=True)])
def test_one_that_could_not_be_looked_at_is_neither_good_nor_bad(
    signatures: tuple[Signature, ...], knobs: Knobs
) -> None:
    unseen = Signature("bundle sha256:3", problem="was not looked at: it ended with -9")
    found = Findings((*signatures, unseen), trouble="it ended with -9")
    for policies in ([policy("a"), policy("b")], [policy("b")], *([[]] if knobs.allow_unsigned else [])):
        verdict = weigh(policies, found, knobs)
        assert (verdict.admitted, verdict.reason) == (False, "VerifierFailed") and "ended with -9" in verdict.message
    enough = weigh([policy("a")], Findings((good("a"), unseen), trouble="it ended with -9"), knobs)
    assert enough.verified, "what it saw is enough"


@given(st.lists(st.text(max_size=2000), max_size=40))
def test_messages_stay_short(problems: list[str]) -> None:
    found = Findings(tuple(Signature("bundle x", problem=each) for each in problems), more=1)
    assert len(weigh([policy("a")], found).message) <= 1024


# --- which policies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "image", "matched"),
    [
        ("registry.example/team/*", "registry.example/team/cache", True),
        ("registry.example/team/*", "registry.example/team/sub/cache", False),
        ("registry.example/team/**", "registry.example/team/sub/cache", True),
        ("registry.example/team/**", "registry.example/teams/cache", False),
        ("registry.example/team/**", "registry.example.attacker.org/team/cache", False),
        ("registry.example/team/cache", "registry.example/team/cache", True),
        ("registry.example/team/cache", "registry.example/team/cache2", False),
        ("registry.example/**", "registry.example:443/team/cache", True),
        ("registry.example/**", "registry.example:5000/team/cache", False),
        ("registry.example:5000/**", "registry.example:5000/team/cache", True),
        ("registry.example:443/**", "registry.example/team/cache", True),
        ("registry.example:443/**", "registry.example:443/team/cache", True),
        ("registry.example:443/**", "registry.example:5000/team/cache", False),
        ("registry.example:443/**", "other.example/team/cache", False),
        ("*:443/team/*", "registry.example/team/cache", True),
        ("**:443/cache", "registry.example/team/cache", False),
        ("[::1]:443/*", "[::1]/a", True),
        ("*.example/**/cache", "registry.example/a/b/cache", True),
        ("**", "anything.example/a/b", True),
        ("*/a", "x.example/y/a", False),
        ("***/a", "x.example/y/a", True),
        ("[::1]:5000/*", "[::1]:5000/a", True),
    ],
)
def test_patterns(pattern: str, image: str, matched: bool) -> None:
    assert pattern_matches(pattern, image) is matched


NAME = st.text("ab/", max_size=8)


@given(st.lists(st.sampled_from(["*", "**", "a", "b", "/", "ab"]), max_size=8).map("".join), NAME)
def test_patterns_are_those_of_a_plain_translation(pattern: str, image: str) -> None:
    plain = "".join(
        ".*" if len(part) > 1 else "[^/]*" if part == "*" else re.escape(part)
        for part in re.findall(r"\*+|[^*]", pattern)
    )
    assert pattern_matches(pattern, image) == bool(re.fullmatch(plain, image, re.DOTALL))
    if "/" not in image:
        assert pattern_matches(pattern, image) == bool(re.match(translate(pattern), image))


def test_a_hostile_pattern_takes_no_time() -> None:
    assert not pattern_matches("**a" * 170, "a" * 160 + "/" + "a" * 400 + "b")


def test_namespaces() -> None:
    everywhere, serving = policy("a"), policy("b", namespaces=["serving"])
    assert everywhere.spec is not None and serving.spec is not None
    assert all(about(everywhere.spec, IMAGE, namespace) for namespace in ("serving", "other", None))
    assert [about(serving.spec, IMAGE, namespace) for namespace in ("serving", "other", None)] == [True, False, False]


@given(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")), st.booleans())
def test_all_policies_count_and_another_one_never_helps(wanted: set[str], signed: set[str], unsigned: bool) -> None:
    """Admitted as verified exactly if a signature satisfies each; and a policy more never admits what was refused."""
    found = Findings((good(*signed),)) if signed else Findings((BAD,))
    knobs = Knobs(allow_unsigned=unsigned)
    verdict = weigh([policy(name) for name in wanted], found, knobs)
    assert verdict.admitted == verdict.verified == (bool(wanted) and wanted <= signed)
    if wanted and not verdict.admitted:
        assert not weigh([policy(name) for name in wanted | {"z"}], found, knobs).admitted


def test_nothing_is_demanded_twice_of_what_is_settled() -> None:
    settled = demand(IMAGE, "serving", [policy("a")], Knobs(verify_enabled=False), True)
    assert settled == Demand(verdict=judge(IMAGE, "serving", settled, Findings((BAD,)), Knobs()))
