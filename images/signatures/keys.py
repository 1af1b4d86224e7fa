"""Public keys: which kinds count, and how each of them signs.

For pinned keys and for the keys in certificates. A kind of key has the few ways of signing that cosign has used for it:
ECDSA with the hash of its curve or, as older releases did on every curve, with SHA-256; RSA as PKCS #1 v1.5 or PSS.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from images.signatures.documents import BadSignature

PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey

_RSA_BITS = (2048, 8192)
_CURVES: dict[str, tuple[hashes.HashAlgorithm, ...]] = {
    "secp256r1": (hashes.SHA256(),),
    "secp384r1": (hashes.SHA384(), hashes.SHA256()),
    "secp521r1": (hashes.SHA512(), hashes.SHA256()),
}


class BadKey(ValueError):
    """Why a key cannot be one of a signer's."""


def load_public_key(pem: str) -> PublicKey:
    """One public key from PEM. Raises BadKey with what to give instead."""
    if "CERTIFICATE" in pem:
        raise BadKey("it is a certificate: give its public key, or name its authority under certificate")
    if pem.count("-----BEGIN ") != 1:
        raise BadKey("it must be one public key and nothing else")
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise BadKey("it is no public key as PEM (-----BEGIN PUBLIC KEY-----)") from None
    return checked_key(key)


def checked_key(key: PublicKeyTypes) -> PublicKey:
    """The key, if it is of a kind and size that counts. Raises BadKey."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        if key.curve.name not in _CURVES:
            raise BadKey(f"its curve {key.curve.name} is none of P-256, P-384 and P-521")
        return key
    if isinstance(key, rsa.RSAPublicKey):
        least, most = _RSA_BITS
        if not least <= key.key_size <= most:
            raise BadKey(f"an RSA key must have from {least} to {most} bits, and it has {key.key_size}")
        return key
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    raise BadKey("it is none of ECDSA, RSA and Ed25519")


def check(key: PublicKey, signature: bytes, data: bytes) -> None:
    """Raises BadSignature unless `signature` is the key's over `data`."""
    for attempt in _ways(key, signature, data):
        with suppress(InvalidSignature):
            attempt()
            return
    raise BadSignature("is not by this key")


def _ways(key: PublicKey, signature: bytes, data: bytes) -> list[Callable[[], None]]:
    if isinstance(key, ec.EllipticCurvePublicKey):
        return [partial(key.verify, signature, data, ec.ECDSA(each)) for each in _CURVES[key.curve.name]]
    if isinstance(key, rsa.RSAPublicKey):
        sha256 = hashes.SHA256()
        pss = padding.PSS(padding.MGF1(sha256), padding.PSS.AUTO)
        return [partial(key.verify, signature, data, each, sha256) for each in (padding.PKCS1v15(), pss)]
    return [partial(key.verify, signature, data)]
