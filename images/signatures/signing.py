"""Signs an image with a key, as cosign 3 does: a Sigstore bundle in a manifest that refers to the image.

For `berth cache sign`. No log and no time stamp are asked: whoever needs them signs with cosign itself, and both look
the same to `verify`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from images.descriptor import OCI_MANIFEST
from images.signatures import keys
from images.signatures.discovery import PREDICATE_KEY
from images.signatures.envelopes import BUNDLE_TYPE, IN_TOTO, PREDICATE, pae, statement

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey

_EMPTY = b"{}"
_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}


@dataclass(frozen=True)
class Referring:
    """What must be pushed: the blobs by digest, then the manifest."""

    manifest: bytes
    blobs: Mapping[str, bytes]


def load_private_key(pem: bytes, password: bytes | None) -> PrivateKey:
    """A private key from PEM. Raises keys.BadKey with what to do."""
    if b"ENCRYPTED SIGSTORE PRIVATE KEY" in pem or b"ENCRYPTED COSIGN PRIVATE KEY" in pem:
        raise keys.BadKey(
            "it is a key in cosign's own format: sign with cosign sign --key, "
            "or make a key that both read by openssl ecparam -name prime256v1 -genkey (and cosign import-key-pair)"
        )
    try:
        key = serialization.load_pem_private_key(pem, password)
    except TypeError:
        raise keys.BadKey(
            "it is encrypted, and no password was given"
            if password is None
            else "it is not encrypted, and a password was given"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise keys.BadKey("it is no private key as PEM, or the password is another") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey):
        raise keys.BadKey("it is none of ECDSA, RSA and Ed25519")
    keys.checked_key(key.public_key())
    return key


def load_certificate(pem: bytes, key: PrivateKey) -> x509.Certificate:
    """The signer's certificate from PEM. Raises keys.BadKey where it is none, or of another key."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        same = certificate.public_key() == key.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise keys.BadKey("it is no certificate as PEM") from None
    if not same:
        raise keys.BadKey("it is the certificate of another key")
    return certificate


def sign(digest: str, key: PrivateKey, certificate: x509.Certificate | None = None) -> bytes:
    """A bundle with the key's signature over the image `digest`."""
    payload = json.dumps(statement(digest), separators=(",", ":")).encode()
    if certificate is None:
        der = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        material: dict[str, Any] = {"publicKey": {"hint": _base64(hashlib.sha256(der).digest())}}
    else:
        material = {"certificate": {"rawBytes": _base64(certificate.public_bytes(serialization.Encoding.DER))}}
    return json.dumps(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": material,
            "dsseEnvelope": {
                "payload": _base64(payload),
                "payloadType": IN_TOTO,
                "signatures": [{"sig": _base64(_signature(key, pae(IN_TOTO, payload)))}],
            },
        },
        separators=(",", ":"),
    ).encode()


def referring(bundle: bytes, media_type: str, digest: str, size: int, created: str) -> Referring:
    """The manifest that ties a bundle to an image, given by its descriptor. `created` is a time of RFC 3339."""
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": BUNDLE_TYPE,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": _digest(_EMPTY), "size": len(_EMPTY)},
        "layers": [{"mediaType": BUNDLE_TYPE, "digest": _digest(bundle), "size": len(bundle)}],
        "subject": {"mediaType": media_type, "digest": digest, "size": size},
        "annotations": {
            "org.opencontainers.image.created": created,
            "dev.sigstore.bundle.content": "dsse-envelope",
            PREDICATE_KEY: PREDICATE,
        },
    }
    return Referring(
        json.dumps(manifest, separators=(",", ":")).encode(), {_digest(each): each for each in (_EMPTY, bundle)}
    )


def _signature(key: PrivateKey, data: bytes) -> bytes:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(_HASHES[key.curve.name]))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(data, padding.PKCS1v15(), hashes.SHA256())
    return key.sign(data)


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _digest(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"
