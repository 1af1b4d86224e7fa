"""Whether a text can be a public key or certificates as PEM at all: the right blocks, and each of them whole. For the
door, where a KernelCachePolicy is told of a wrong or cut paste.

Without the library that verifies, which is not for planning: what a key or certificate says is looked at where images
are verified (`images.signatures`). Nothing is refused here that is taken there.
"""

from __future__ import annotations

import base64
import binascii
import re

_BODY = r"((?:[^-]|-(?!----))*)"  # up to the next BEGIN or END, so that the whole text is read once
_PUBLIC = re.compile(rf"-----BEGIN ((?:RSA )?PUBLIC KEY)-----{_BODY}-----END \1-----")
_CERTIFICATE = re.compile(rf"-----BEGIN ((?:X509 )?CERTIFICATE)-----{_BODY}-----END \1-----")
_SEQUENCE = 0x30  # the tag of everything that is read here (X.690, 8.9)


def public_key_problem(pem: str) -> str:
    """'' or why it cannot be one public key, in the verifier's words but for a private one."""
    if "CERTIFICATE" in pem:
        return "it is a certificate: give its public key, or name its authority under certificate"
    if "PRIVATE KEY" in pem:
        return "it is a private key, which nobody but its owner may see: give the public one, and replace the pair"
    if pem.count("-----BEGIN ") != 1:
        return "it must be one public key and nothing else"
    found = _PUBLIC.search(pem)
    if found is None:
        return "it is no public key as PEM (-----BEGIN PUBLIC KEY-----)"
    return "" if _whole(found[2]) else "it is no public key as PEM: what lies between BEGIN and END is not whole"


def certificates_problem(pem: str) -> str:
    """'' or why no certificate can be in it. One that is whole suffices here: the verifier passes over some of what is
    wrong beside it, and says itself what it does not.
    """
    bodies = [body for _, body in _CERTIFICATE.findall(pem)]
    if any(map(_whole, bodies)):
        return ""
    if bodies:
        return "they are no certificates as PEM: what lies between BEGIN and END is not whole"
    if "PRIVATE KEY" in pem:
        return "it is a private key, which nobody but its owner may see: give certificates, and replace the pair"
    return "they are no certificates as PEM (-----BEGIN CERTIFICATE-----)"


def _whole(body: str) -> bool:
    """Whether it is the base64 of one DER sequence from its first byte to its last."""
    if ":" in body:
        return True  # headers (RFC 1421), which nobody writes and readers may know
    text = "".join(body.split()).rstrip("=")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return False
    if len(data) < 2 or data[0] != _SEQUENCE:
        return False
    if data[1] < 0x80:
        return len(data) == 2 + data[1]
    size = data[1] & 0x7F
    return len(data) == 2 + size + int.from_bytes(data[2 : 2 + size], "big")
