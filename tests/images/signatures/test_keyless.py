"""Keyless signatures of a recorded virtual Sigstore: Rekor v1 and v2, bundles and legacy ones, good and wrong ones."""

from __future__ import annotations

import base64
import copy
import json
import socket
from importlib.resources import files
from typing import Any

import pytest

from crds.kernelcachepolicy import Signer
from images.signatures.trustedroot import BadTrustedRoot, TrustedRoot
from planning.caches.trust import Signature
from tests.images.signatures.rig import ROOT, bundle, examine, keyless, new_key, pinned, recorded, roots, simple

ALICE = keyless()
PIPELINE = keyless(
    issuer="https://token.actions.githubusercontent.com",
    identity=None,
    identityPattern=r"^https://github\.com/acme/[a-z]+/\.github/workflows/.*@refs/heads/main$",
)


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("verification asked the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def look(form: str, name: str, *signers: Signer, made: dict[str, Any] | None = None) -> Signature | None:
    made = made or recorded()
    candidate = bundle(made["bundles"][name]) if form == "bundle" else simple(made["legacy"][name])
    return examine(candidate, *signers, roots=roots(made))


@pytest.mark.parametrize(
    ("form", "name", "signer", "by"),
    [
        ("bundle", "good", ALICE, "alice@example.com (by https://accounts.example.com)"),
        ("bundle", "tiles", ALICE, "alice@example.com (by https://accounts.example.com)"),
        ("bundle", "subjects", ALICE, "alice@example.com (by https://accounts.example.com)"),
        ("legacy", "good", ALICE, "alice@example.com (by https://accounts.example.com)"),
        (
            "bundle", "workflow", PIPELINE,
            "https://github.com/acme/kernels/.github/workflows/build.yml@refs/heads/main "
            "(by https://token.actions.githubusercontent.com)",
        ),
    ],
)  # fmt: skip
def test_good_ones(form: str, name: str, signer: Signer, by: str) -> None:
    found = look(form, name, signer)
    assert found is not None and found.satisfies == {("team", "alice")}, found
    assert found.signer == by


@pytest.mark.parametrize(
    ("form", "name", "told"),
    [
        ("bundle", "look-alike", "is by alice@example.com.attacker.org, who is not the identity demanded"),
        ("bundle", "other-issuer", "https://accounts.example.com.attacker.org vouched and not the issuer demanded"),
        ("bundle", "workflow", "vouched and not the issuer demanded"),
        ("bundle", "other-image", "is over another image (sha256:0123456789abcdef"),
        ("bundle", "payload-type", "payload of type application/json"),
        ("bundle", "expired", "does not verify"),
        ("bundle", "untimed-tiles", "does not verify"),
        ("bundle", "unseen", "failed to verify SCT"),
        ("bundle", "server", "does not verify"),
        ("bundle", "two-entries", "expected exactly one log entry"),
        ("bundle", "no-entry", "expected exactly one log entry"),
        ("bundle", "stranger", "does not verify"),
        ("legacy", "look-alike", "is by alice@example.com.attacker.org, who is not the identity demanded"),
        ("legacy", "other-image", "is over another image"),
        ("legacy", "expired", "has a certificate valid from"),
        ("legacy", "unseen", "no log of certificates has seen"),
        ("legacy", "server", "not for signing code"),
        ("legacy", "stranger", "in a log that the trusted root does not know"),
    ],
)
def test_each_wrong_one_is_refused_for_its_own_reason(form: str, name: str, told: str) -> None:
    found = look(form, name, ALICE)
    assert found is not None and not found.satisfies, found
    assert told in found.problem


def test_an_attestation_counts_for_nothing() -> None:
    assert look("bundle", "attestation", ALICE) is None


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"identity": "alice@example.com"}, True),
        ({"identity": "alice@example"}, False),
        ({"identity": "ALICE@example.com"}, False),
        ({"identity": None, "identityPattern": r"^[a-z]+@example\.com$"}, True),
        ({"identity": None, "identityPattern": r"^alice@example$"}, False),
        ({"identity": None, "identityPattern": r"^alice|nobody$"}, False),
        ({"identity": None, "identityPattern": r"^lice@example\.com$"}, False),
        ({"issuer": "https://accounts.example.com/"}, False),
        ({"issuer": None, "issuerPattern": r"^https://accounts\.example\.com$"}, True),
        ({"issuer": None, "issuerPattern": r"^https://accounts$"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["bundle", "legacy"])
def test_whom_a_policy_means(form: str, fields: dict[str, Any], meant: bool) -> None:
    found = look(form, "good", keyless(**fields))
    assert found is not None and bool(found.satisfies) is meant


def test_an_unanchored_look_alike_does_not_fit_a_pattern() -> None:
    found = look("bundle", "look-alike", keyless(identity=None, identityPattern=r"^alice@example\.com$"))
    assert found is not None and not found.satisfies


def test_a_slow_pattern_on_a_hostile_name_is_ended_and_others_still_count() -> None:
    slow = keyless(identity=None, identityPattern=r"^([a-z]+)+@example\.com$")
    found = look("bundle", "slow-name", slow, keyless().model_copy(update={"name": "exactly"}))
    assert found is not None and not found.satisfies
    assert "takes longer than 0.25 s" in found.problem
    beside = look("bundle", "good", slow)
    assert beside is not None and beside.satisfies


def test_a_key_is_no_identity_and_an_identity_no_key() -> None:
    found = look("bundle", "good", pinned(new_key()))
    assert found is not None and found.problem == "is not by this key"


# --- bent afterwards -----------------------------------------------------------------------------------------------


def bent(form: str, *path: str | int, by: Any) -> dict[str, Any]:
    made = copy.deepcopy(recorded())
    at = made["bundles" if form == "bundle" else "legacy"]["good"]
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = by(at[path[-1]]) if callable(by) else by
    return made


def flipped(text: str) -> str:
    raw = bytearray(base64.b64decode(text))
    raw[len(raw) // 2] ^= 1
    return base64.b64encode(bytes(raw)).decode()


def in_json(*path: str, by: Any) -> Any:
    def change(text: str) -> str:
        document = json.loads(text)
        at = document
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = by(at[path[-1]])
        return json.dumps(document)

    return change


MATERIAL = "verificationMaterial"
PROMISE = ("annotations", "dev.sigstore.cosign/bundle")


@pytest.mark.parametrize(
    ("form", "path", "by"),
    [
        ("bundle", ("dsseEnvelope", "signatures", 0, "sig"), flipped),
        ("bundle", (MATERIAL, "certificate", "rawBytes"), flipped),
        ("bundle", (MATERIAL, "tlogEntries", 0, "canonicalizedBody"), flipped),
        ("bundle", (MATERIAL, "tlogEntries", 0, "inclusionProof", "rootHash"), flipped),
        ("bundle", (MATERIAL, "tlogEntries", 0, "inclusionPromise", "signedEntryTimestamp"), flipped),
        ("bundle", (MATERIAL, "tlogEntries", 0, "integratedTime"), lambda at: str(int(at) + 1)),
        ("bundle", (MATERIAL, "tlogEntries", 0, "inclusionProof", "checkpoint", "envelope"), "not a checkpoint"),
        ("bundle", (MATERIAL, "tlogEntries", 0, "inclusionProof"), None),
        ("bundle", (MATERIAL, "tlogEntries"), lambda _: recorded()["bundles"]["subjects"][MATERIAL]["tlogEntries"]),
        ("bundle", ("dsseEnvelope",), lambda _: recorded()["bundles"]["tiles"]["dsseEnvelope"]),
        ("legacy", ("annotations", "dev.cosignproject.cosign/signature"), flipped),
        ("legacy", PROMISE, in_json("SignedEntryTimestamp", by=flipped)),
        ("legacy", PROMISE, in_json("Payload", "body", by=flipped)),
        ("legacy", PROMISE, in_json("Payload", "integratedTime", by=lambda at: at + 1)),
        ("legacy", PROMISE, in_json("Payload", "integratedTime", by=lambda _: 2**60)),
        ("legacy", PROMISE, in_json("Payload", "logIndex", by=lambda at: at + 1)),
        ("legacy", PROMISE, in_json("Payload", "logID", by=lambda _: "00" * 32)),
        ("legacy", PROMISE, lambda _: recorded()["legacy"]["look-alike"]["annotations"]["dev.sigstore.cosign/bundle"]),
        (
            "legacy", ("annotations", "dev.sigstore.cosign/certificate"),
            lambda _: recorded()["legacy"]["look-alike"]["annotations"]["dev.sigstore.cosign/certificate"],
        ),
        ("legacy", ("annotations", "dev.sigstore.cosign/certificate"), lambda pem: pem[:200]),
    ],
    ids=range(20),
)  # fmt: skip
def test_what_was_bent_afterwards_is_refused(form: str, path: tuple[str | int, ...], by: Any) -> None:
    found = look(form, "good", ALICE, made=bent(form, *path, by=by))
    assert found is not None and not found.satisfies and found.problem


def test_a_promise_alone_or_none_at_all_does_not_do_for_a_legacy_signature() -> None:
    made = copy.deepcopy(recorded())
    del made["legacy"]["good"]["annotations"]["dev.sigstore.cosign/bundle"]
    found = look("legacy", "good", ALICE, made=made)
    assert found is not None and found.problem == "has no log entry with it"


# --- the trusted root ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["sigstore.dev", "sigstage.dev"])
def test_the_trusted_roots_that_sigstore_ships_are_read(server: str) -> None:
    raw = (files("sigstore") / "_store" / f"https%3A%2F%2Ftuf-repo-cdn.{server}" / "trusted_root.json").read_bytes()
    root = TrustedRoot.parse(raw)
    assert root.authorities and root.logs and root.certificate_logs
    assert root.verifier is root.verifier


@pytest.mark.parametrize("part", ["certificateAuthorities", "tlogs", "ctlogs"])
@pytest.mark.parametrize("form", ["bundle", "legacy"])
def test_what_the_trusted_root_lacks_does_not_count(form: str, part: str) -> None:
    made = copy.deepcopy(recorded())
    made["trustedRoot"][part] = []
    found = look(form, "good", ALICE, made=made)
    assert found is not None and not found.satisfies


@pytest.mark.parametrize("form", ["bundle", "legacy"])
def test_an_authority_that_had_ended_before_does_not_count(form: str) -> None:
    made = copy.deepcopy(recorded())
    for each in made["trustedRoot"]["certificateAuthorities"]:
        each["validFor"] = {"start": "2020-01-01T00:00:00Z", "end": "2021-01-01T00:00:00Z"}
    found = look(form, "good", ALICE, made=made)
    assert found is not None and "had no authority" in found.problem


def test_a_log_that_had_ended_before_does_not_count() -> None:
    made = copy.deepcopy(recorded())
    for each in made["trustedRoot"]["tlogs"]:
        each["publicKey"]["validFor"]["end"] = "2021-01-01T00:00:00Z"
    found = look("legacy", "good", ALICE, made=made)
    assert found is not None and "does not know for that time" in found.problem


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"{}", b'{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1", "tlogs": 7}',
        b'{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1", "tlogs": [{}]}',
        b'{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1", "certificateAuthorities": [{}]}',
        b" " * (1024 * 1024 + 1),
    ],
    ids=range(7),
)  # fmt: skip
def test_what_is_no_trusted_root_is_told(raw: bytes) -> None:
    with pytest.raises(BadTrustedRoot):
        TrustedRoot.parse(raw)
    found = examine(bundle(recorded()["bundles"]["good"]), ALICE, roots={ROOT: raw})
    assert found is not None and "key trusted_root.json of ConfigMap sigstore: " in found.problem


def test_a_trusted_root_that_is_not_there_is_told() -> None:
    found = examine(bundle(recorded()["bundles"]["good"]), ALICE)
    assert found is not None and found.problem == (
        "alice cannot be checked: ConfigMap sigstore in berth-system has no key trusted_root.json, "
        "where its trusted root should be"
    )
