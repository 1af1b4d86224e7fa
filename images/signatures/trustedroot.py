"""What a trusted_root.json says: which authorities, logs and time stamps count, and when each of them did.

For keyless signatures, and for time stamps of others. The file is Sigstore's own (media type trustedroot version 0.1)
and comes from the platform's engineer; nothing is ever fetched. What it proves: that a log saw something, and when
something was.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.certificate_transparency import LogEntryType, SignedCertificateTimestamp
from rfc3161_client import VerificationError as NotStamped
from rfc3161_client import VerifierBuilder, decode_timestamp_response
from sigstore.models import TrustedRoot as SigstoreRoot
from sigstore.verify import Verifier

from images.signatures import keys, limits
from images.signatures.documents import BadSignature, decoded, member, read_json, shown
from images.signatures.envelopes import Promise

MEDIA_TYPE = "application/vnd.dev.sigstore.trustedroot+json;version=0.1"


class BadTrustedRoot(ValueError):
    """Why a file is no trusted root."""


@dataclass(frozen=True)
class Window:
    """When something counted."""

    start: datetime
    end: datetime | None

    def __contains__(self, at: datetime) -> bool:
        return self.start <= at and (self.end is None or at <= self.end)


@dataclass(frozen=True)
class Authority:
    """A chain, the issuing certificate first and the root last."""

    certificates: tuple[x509.Certificate, ...]
    window: Window


@dataclass(frozen=True)
class Log:
    """A log's key. It is known by the hash of it (RFC 6962, 3.2)."""

    key: keys.PublicKey
    window: Window


@dataclass(frozen=True)
class TrustedRoot:
    """A trusted root as it was read."""

    raw: bytes
    authorities: tuple[Authority, ...]
    logs: Mapping[bytes, Log]
    certificate_logs: Mapping[bytes, Log]
    time_stampers: tuple[Authority, ...]

    @classmethod
    def parse(cls, raw: bytes) -> TrustedRoot:
        """Raises BadTrustedRoot."""
        try:
            document = read_json(raw, limits.TRUSTED_ROOT, "the trusted root")
            if (kind := document.get("mediaType")) != MEDIA_TYPE:
                raise BadTrustedRoot(f"its mediaType is {shown(kind)}, not {MEDIA_TYPE}")
            return cls(
                raw=raw,
                authorities=_authorities(document.get("certificateAuthorities")),
                logs=_logs(document.get("tlogs")),
                certificate_logs=_logs(document.get("ctlogs")),
                time_stampers=_authorities(document.get("timestampAuthorities")),
            )
        except (BadSignature, keys.BadKey, KeyError, TypeError, AttributeError) as wrong:
            raise BadTrustedRoot(f"it is no trusted root: {shown(wrong)}") from None

    @cached_property
    def verifier(self) -> Verifier:
        """sigstore's own verifier, which asks nobody. Raises BadTrustedRoot."""
        try:
            # It reads files only, and this one must not need a disk.
            with open(os.memfd_create("trusted_root.json"), "wb") as file:
                file.write(self.raw)
                file.flush()
                return Verifier(trusted_root=SigstoreRoot.from_file(f"/proc/self/fd/{file.fileno()}"))
        except Exception as wrong:  # its models raise many kinds, and all mean that the file does not serve
            raise BadTrustedRoot(f"it does not serve for keyless signatures: {shown(wrong)}") from None

    def anchors(self, at: datetime) -> list[x509.Certificate]:
        """The certificates that could issue others at that moment. Raises BadSignature where none could."""
        found = [each for authority in self.authorities if at in authority.window for each in authority.certificates]
        if not found:
            raise BadSignature(f"was made at {at:%Y-%m-%dT%H:%M:%SZ}, when the trusted root had no authority")
        return found

    def logged(self, promise: Promise) -> datetime:
        """When a log took the entry in, by its word (a signed entry timestamp). Raises BadSignature."""
        at = datetime.fromtimestamp(promise.integrated, UTC)
        log = self.logs.get(promise.log_id)
        if log is None or at not in log.window:
            raise BadSignature("is in a log that the trusted root does not know for that time")
        said = {
            "body": base64.b64encode(promise.entry).decode(),
            "integratedTime": promise.integrated,
            "logID": promise.log_id.hex(),
            "logIndex": promise.log_index,
        }
        # RFC 8785 for this object: its keys are in order, its text is ASCII and its numbers are whole.
        canonical = json.dumps(said, separators=(",", ":")).encode()
        try:
            keys.check(log.key, promise.signed, canonical)
        except BadSignature:
            raise BadSignature("has a log entry that the log did not sign") from None
        return at

    def stamped(self, token: bytes, signature: bytes) -> datetime | None:
        """When a time stamp over the signature was made (RFC 3161); None if nobody whom the root knows made it."""
        try:
            response = decode_timestamp_response(token)
            at = response.tst_info.gen_time
        except ValueError:
            return None
        for stamper in self.time_stampers:
            if len(stamper.certificates) < 2 or at not in stamper.window:
                continue
            first, *between, root = stamper.certificates
            try:
                builder = VerifierBuilder().tsa_certificate(first).add_root_certificate(root)
                for each in between:
                    builder = builder.add_intermediate_certificate(each)
                builder.build().verify_message(response, signature)
            except (NotStamped, ValueError):
                continue
            return at
        return None

    def check_embedded(self, leaf: x509.Certificate, above: x509.Certificate) -> None:
        """Raises BadSignature unless a log of certificates has signed that it saw the leaf (RFC 6962, 3.2).

        `above` is the certificate that issued it.
        """
        try:
            promises = leaf.extensions.get_extension_for_class(x509.PrecertificateSignedCertificateTimestamps).value
        except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
            raise BadSignature("has a certificate that no log of certificates has seen") from None
        if not any(self._promised(each, leaf, above) for each in list(promises)[: limits.CERTIFICATES]):
            raise BadSignature("has a certificate that no log of certificates which the trusted root knows has seen")

    def _promised(self, promise: SignedCertificateTimestamp, leaf: x509.Certificate, above: x509.Certificate) -> bool:
        at = promise.timestamp.replace(tzinfo=UTC)
        log = self.certificate_logs.get(promise.log_id)
        if log is None or at not in log.window or promise.entry_type != LogEntryType.PRE_CERTIFICATE:
            return False
        if not isinstance(promise.signature_hash_algorithm, hashes.SHA256):
            return False
        issuer, body = _key_hash(above.public_key()), leaf.tbs_precertificate_bytes
        signed = b"".join(
            (
                struct.pack("!BBQH", promise.version.value, 0, round(at.timestamp() * 1000), 1),
                issuer,
                len(body).to_bytes(3, "big"),
                body,
                struct.pack("!H", len(promise.extension_bytes)),
                promise.extension_bytes,
            )
        )
        try:
            keys.check(log.key, promise.signature, signed)
        except BadSignature:
            return False
        return True


