"""The whole way through the child process: what it answers, what it may no longer do, and what its end means."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from crds.kernelcachepolicy import Signer
from images.signatures import limits, signing
from images.signatures.envelopes import Candidate
from images.signatures.request import Check, pack
from images.signatures.verify import _ask, verify
from planning.caches.trust import Findings, Knobs, Policy, demand, judge, roots_of
from tests.images.signatures.rig import (
    DIGEST,
    NOW,
    ROOT,
    Authority,
    MemoryRepository,
    bundle,
    examine,
    keyless,
    new_key,
    pinned,
    policy,
    recorded,
    roots,
    simple,
)

KEY = new_key()
HOME = Path(__file__).resolve().parents[3]


def look(repository: MemoryRepository, *policies: Policy) -> Findings:
    return asyncio.run(verify(repository, DIGEST, policies, roots(recorded()), NOW, seed=1))


def test_good_and_bad_ones_side_by_side() -> None:
    repository = MemoryRepository()
    by_key = repository.add_bundle(signing.sign(DIGEST, KEY))
    by_stranger = repository.add_bundle(signing.sign(DIGEST, new_key()))
    by_alice = repository.add_bundle(json.dumps(recorded()["bundles"]["good"]).encode())
    repository.add_bundle(json.dumps(recorded()["bundles"]["attestation"]).encode())
    legacy = simple(recorded()["legacy"]["good"])
    repository.add_layers((legacy.content, legacy.annotations))
    policies = [policy(pinned(KEY)), policy(keyless(), name="people")]
    found = {each.place: each for each in look(repository, *policies).signatures}
    assert len(found) == 4
    assert found[by_key].satisfies == {("team", "release")}
    assert found[by_alice].satisfies == {("people", "alice")}
    assert not found[by_stranger].satisfies and "is not by this key" in found[by_stranger].problem
    assert sum(each.satisfies == {("people", "alice")} for each in found.values()) == 2
    wanted = demand("registry.example/team/cache", "serving", policies, Knobs(), True)
    verdict = judge("registry.example/team/cache", "serving", wanted, Findings(tuple(found.values())), Knobs())
    assert verdict.verified and "the key of release" in verdict.message


def test_nothing_is_started_for_an_image_without_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", None)
    assert look(MemoryRepository(), policy(pinned(KEY))) == Findings()


def test_too_many_signers_are_told() -> None:
    repository = MemoryRepository()
    repository.add_bundle(signing.sign(DIGEST, KEY))
    many = [policy(*(pinned(KEY, f"s{n}") for n in range(16)), name=f"p{m}") for m in range(17)]
    assert [each.problem for each in look(repository, *many).signatures] == [
        f"cannot be checked: the policies about this image name more than {limits.CHECKS} signers"
    ]


def test_a_child_that_ends_too_early_leaves_open_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WALL_SECONDS", 0.0)
    repository = MemoryRepository()
    repository.add_bundle(signing.sign(DIGEST, KEY))
    found = look(repository, policy(pinned(KEY)))
    assert [each.problem for each in found.signatures] == [
        "was not looked at: the process that looks at signatures ended with -9"
    ]
    assert found.trouble == "the process that looks at signatures ended with -9"
    wanted = demand("registry.example/team/cache", "serving", [policy(pinned(KEY))], Knobs(), True)
    assert judge("registry.example/team/cache", "serving", wanted, found, Knobs()).reason == "VerifierFailed"


def test_a_child_that_never_stops_talking_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one might that was led astray by what it reads."""
    start = asyncio.create_subprocess_exec

    async def talker(*_: str, **how: Any) -> asyncio.subprocess.Process:
        return await start(sys.executable, "-c", "while True: print('null')", **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", talker)
    monkeypatch.setattr(limits, "ANSWER", 1_000_000)
    monkeypatch.setattr(limits, "WALL_SECONDS", 5.0)
    answer, trouble = asyncio.run(_ask(b"{}"))
    assert len(answer) <= 1_000_000 and trouble == "the process that looks at signatures ended with -9"


def test_the_policies_roots_are_named() -> None:
    assert roots_of([policy(pinned(KEY), keyless())]) == {ROOT}


def run(script: str, request: bytes = b"") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=HOME, input=request, capture_output=True, check=True
    )
    assert done.stderr == b""
    return done.stdout.decode().splitlines()


