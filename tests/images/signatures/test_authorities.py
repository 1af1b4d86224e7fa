"""Signatures by certificates of one's own authority: chain, purpose, names, and when they must have been valid."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from crds.kernelcachepolicy import Signer
from images.signatures import signing
from images.signatures.envelopes import Candidate
from tests.images.signatures.rig import DIGEST, NOW, ROOT, Authority, bundle, examine, new_key, recorded, roots

AUTHORITY = Authority.new()
KEY = new_key()
URI = x509.UniformResourceIdentifier("https://ci.example/kernels")


def signer(authority: Authority | str = AUTHORITY, *, rooted: bool = False, **fields: Any) -> Signer:
    wanted = fields or {"identity": URI.value}
    pem = authority if isinstance(authority, str) else authority.pem
    root = {"trustedRoot": {"name": ROOT[0], "key": ROOT[1]}} if rooted else {}
    return Signer.model_validate({"name": "ci", "certificate": {"authorities": pem, **wanted, **root}})


def signed(
    authority: Authority = AUTHORITY, key: signing.PrivateKey = KEY, *names: x509.GeneralName, **changes: Any
) -> Candidate:
    return bundle(signing.sign(DIGEST, key, authority.issue(key, *(names or (URI,)), **changes)))


@pytest.mark.parametrize("key", [KEY, rsa.generate_private_key(65537, 2048)], ids=["ecdsa", "rsa"])
def test_a_good_one(key: signing.PrivateKey) -> None:
    found = examine(signed(AUTHORITY, key), signer())
    assert found is not None and found.satisfies == {("team", "ci")}, found
    assert found.signer == "https://ci.example/kernels (by the authority of ci)"


@pytest.mark.parametrize(
    "name", [x509.RFC822Name("ci@example.com"), x509.DNSName("ci.example"), URI], ids=lambda name: type(name).__name__
)
def test_names_of_every_kind(name: Any) -> None:
    found = examine(signed(AUTHORITY, KEY, name), signer(identity=name.value))
    assert found is not None and found.satisfies, found


def test_the_root_alone_is_enough_where_the_signature_brings_what_is_between() -> None:
    document = json.loads(signing.sign(DIGEST, KEY, AUTHORITY.issue(KEY, URI)))
    leaf = document["verificationMaterial"].pop("certificate")
    between = base64.b64encode(AUTHORITY.between.public_bytes(serialization.Encoding.DER)).decode()
    document["verificationMaterial"]["x509CertificateChain"] = {"certificates": [leaf, {"rawBytes": between}]}
    only = AUTHORITY.root.public_bytes(serialization.Encoding.PEM).decode()
    found = examine(bundle(document), signer(only))
    assert found is not None and found.satisfies, found
    missing = examine(signed(), signer(only))
    assert missing is not None and "no trusted authority issued" in missing.problem


@pytest.mark.parametrize(
    ("candidate", "asked", "told"),
    [
        (signed(Authority.new()), signer(), "no trusted authority issued"),
        (signed(code=False), signer(), "not for signing code"),
        (signed(hours=-1), signer(), "has a certificate valid from"),
        (signed(), signer(identity="https://ci.example/"), "who is not the identity demanded"),
        (signed(), signer(identityPattern=r"^https://ci\.example$"), "who is not the identity demanded"),
        (
            signed(AUTHORITY, KEY, x509.DNSName("ci.example.attacker.org")),
            signer(identityPattern=r"^ci\.example$"),
            "demanded",
        ),
        (bundle(signing.sign(DIGEST, KEY)), signer(), "by a key without a certificate"),
        (bundle(signing.sign(DIGEST, new_key(), AUTHORITY.issue(KEY, URI))), signer(), "is not by this key"),
        (signed(), signer("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "no certificates as PEM"),
        (bundle(signing.sign(DIGEST, KEY, AUTHORITY.between)), signer(), "has a certificate"),
    ],
    ids=range(10),
)
def test_wrong_ones(candidate: Candidate, asked: Signer, told: str) -> None:
    found = examine(candidate, asked)
    assert found is not None and not found.satisfies and told in found.problem, found


def test_without_a_time_stamp_it_must_be_valid_now() -> None:
    start = NOW - 24 * 3600
    for hours, good in ((-1, False), (12, True), (47, True), (49, False)):
        found = examine(signed(hours=24), signer(), now=start + hours * 3600)
        assert found is not None and bool(found.satisfies) is good, (hours, found)


def test_a_time_stamp_says_when_it_signed() -> None:
    """The virtual Sigstore's own certificates, taken as those of an authority of one's own, long after they ended."""
    made = recorded()
    authorities = "".join(
        f"-----BEGIN CERTIFICATE-----\n{each['rawBytes']}\n-----END CERTIFICATE-----\n"
        for each in made["trustedRoot"]["certificateAuthorities"][0]["certChain"]["certificates"]
    )
    asked: dict[str, Any] = {"identity": "alice@example.com"}
    candidate = bundle(made["bundles"]["good"])
    later = NOW + 365 * 24 * 3600
    stamped = examine(candidate, signer(authorities, rooted=True, **asked), roots=roots(made), now=later)
    assert stamped is not None and stamped.satisfies, stamped
    unasked = examine(candidate, signer(authorities, **asked), now=later)
    assert unasked is not None and "has a certificate valid from" in unasked.problem
    untimed = bundle(made["bundles"]["expired"])
    unstamped = examine(untimed, signer(authorities, rooted=True, **asked), roots=roots(made), now=later)
    assert unstamped is not None and not unstamped.satisfies
    swapped = copy.deepcopy(made["bundles"]["good"])
    material = "verificationMaterial"
    swapped[material]["timestampVerificationData"] = made["bundles"]["tiles"][material]["timestampVerificationData"]
    another = examine(bundle(swapped), signer(authorities, rooted=True, **asked), roots=roots(made), now=later)
    assert another is not None and not another.satisfies