def _key_hash(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


def _window(value: Any) -> Window:
    start, end = member(value, "start"), member(value, "end")
    try:
        return Window(
            datetime.fromisoformat(start).astimezone(UTC) if start else datetime.min.replace(tzinfo=UTC),
            datetime.fromisoformat(end).astimezone(UTC) if end else None,
        )
    except (ValueError, TypeError, OverflowError):
        raise BadTrustedRoot(f"validFor from {shown(start)} to {shown(end)} is no time") from None


def _authorities(value: Any) -> tuple[Authority, ...]:
    found = []
    for each in value or ():
        chain = member(each, "certChain", "certificates") or ()
        try:
            certificates = tuple(
                x509.load_der_x509_certificate(decoded(member(one, "rawBytes"), "a certificate")) for one in chain
            )
        except ValueError:
            raise BadTrustedRoot("it has a certificate that cannot be read") from None
        if not certificates:
            raise BadTrustedRoot("it has an authority without certificates")
        found.append(Authority(certificates, _window(each.get("validFor"))))
    return tuple(found)


def _logs(value: Any) -> dict[bytes, Log]:
    found = {}
    for each in value or ():
        key = member(each, "publicKey")
        try:
            loaded = keys.checked_key(
                serialization.load_der_public_key(decoded(member(key, "rawBytes"), "a log's key"))
            )
        except keys.BadKey:
            raise
        except ValueError:
            raise BadTrustedRoot("it has a log whose key cannot be read") from None
        found[_key_hash(loaded)] = Log(loaded, _window(member(key, "validFor")))
    return found
