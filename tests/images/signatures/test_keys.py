"""Pinned keys: every kind that cosign signs with, both formats, and all that looks like a signature and is none."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, padding, rsa

from images.signatures import keys, signing
from images.signatures.documents import BadSignature
from images.signatures.envelopes import IN_TOTO, Candidate, pae
from tests.images.signatures.rig import DIGEST, OTHER, bundle, examine, new_key, pinned, public_pem

KEY = new_key()


def payload(digest: str = DIGEST) -> bytes:
    return json.dumps(
        {
            "critical": {
                "identity": {"docker-reference": "elsewhere.example/another/name"},
                "image": {"docker-manifest-digest": digest},
                "type": "cosign container image signature",
            },
            "optional": None,
        }
    ).encode()


def legacy(
    data: bytes, annotations: Mapping[str, str] | None = None, key: ec.EllipticCurvePrivateKey = KEY
) -> Candidate:
    signature = base64.b64encode(key.sign(data, ec.ECDSA(hashes.SHA256()))).decode()
    return Candidate("x", "simple", data, {"dev.cosignproject.cosign/signature": signature, **(annotations or {})})


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP384R1()),
        ec.generate_private_key(ec.SECP521R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=lambda key: type(key).__name__ + str(getattr(key, "key_size", "")),
)
def test_every_kind_of_key(key: signing.PrivateKey) -> None:
    candidate = bundle(signing.sign(DIGEST, key))
    found = examine(candidate, pinned(KEY, "another"), pinned(key))
    assert found is not None and found.satisfies == {("team", "release")}
    assert (found.signer, found.problem) == ("the key of release", "")
    swapped = examine(candidate, pinned(key), digest=OTHER)
    assert swapped is not None and not swapped.satisfies and "another image" in swapped.problem


def test_older_ways_of_signing() -> None:
    """Cosign before 3 used SHA-256 on every curve; and an RSA key may sign by PSS."""
    wide, modulus = ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)
    keys.check(wide.public_key(), wide.sign(b"x", ec.ECDSA(hashes.SHA256())), b"x")
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.MAX_LENGTH)
    keys.check(modulus.public_key(), modulus.sign(b"x", pss, hashes.SHA256()), b"x")
    with pytest.raises(BadSignature):
        keys.check(KEY.public_key(), KEY.sign(b"x", ec.ECDSA(hashes.SHA384())), b"x")
    with pytest.raises(BadSignature):
        keys.check(modulus.public_key(), modulus.sign(b"x", padding.PKCS1v15(), hashes.SHA512()), b"x")


def test_the_older_format_counts_whatever_repository_it_names() -> None:
    found = examine(legacy(payload()), pinned(KEY))
    assert found is not None and found.satisfies
    for wrong in (legacy(payload(OTHER)), legacy(payload(), key=new_key())):
        refused = examine(wrong, pinned(KEY))
        assert refused is not None and not refused.satisfies and refused.problem


# --- what is no signature ------------------------------------------------------------------------------------------


def changed(change: Any) -> Candidate:
    document = json.loads(signing.sign(DIGEST, KEY))
    change(document)
    return bundle(document)


def signed(statement: Any, payload_type: str = IN_TOTO) -> Candidate:
    """A statement of any kind, well signed by KEY."""
    document = json.loads(signing.sign(DIGEST, KEY))
    said = statement if isinstance(statement, bytes) else json.dumps(statement).encode()
    signature = KEY.sign(pae(payload_type, said), ec.ECDSA(hashes.SHA256()))
    document["dsseEnvelope"] = {
        "payload": base64.b64encode(said).decode(),
        "payloadType": payload_type,
        "signatures": [{"sig": base64.b64encode(signature).decode()}],
    }
    return bundle(document)


GOOD = json.loads(base64.b64decode(json.loads(signing.sign(DIGEST, KEY))["dsseEnvelope"]["payload"]))
SUBJECT = GOOD["subject"][0]


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def envelope(**fields: Any) -> Any:
    return lambda document: document["dsseEnvelope"].update(fields)


def test_the_statement_that_the_cases_below_change_is_good() -> None:
    found = examine(signed(GOOD), pinned(KEY))
    assert found is not None and found.satisfies


def test_one_of_several_subjects_is_enough() -> None:
    found = examine(signed(GOOD | {"subject": [{"digest": {"sha256": OTHER[7:]}}, SUBJECT]}), pinned(KEY))
    assert found is not None and found.satisfies


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        (signed(GOOD, "application/json"), "payload of type application/json"),
        (
            signed(GOOD | {"_type": "https://in-toto.io/Statement/v0.1"}),
            "statement of type https://in-toto.io/Statement/v0.1",
        ),
        (signed(without("predicateType")), "the type of the predicate is missing"),
        (signed(without("subject")), "without a subject"),
        (signed(GOOD | {"subject": []}), "without a subject"),
        (signed(GOOD | {"subject": {"digest": SUBJECT["digest"]}}), "without a subject"),
        (signed(GOOD | {"subject": [{"digest": {"sha512": SUBJECT["digest"]["sha256"]}}]}), "another image"),
        (signed(GOOD | {"subject": [{"name": DIGEST}]}), "another image"),
        (signed(GOOD | {"subject": [{"digest": {"sha256": SUBJECT["digest"]["sha256"].upper()}}]}), "another image"),
        (signed(b'{"_type": 1, "_type": 2}'), "a key stands twice"),
        (signed(b"[]"), "no JSON object"),
        (signed(b"[" * 100_000), "no JSON"),
        (signed(b'{"a":' * 40 + b"1" + b"}" * 40), "nested more than 32 levels"),
        (signed(b'{"a": NaN}'), "NaN"),
        (signed(b'{"a": ' + b"9" * 5000 + b"}"), "no JSON"),
        (signed(b"\xff\xfe"), "no JSON"),
        (changed(lambda document: document.update(mediaType="application/json")), "bundle of type application/json"),
        (changed(lambda document: document.pop("dsseEnvelope")), "signs a file"),
        (changed(lambda document: document.update(dsseEnvelope=[])), "signs a file"),
        (changed(envelope(signatures=[])), "exactly one signature"),
        (changed(lambda d: d["dsseEnvelope"]["signatures"].append(d["dsseEnvelope"]["signatures"][0])), "exactly one"),
        (changed(envelope(signatures=[{"sig": "!"}])), "the signature is no base64"),
        (changed(envelope(signatures=[{"sig": ""}])), "the signature is missing"),
        (changed(envelope(signatures=[{"sig": "AAAA"}])), "is not by this key"),
        (changed(envelope(payload=7)), "the payload is missing"),
        (changed(envelope(payloadType="\ud800")), "is no text"),
        (changed(envelope(payload=base64.b64encode(b"{}").decode())), "statement of type None"),
        (bundle(signing.sign(DIGEST, KEY)[:-20]), "no JSON"),
        (bundle(b""), "no JSON"),
        (bundle(b" " * (256 * 1024 + 1)), "more than 256 KiB"),
        (legacy(b"{}"), "something of type None"),
        (legacy(payload().replace(b"container", b"blob")), "cosign blob image signature"),
        (legacy(payload(), {"dev.cosignproject.cosign/signature": "AAAA"}), "is not by this key"),
        (Candidate("x", "simple", payload(), {}), "the signature is missing"),
        (legacy(b" " * 70_000), "more than 64 KiB"),
        (legacy(payload(), {"dev.sigstore.cosign/chain": "x" * 70_000}), "more than 64 KiB"),
        (legacy(payload(), {"dev.sigstore.cosign/bundle": "[]"}), "no JSON object"),
        (legacy(payload(), {"dev.sigstore.cosign/bundle": "{}"}), "without time and index"),
        (Candidate("x", "bundle", problem="is missing in the registry"), "is missing in the registry"),
    ],
    ids=range(39),
)
def test_what_is_no_signature_is_told_and_never_raises(candidate: Candidate, told: str) -> None:
    found = examine(candidate, pinned(KEY))
    assert found is not None and not found.satisfies
    assert told in found.problem and len(found.problem) <= 480
    assert found.problem.isprintable()


def test_an_attestation_is_no_signature_and_no_bad_one() -> None:
    assert examine(signed(GOOD | {"predicateType": "https://slsa.dev/provenance/v1"}), pinned(KEY)) is None


@pytest.mark.parametrize(
    ("pem", "told"),
    [
        ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "no public key as PEM"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "name its authority under certificate"),
        (public_pem(KEY) * 2, "one public key and nothing else"),
        (public_pem(ec.generate_private_key(ec.SECP256K1())), "secp256k1 is none of P-256, P-384 and P-521"),
        (public_pem(rsa.generate_private_key(65537, 1024)), "must have from 2048 to 8192 bits, and it has 1024"),
        (
            dsa.generate_private_key(2048)
            .public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode(),
            "none of ECDSA, RSA and Ed25519",
        ),
    ],
    ids=range(6),
)
def test_a_key_that_cannot_be_one_is_told_where_it_counts(pem: str, told: str) -> None:
    wrong = pinned(KEY).model_copy(update={"key": pem, "name": "wrong"})
    found = examine(bundle(signing.sign(DIGEST, KEY)), wrong)
    assert found is not None and told in found.problem and found.problem.startswith("wrong cannot be checked: ")
    beside = examine(bundle(signing.sign(DIGEST, KEY)), wrong, pinned(KEY))
    assert beside is not None and beside.satisfies == {("team", "release")}


def test_changing_any_part_that_was_signed_is_seen() -> None:
    document = json.loads(signing.sign(DIGEST, KEY))
    said = bytearray(base64.b64decode(document["dsseEnvelope"]["payload"]))
    for at in range(0, len(said), 7):
        other = copy.deepcopy(document)
        bent = bytes(said[:at]) + bytes([said[at] ^ 1]) + bytes(said[at + 1 :])
        other["dsseEnvelope"]["payload"] = base64.b64encode(bent).decode()
        found = examine(bundle(other), pinned(KEY))
        assert found is None or not found.satisfies
