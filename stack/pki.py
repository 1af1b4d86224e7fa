"""The stack's certificates: one authority for Kubernetes, one for etcd, and a client certificate for every identity.

For `Stack.up`. etcd has an authority of its own, so that no Kubernetes identity can read etcd past RBAC. berth's own
identities carry the user names of their service accounts, so that the manifests in `deploy/` bind to them unchanged.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stack.paths import write_atomic

_AUTHORITY_LIFE = datetime.timedelta(days=3650)
_LEAF_LIFE = datetime.timedelta(days=365)
_RENEW_BEFORE = datetime.timedelta(days=30)

SERVICE_ACCOUNT_NAMESPACE = "berth-system"


@dataclass(frozen=True)
class Identity:
    """Who a client certificate speaks for: Kubernetes' user name and groups."""

    user: str
    groups: tuple[str, ...] = ()


def service_account(name: str, namespace: str = SERVICE_ACCOUNT_NAMESPACE) -> Identity:
    """The identity that a service account's token would give, as a certificate."""
    return Identity(
        f"system:serviceaccount:{namespace}:{name}", ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    )


IDENTITIES: dict[str, Identity] = {
    "admin": Identity("berth:admin", ("system:masters",)),
    "kube-controller-manager": Identity("system:kube-controller-manager"),
    "kube-scheduler": Identity("system:kube-scheduler"),
    "kwok": Identity("berth:kwok"),
    "berth-controller": service_account("berth-controller"),
    "berth-worker": service_account("berth-worker"),
}
"""Each of them gets a kubeconfig of its name."""


@dataclass(frozen=True)
class Pair:
    """A certificate and its key as files."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority kept in a folder; makes what is missing and renews what will soon end."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.pair = Pair(folder / "ca.crt", folder / "ca.key")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (self.pair.cert.is_file() and self.pair.key.is_file()):
            key = ec.generate_private_key(ec.SECP256R1())
            subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
            certificate = (
                _builder(subject, subject, key.public_key(), _AUTHORITY_LIFE)
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_key_usage(authority=True), critical=True)
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
                .sign(key, hashes.SHA256())
            )
            _write(self.pair, certificate, key)
        self._key = _load_key(self.pair.key)
        self._certificate = x509.load_pem_x509_certificate(self.pair.cert.read_bytes())

    def client(self, name: str, identity: Identity) -> Pair:
        """A client certificate for an identity."""
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in identity.groups]
        attributes.append(x509.NameAttribute(NameOID.COMMON_NAME, identity.user))
        return self._leaf(name, x509.Name(attributes), (), [ExtendedKeyUsageOID.CLIENT_AUTH])

    def server(self, name: str, hosts: Sequence[str], *, also_client: bool = False) -> Pair:
        """A serving certificate for host names and IP addresses."""
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if also_client else [])]
        return self._leaf(name, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), hosts, usages)

    def _leaf(self, name: str, subject: x509.Name, hosts: Sequence[str], usages: list[x509.ObjectIdentifier]) -> Pair:
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts]) if hosts else None
        if self._still_good(pair, subject, names):
            return pair
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(subject, self._certificate.subject, key.public_key(), _LEAF_LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        _write(pair, builder.sign(self._key, hashes.SHA256()), key)
        return pair

    def _still_good(self, pair: Pair, subject: x509.Name, names: x509.SubjectAlternativeName | None) -> bool:
        try:
            old = x509.load_pem_x509_certificate(pair.cert.read_bytes())
            key = _load_key(pair.key)
            old.verify_directly_issued_by(self._certificate)
        except Exception:  # whatever is wrong with a file of ours, a new one mends it
            return False
        try:
            old_names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            old_names = None
        left = old.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        return (
            left > _RENEW_BEFORE
            and old.subject == subject
            and old_names == names
            and old.public_key() == key.public_key()
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # a clock set back a little must not refuse it
        .not_valid_after(now + life)
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(pair: Pair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    write_atomic(pair.key, _key_pem(key))
    write_atomic(pair.cert, certificate.public_bytes(serialization.Encoding.PEM))


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{path} holds no elliptic-curve key")
    return key


def signing_key(folder: Path) -> Pair:
    """The key that signs service account tokens; as a pair of public (`cert`) and private key files."""
    pair = Pair(folder / "service-accounts.pub", folder / "service-accounts.key")
    if not (pair.cert.is_file() and pair.key.is_file()):
        key = ec.generate_private_key(ec.SECP256R1())
        write_atomic(pair.key, _key_pem(key))
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        write_atomic(pair.cert, public)
    return pair


def write_kubeconfig(path: Path, server: str, authority: Pair, client: Pair, name: str) -> None:
    """Writes a kubeconfig that needs no other file, so that it can be copied."""

    def inline(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "berth", "cluster": {"server": server, "certificate-authority-data": inline(authority.cert)}}
        ],
        "users": [
            {
                "name": name,
                "user": {"client-certificate-data": inline(client.cert), "client-key-data": inline(client.key)},
            }
        ],
        "contexts": [{"name": "berth", "context": {"cluster": "berth", "user": name}}],
        "current-context": "berth",
    }
    text = yaml.safe_dump(content, sort_keys=False)
    if not path.is_file() or path.read_text() != text:
        write_atomic(path, text)
