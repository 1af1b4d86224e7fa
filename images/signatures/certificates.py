"""Certificates that sign code: whether an authority issued one, whom it names, and whether a policy means them.

For keyless signatures and for those by an authority of one's own. Chains are built by `cryptography`, by the rules of
the web's certificates (RFC 5280, CA/B baseline) but for the purpose, which is code signing here.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType

from cryptography import x509
from cryptography.hazmat.asn1 import decode_der
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

from images.signatures import limits
from images.signatures.documents import BadSignature, shown

# sigstore/fulcio docs/oid-info.md
_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_ISSUER_DER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8")
_OTHER_NAME = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.7")


def load(der: bytes) -> x509.Certificate:
    """Raises BadSignature where it is none."""
    try:
        return x509.load_der_x509_certificate(der)
    except ValueError:
        raise BadSignature("has a certificate that cannot be read") from None


def chain(
    leaf: x509.Certificate, between: Sequence[x509.Certificate], anchors: Sequence[x509.Certificate], at: datetime
) -> list[x509.Certificate]:
    """Those above the leaf up to an anchor, all valid at that moment. Raises BadSignature where there are none."""
    if not leaf.not_valid_before_utc <= at <= leaf.not_valid_after_utc:
        valid = f"{leaf.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ} to {leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
        raise BadSignature(f"has a certificate valid from {valid}, not at {at:%Y-%m-%dT%H:%M:%SZ}")
    builder = (
        PolicyBuilder()
        .store(Store(list(anchors)))
        .time(at)
        .extension_policies(
            ca_policy=ExtensionPolicy.webpki_defaults_ca().may_be_present(
                x509.ExtendedKeyUsage, Criticality.AGNOSTIC, None
            ),
            ee_policy=ExtensionPolicy.webpki_defaults_ee().may_be_present(
                x509.ExtendedKeyUsage, Criticality.AGNOSTIC, None
            ),
        )
    )
    try:
        found = builder.build_client_verifier().verify(leaf, list(between)).chain
    except (VerificationError, x509.UnsupportedGeneralNameType, ValueError) as wrong:
        raise BadSignature(f"has a certificate that no trusted authority issued: {shown(wrong)}") from None
    return list(found[1:])


def may_sign(certificate: x509.Certificate) -> None:
    """Raises BadSignature unless it is one for signing code."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        raise BadSignature("has a certificate that does not say what it is for") from None
    if not usage.digital_signature or ExtendedKeyUsageOID.CODE_SIGNING not in purposes:
        raise BadSignature("has a certificate that is not for signing code")


def names(certificate: x509.Certificate) -> list[str]:
    """Whom it names: addresses, URIs, names of hosts, and the names that Fulcio gives to users of its own."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if len(found) > limits.NAMES:
            raise BadSignature(f"has a certificate with more than {limits.NAMES} names")
        simple = (x509.RFC822Name, x509.UniformResourceIdentifier, x509.DNSName)
        return [
            each.value if isinstance(each, simple) else decode_der(str, each.value)
            for each in found
            if isinstance(each, simple) or (isinstance(each, x509.OtherName) and each.type_id == _OTHER_NAME)
        ]
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        raise BadSignature("has a certificate that names nobody") from None


def issuer(certificate: x509.Certificate) -> str:
    """Who vouched for the identity, as Fulcio writes it into its certificates."""
    for oid in (_ISSUER_DER, _ISSUER):
        try:
            value = certificate.extensions.get_extension_for_oid(oid).value
            if isinstance(value, x509.UnrecognizedExtension):
                return decode_der(str, value.value) if oid == _ISSUER_DER else value.value.decode()
        except x509.ExtensionNotFound:
            continue
        except (x509.DuplicateExtension, ValueError):
            break
    raise BadSignature("has a certificate that does not say who vouched for its identity")


def means(exact: str | None, pattern: str | None, value: str) -> bool:
    """Whether a policy's exact text or its pattern, which must fit as a whole, means a name in a certificate.

    A pattern that takes too long on a name that somebody chose for that end does not fit. Raises BadSignature then.
    """
    if exact is not None:
        return exact == value
    if pattern is None or len(value) > limits.NAME:
        return False
    try:
        with _at_most(limits.PATTERN_SECONDS):
            return re.fullmatch(pattern, value) is not None
    except _TooLong:
        raise BadSignature(
            f"has a name on which the pattern {shown(pattern, 80)} takes longer than {limits.PATTERN_SECONDS} s"
        ) from None
    except (re.error, RecursionError, OverflowError):
        return False


class _TooLong(Exception):
    pass


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Ends what takes longer: Python's regular expressions look for signals while they match.

    Signals reach the main thread only. Elsewhere nothing ends it, so nothing runs patterns elsewhere: see `child`.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("patterns are matched in the main thread only, where they can be ended")

    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
