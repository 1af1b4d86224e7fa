"""Keyless signatures: by an identity that was vouched for while it signed, with proofs that need no network.

For `verification`. A bundle goes through sigstore's verifier; a legacy signature, which has the log's promise but no
proof of inclusion, is checked here step by step. Then the policy's issuer and identity must mean the certificate.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from cryptography import x509
from sigstore.models import Bundle

from crds.kernelcachepolicy import Keyless
from images.signatures import certificates, keys, limits
from images.signatures.documents import BadSignature, decoded, member, read_json, shown
from images.signatures.envelopes import IN_TOTO, Promise, Signed, pae
from images.signatures.trustedroot import TrustedRoot


class _Anybody:
    """sigstore's question whom the certificate may name; that is asked when all the rest is sound."""

    def verify(self, cert: x509.Certificate) -> None:
        pass


def check(wanted: Keyless, root: TrustedRoot, signed: Signed) -> str:
    """Who signed, in words. Raises BadSignature where it is not whom the policy wants."""
    if not signed.certificates:
        raise BadSignature("is by a key, not by an identity")
    leaf = certificates.load(signed.certificates[0])
    if signed.bundle:
        _check_bundle(root, leaf, signed)
    else:
        _check_legacy(root, leaf, signed)
    vouching, found = certificates.issuer(leaf), certificates.names(leaf)
    if not certificates.means(wanted.issuer, wanted.issuer_pattern, vouching):
        raise BadSignature(f"is by {_told(found)}, for whom {shown(vouching)} vouched and not the issuer demanded")
    for name in found:
        if certificates.means(wanted.identity, wanted.identity_pattern, name):
            return f"{shown(name)} (by {shown(vouching)})"
    raise BadSignature(f"is by {_told(found)}, who is not the identity demanded")


def _check_bundle(root: TrustedRoot, leaf: x509.Certificate, signed: Signed) -> None:
    try:
        bundle = Bundle.from_json(signed.bundle)
        payload_type, payload = root.verifier.verify_dsse(bundle, _Anybody())
    except Exception as wrong:  # its parsers raise many kinds on hostile input, and all mean that it does not verify
        raise BadSignature(f"does not verify: {shown(wrong)}") from None
    if payload_type != IN_TOTO or pae(payload_type, payload) != signed.message or bundle.signing_certificate != leaf:
        raise BadSignature("means different things to different readers")
    # sigstore takes authorities for good that the trusted root has ended since.
    entry = read_json(signed.bundle, limits.BUNDLE, "the bundle")["verificationMaterial"]["tlogEntries"][0]
    times = [at for token in signed.timestamps if (at := root.stamped(token, signed.signature)) is not None]
    if entry.get("inclusionPromise") and (integrated := int(entry.get("integratedTime") or 0)):
        times.append(datetime.fromtimestamp(integrated, UTC))
    if not times:
        raise BadSignature("has no time that a log or a time stamp of the trusted root vouches for")
    for at in times:
        certificates.chain(leaf, (), root.anchors(at), at)


def _check_legacy(root: TrustedRoot, leaf: x509.Certificate, signed: Signed) -> None:
    if signed.promise is None:
        raise BadSignature("has no log entry with it")
    at = root.logged(signed.promise)
    above = certificates.chain(leaf, (), root.anchors(at), at)
    certificates.may_sign(leaf)
    root.check_embedded(leaf, above[0])
    try:
        keys.check(keys.checked_key(leaf.public_key()), signed.signature, signed.message)
    except keys.BadKey as wrong:
        raise BadSignature(f"has a certificate whose key does not count: {wrong}") from None
    _same(signed.promise, leaf, signed)


def _same(promise: Promise, leaf: x509.Certificate, signed: Signed) -> None:
    """Whether the log's entry (hashedrekord 0.0.1) is of this signature, not of another."""
    entry = read_json(promise.entry, limits.ANNOTATION, "the log entry")
    if entry.get("kind") != "hashedrekord" or entry.get("apiVersion") != "0.0.1":
        raise BadSignature("has a log entry of another kind")
    hashed = member(entry, "spec", "data", "hash")
    logged = decoded(member(entry, "spec", "signature", "publicKey", "content"), "the key in the log entry")
    try:
        same = (
            member(hashed, "algorithm") == "sha256"
            and member(hashed, "value") == hashlib.sha256(signed.message).hexdigest()
            and decoded(member(entry, "spec", "signature", "content"), "the signature in the log entry")
            == signed.signature
            and x509.load_pem_x509_certificate(logged) == leaf
        )
    except ValueError:
        same = False
    if not same:
        raise BadSignature("has a log entry of another signature")


def _told(names: list[str]) -> str:
    return shown(", ".join(names[:2]) + (", …" if len(names) > 2 else ""))
