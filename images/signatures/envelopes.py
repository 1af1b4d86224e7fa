"""Takes a signature apart, as cosign writes it: the Sigstore bundle (v0.3) and the older layer behind a .sig tag.

For `verification`. What comes out is over the image that was asked for, or nothing does: a signature over another
image is none, however good. Formats: sigstore/cosign specs/BUNDLE_SPEC.md and SIGNATURE_SPEC.md, DSSE 1.0, in-toto
Statement v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from images.signatures import limits
from images.signatures.documents import BadSignature, decoded, member, read_json, shown, text

Form = Literal["bundle", "simple"]

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
BUNDLE_TYPES = (BUNDLE_TYPE, "application/vnd.dev.sigstore.bundle+json;version=0.3")
SIMPLE_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
IN_TOTO = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://sigstore.dev/cosign/sign/v1"

SIGNATURE_KEY = "dev.cosignproject.cosign/signature"
CERTIFICATE_KEY = "dev.sigstore.cosign/certificate"
CHAIN_KEY = "dev.sigstore.cosign/chain"
PROMISE_KEY = "dev.sigstore.cosign/bundle"
TIMESTAMP_KEY = "dev.sigstore.cosign/rfc3161timestamp"

_LAST_SECOND = 253402300799  # of the year 9999
_SIMPLE = "cosign container image signature"


class NoImageSignature(Exception):
    """A bundle that signs a statement of another kind about the image, such as how it was built."""


@dataclass(frozen=True)
class Candidate:
    """Something that lies where signatures lie. With a problem it could not be read at all."""

    place: str
    form: Form
    content: bytes = b""
    """A bundle; or what a legacy signature is over."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Promise:
    """What the log gave a legacy signature: the entry, and its signature over entry and time."""

    entry: bytes
    signed: bytes
    log_id: bytes
    log_index: int
    integrated: int


@dataclass(frozen=True)
class Signed:
    """One signature over the image asked for. Nothing of it is verified yet."""

    message: bytes
    """What the signature is over, to the byte."""
    signature: bytes
    certificates: tuple[bytes, ...] = ()
    """DER: the signer's own first, then what came with it."""
    timestamps: tuple[bytes, ...] = ()
    bundle: bytes = b""
    promise: Promise | None = None


def take_apart(candidate: Candidate, digest: str) -> Signed:
    """The signature in it over the image `digest`. Raises BadSignature, or NoImageSignature."""
    if candidate.problem:
        raise BadSignature(candidate.problem)
    return _bundle(candidate, digest) if candidate.form == "bundle" else _simple(candidate, digest)


