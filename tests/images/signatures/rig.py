"""A registry in memory, and signatures made by hand: as cosign makes them, and wrong in one way each."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crds.kernelcachepolicy import KernelCachePolicySpec, Signer
from images.descriptor import OCI_MANIFEST
from images.signatures.discovery import Referrer, Unreadable, sig_tag
from images.signatures.envelopes import BUNDLE_TYPE, SIMPLE_TYPE, Candidate
from images.signatures.request import Check
from images.signatures.signing import PrivateKey, referring
from images.signatures.verification import Verification
from planning.caches.trust import Policy, Signature

DIGEST = "sha256:" + hashlib.sha256(b"the image").hexdigest()
OTHER = "sha256:" + "0123456789abcdef" * 4
NOW = datetime(2026, 11, 22, 12, tzinfo=UTC).timestamp()
ROOT = ("sigstore", "trusted_root.json")


def digest_of(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public_pem(key: PrivateKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def keyless(**fields: Any) -> Signer:
    """Alice by default; `issuer=None` and the like take a field away."""
    wanted = {"issuer": "https://accounts.example.com", "identity": "alice@example.com"} | fields
    given = {name: value for name, value in wanted.items() if value is not None}
    root = {"name": ROOT[0], "key": ROOT[1]}
    return Signer.model_validate({"name": "alice", "keyless": {**given, "trustedRoot": root}})


def pinned(key: PrivateKey, name: str = "release") -> Signer:
    return Signer(name=name, key=public_pem(key))


def policy(*signers: Signer, name: str = "team") -> Policy:
    return Policy(name, KernelCachePolicySpec(images=["registry.example/**"], signers=list(signers)))


def examine(
    candidate: Candidate,
    *signers: Signer,
    roots: Mapping[tuple[str, str], bytes] | None = None,
    now: float = NOW,
    digest: str = DIGEST,
) -> Signature | None:
    checks = [Check("team", signer) for signer in signers]
    return Verification(checks, roots or {}, now).examine(candidate, digest)


def bundle(content: bytes | Mapping[str, Any]) -> Candidate:
    return Candidate("bundle x", "bundle", content if isinstance(content, bytes) else json.dumps(content).encode())


def simple(made: Mapping[str, Any]) -> Candidate:
    return Candidate("signature x", "simple", base64.b64decode(made["payload"]), made["annotations"])


@cache
def recorded() -> dict[str, Any]:
    """What virtual-sigstore printed once for DIGEST: its times are past, and all that verification needs is in it."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "virtual_sigstore.json").read_text())
    return found


def roots(made: Mapping[str, Any]) -> dict[tuple[str, str], bytes]:
    return {ROOT: json.dumps(made["trustedRoot"]).encode()}


@dataclass
class MemoryRepository:
    """A registry that has what it was given, truthfully or not."""

    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    listed: list[Referrer] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def manifest(self, reference: str) -> bytes | None:
        self.asked.append(reference)
        return self.manifests.get(reference)

    async def blob(self, digest: str, size: int) -> bytes:
        self.asked.append(digest)
        if digest not in self.blobs or len(self.blobs[digest]) != size:
            raise Unreadable("is missing in the registry")
        return self.blobs[digest]

    async def referrers(self, digest: str) -> Sequence[Referrer]:
        return list(self.listed)

    def add_bundle(self, content: bytes, digest: str = DIGEST) -> str:
        made = referring(content, OCI_MANIFEST, digest, 2, "2026-11-22T12:00:00Z")
        self.blobs |= made.blobs
        name = digest_of(made.manifest)
        self.manifests[name] = made.manifest
        notes = json.loads(made.manifest)["annotations"]
        self.listed.append(Referrer(name, len(made.manifest), BUNDLE_TYPE, notes))
        return f"bundle {name}"

    def add_layers(self, *layers: tuple[bytes, Mapping[str, str]], digest: str = DIGEST) -> None:
        described = []
        for payload, notes in layers:
            self.blobs[digest_of(payload)] = payload
            described.append(
                {
                    "mediaType": SIMPLE_TYPE,
                    "digest": digest_of(payload),
                    "size": len(payload),
                    "annotations": notes,
                }
            )
        self.manifests[sig_tag(digest)] = json.dumps({"schemaVersion": 2, "layers": described}).encode()


@dataclass(frozen=True)
class Authority:
    """One's own authority: a root, an intermediate, and what signs code."""

    root: x509.Certificate
    between: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls) -> Authority:
        root_key, key = new_key(), new_key()
        years = 24 * 3650  # cosign goes by the real clock, which leaves NOW behind
        root = _issued("root", root_key, None, root_key, ca=True, hours=years)
        return cls(root, _issued("between", key, root, root_key, ca=True, hours=years), key)

    @property
    def pem(self) -> str:
        return "".join(each.public_bytes(serialization.Encoding.PEM).decode() for each in (self.between, self.root))

    def issue(self, key: PrivateKey, *names: x509.GeneralName, **changes: Any) -> x509.Certificate:
        return _issued("leaf", key, self.between, self.key, names=names, **changes)


def _issued(
    name: str,
    key: PrivateKey,
    above: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    *,
    ca: bool = False,
    names: Sequence[x509.GeneralName] = (),
    code: bool = True,
    hours: float = 24,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.fromtimestamp(NOW, UTC) - timedelta(hours=24)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if above is None else above.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(hours=24 + hours))
        .add_extension(x509.BasicConstraints(ca, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False), critical=True)
    )
    if not ca:
        usage = ExtendedKeyUsageOID.CODE_SIGNING if code else ExtendedKeyUsageOID.SERVER_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA256())