def test_nothing_is_loaded_any_more_while_strangers_are_read() -> None:
    """Then files can no longer be opened: what is loaded late would be a good signature refused."""
    made, authority = recorded(), Authority.new()
    leaf = authority.issue(KEY, x509.UniformResourceIdentifier("https://ci.example/kernels"))
    certificate = {
        "authorities": authority.pem,
        "identityPattern": "^https://ci.*$",
        "trustedRoot": {"name": ROOT[0], "key": ROOT[1]},
    }
    signers = (pinned(KEY), keyless(), Signer.model_validate({"name": "ci", "certificate": certificate}))
    candidates = [
        bundle(signing.sign(DIGEST, KEY)),
        bundle(signing.sign(DIGEST, KEY, leaf)),
        *(bundle(each) for each in made["bundles"].values()),
        *(simple(each) for each in made["legacy"].values()),
        bundle(b"{"),
    ]
    script = """
        import json, sys
        from images.signatures import child
        before = set()
        child.give_up = lambda: before.update(sys.modules)
        lines = []
        child.run(json.load(sys.stdin.buffer), lines.append)
        print(sorted(set(sys.modules) - before))
        print(sum("policy" not in line for line in lines), sum('"problem": ""' in line for line in lines))
    """
    request = pack(DIGEST, [Check("team", each) for each in signers], roots(made), candidates, NOW)
    assert run(script, request) == ["[]", f"{len(candidates)} 6"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_the_child_has_no_rights_no_network_and_no_files() -> None:
    script = """
        import json, os, socket
        from images.signatures import child
        child.give_up()
        try:
            open("/etc/hostname")
        except OSError as error:
            opened = error.errno
        print(json.dumps([os.getresuid(), os.getresgid(), os.getgroups(), opened]))
        try:
            os.fork()
        except OSError as error:
            print(error.errno)
        try:
            socket.socket()
        except OSError as error:
            print(error.errno)
    """
    first, *errors = run(script)
    assert json.loads(first) == [[65534] * 3, [65534] * 3, [], 24]
    assert errors == ["11", "24"]


# --- anything at all -----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
SIGNERS = (pinned(KEY), keyless())


def unharmed(candidate: Candidate) -> None:
    found = examine(candidate, *SIGNERS, roots=roots(recorded()))
    assert found is None or (not found.satisfies and 0 < len(found.problem) <= 480)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused(raw: bytes) -> None:
    unharmed(bundle(raw))


@given(st.binary(), st.dictionaries(st.text(), st.text()))
def test_any_layer_is_refused(payload: bytes, annotations: dict[str, str]) -> None:
    unharmed(Candidate("x", "simple", payload, annotations))


def places(document: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


GOOD = recorded()["bundles"]["good"]


@settings(max_examples=200)
@given(st.data())
def test_a_bundle_with_anything_anywhere_never_raises(data: st.DataObject) -> None:
    document = json.loads(json.dumps(GOOD))
    *path, last = data.draw(st.sampled_from(places(GOOD)[1:]))
    at = document
    for step in path:
        at = at[step]
    at[last] = data.draw(JSON | st.text("AZaz09+/=", max_size=40))
    found = examine(bundle(json.dumps(document).encode()), *SIGNERS, roots=roots(recorded()))
    # What was replaced by what means the same, such as a zero by its absence, leaves it good.
    assert found is None or found.satisfies or found.problem


LEGACY = [
    "dev.cosignproject.cosign/signature",
    "dev.sigstore.cosign/certificate",
    "dev.sigstore.cosign/chain",
    "dev.sigstore.cosign/bundle",
]


@settings(max_examples=200)
@given(st.sampled_from(LEGACY), st.integers(0, 2000), st.characters())
def test_a_legacy_signature_with_any_character_changed_never_raises(name: str, at: int, character: str) -> None:
    good = recorded()["legacy"]["good"]
    text = good["annotations"][name]
    at %= len(text)
    bent = good | {"annotations": good["annotations"] | {name: text[:at] + character + text[at + 1 :]}}
    found = examine(simple(bent), *SIGNERS, roots=roots(recorded()))
    assert found is not None and (found.satisfies or found.problem)