def pae(payload_type: str, payload: bytes) -> bytes:
    """What a DSSE signature is over: type and payload with their lengths (DSSE 1.0, pre-authentication encoding)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def statement(digest: str) -> dict[str, Any]:
    """What cosign signs for an image."""
    return {
        "_type": STATEMENT,
        "subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": PREDICATE,
        "predicate": {},
    }


def _bundle(candidate: Candidate, digest: str) -> Signed:
    document = read_json(candidate.content, limits.BUNDLE, "the bundle")
    if (media_type := document.get("mediaType")) not in BUNDLE_TYPES:
        raise BadSignature(f"is a bundle of type {shown(media_type)}, not {BUNDLE_TYPE}")
    envelope = document.get("dsseEnvelope")
    if not isinstance(envelope, Mapping):
        raise BadSignature("is a bundle that signs a file, not a statement about an image")
    payload_type = text(envelope.get("payloadType"), "the type of the payload")
    if payload_type != IN_TOTO:
        raise BadSignature(f"signs a payload of type {shown(payload_type)}, not {IN_TOTO}")
    payload = decoded(envelope.get("payload"), "the payload")
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise BadSignature("must have exactly one signature in its envelope")
    _about(payload, digest)
    return Signed(
        message=pae(payload_type, payload),
        signature=decoded(member(signatures[0], "sig"), "the signature"),
        certificates=_certificates(document.get("verificationMaterial")),
        timestamps=tuple(
            decoded(member(each, "signedTimestamp"), "a timestamp")
            for each in _list(
                member(document, "verificationMaterial", "timestampVerificationData", "rfc3161Timestamps"),
                limits.TIMESTAMPS,
                "timestamps",
            )
        ),
        bundle=candidate.content,
    )


def _about(payload: bytes, digest: str) -> None:
    """Whether a statement says that the image is signed: of this predicate, and with the image among its subjects."""
    said = read_json(payload, limits.BUNDLE, "the statement")
    if (kind := said.get("_type")) != STATEMENT:
        raise BadSignature(f"signs a statement of type {shown(kind)}, not {STATEMENT}")
    if (predicate := text(said.get("predicateType"), "the type of the predicate")) != PREDICATE:
        raise NoImageSignature(f"is an attestation of type {shown(predicate)}")
    subjects = said.get("subject")
    if not isinstance(subjects, list) or not subjects:
        raise BadSignature("signs a statement without a subject")
    named = [member(subject, "digest", "sha256") for subject in subjects]
    if digest.removeprefix("sha256:") not in named:
        raise BadSignature(f"is over another image (sha256:{shown(named[0], 64)})")


def _certificates(material: Any) -> tuple[bytes, ...]:
    if isinstance(alone := member(material, "certificate", "rawBytes"), str):
        return (decoded(alone, "the certificate"),)
    chain = _list(member(material, "x509CertificateChain", "certificates"), limits.CERTIFICATES, "certificates")
    return tuple(decoded(member(each, "rawBytes"), "a certificate") for each in chain)


def _simple(candidate: Candidate, digest: str) -> Signed:
    if len(candidate.content) > limits.PAYLOAD:
        raise BadSignature(f"is over more than {limits.PAYLOAD // 1024} KiB")
    for key, value in candidate.annotations.items():
        if key.startswith("dev.") and len(value) > limits.ANNOTATION:
            raise BadSignature(f"has an annotation {shown(key, 64)} of more than {limits.ANNOTATION // 1024} KiB")
    said = read_json(candidate.content, limits.PAYLOAD, "what was signed")
    if (kind := member(said, "critical", "type")) != _SIMPLE:
        raise BadSignature(f"signs something of type {shown(kind)}, not {_SIMPLE}")
    named = member(said, "critical", "image", "docker-manifest-digest")
    if named != digest:
        raise BadSignature(f"is over another image ({shown(named, 80)})")
    notes = candidate.annotations
    pems = notes.get(CERTIFICATE_KEY, "") + "\n" + notes.get(CHAIN_KEY, "")
    stamp = notes.get(TIMESTAMP_KEY)
    return Signed(
        message=candidate.content,
        signature=decoded(notes.get(SIGNATURE_KEY), "the signature"),
        certificates=_pems(pems),
        timestamps=() if stamp is None else (_stamp(stamp),),
        promise=_promise(notes[PROMISE_KEY]) if PROMISE_KEY in notes else None,
    )


def _pems(pems: str) -> tuple[bytes, ...]:
    """The certificates as DER; what they mean is read later, by what checks them."""
    found = []
    for block in pems.split("-----BEGIN CERTIFICATE-----")[1:]:
        body, end, _ = block.partition("-----END CERTIFICATE-----")
        if not end:
            raise BadSignature("has a certificate that is cut off")
        found.append(decoded("".join(body.split()), "a certificate"))
    if len(found) > limits.CERTIFICATES:
        raise BadSignature(f"has more than {limits.CERTIFICATES} certificates")
    return tuple(found)


def _stamp(annotation: str) -> bytes:
    document = read_json(text(annotation, "the timestamp").encode(), limits.ANNOTATION, "the timestamp")
    return decoded(document.get("SignedRFC3161Timestamp"), "the timestamp")


def _promise(annotation: str) -> Promise:
    document = read_json(text(annotation, "what the log said").encode(), limits.ANNOTATION, "what the log said")
    integrated, index = member(document, "Payload", "integratedTime"), member(document, "Payload", "logIndex")
    if not _whole(integrated, _LAST_SECOND) or not _whole(index, 2**53):
        raise BadSignature("has a log entry without time and index")
    try:
        log_id = bytes.fromhex(text(member(document, "Payload", "logID"), "the log's id"))
    except ValueError:
        raise BadSignature("has a log's id that is no hexadecimal number") from None
    return Promise(
        entry=decoded(member(document, "Payload", "body"), "the log entry"),
        signed=decoded(document.get("SignedEntryTimestamp"), "the log's signature"),
        log_id=log_id,
        log_index=index,
        integrated=integrated,
    )


def _whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _list(value: Any, most: int, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise BadSignature(f"has more than {most} {what}")
    return value
