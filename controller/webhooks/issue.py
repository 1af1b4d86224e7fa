"""Makes the webhooks' certificates, and reads their dates: a program that ends when it is done, run by the keeper.

    python -m controller.webhooks.issue     a request as JSON on standard input, the answer on standard output

Of its own, because cryptography would cost a controller 11 MB for good, for what is done a few times a year.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from controller.webhooks.material import Material, blocks, fingerprint
from planning.certificates import AUTHORITY_LIFE, SERVING_LIFE, Authority, Serving, Step, Stored

_EARLIER = 300.0  # seconds: a clock that is set back a little must not refuse what is new


def stored(material: Material) -> Stored:
    """The dates of what is stored; nothing if it cannot be read, or keys and certificates do not belong together."""
    try:
        known = [(block, x509.load_pem_x509_certificate(block.encode())) for block in blocks(material.authorities)]
        certificate = x509.load_pem_x509_certificate(material.certificate.encode())
        belongs = (
            _key(material.key).public_key() == certificate.public_key()
            and _key(material.authority_key).public_key() == known[-1][1].public_key()
        )
    except (ValueError, TypeError, IndexError):
        return Stored()
    if not belongs:
        return Stored()
    authorities = tuple(Authority(fingerprint(block), *_dates(each)) for block, each in known)
    issuer = next((fingerprint(block) for block, each in known if _issued(certificate, each)), "")
    return Stored(authorities, Serving(issuer, *_dates(certificate), _hosts(certificate)))


def made(step: Step, material: Material, hosts: Sequence[str], now: float) -> Material:
    """What is to be stored after a step."""
    match step:
        case Step.KEEP:
            return material
        case Step.BEGIN:
            return made(Step.ISSUE, _with_authority(Material(), now), hosts, now)
        case Step.SUCCEED:
            return _with_authority(material, now)
        case Step.ISSUE:
            return _with_certificate(material, hosts, now)
        case Step.RETIRE:
            return replace(material, authorities=blocks(material.authorities)[-1])


def main() -> None:
    """One request: `material`, `step`, `hosts`, `now`. The answer: `material` after the step, and what is `stored`."""
    asked = json.load(sys.stdin)
    material = made(Step[asked["step"]], Material(**asked["material"]), asked["hosts"], asked["now"])
    json.dump({"material": asdict(material), "stored": as_json(stored(material))}, sys.stdout)


def as_json(known: Stored) -> dict[str, object]:
    """For the keeper, who reads it by `keeper.from_json`."""
    serving = known.serving
    return {
        "authorities": [asdict(each) for each in known.authorities],
        "serving": serving and {**asdict(serving), "hosts": sorted(serving.hosts)},
    }


def _with_authority(material: Material, now: float) -> Material:
    key = ec.generate_private_key(ec.SECP256R1())
    # Each its own name: where two are trusted, a verifier finds the right one at once.
    subject = _subject(f"berth-webhooks-ca-{x509.random_serial_number() % 16**8:08x}")
    certificate = (
        _builder(subject, subject, key.public_key(), now, now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return replace(material, authorities=material.authorities + _pem(certificate), authority_key=_key_pem(key))


def _with_certificate(material: Material, hosts: Sequence[str], now: float) -> Material:
    signer = _key(material.authority_key)
    authority = x509.load_pem_x509_certificate(blocks(material.authorities)[-1].encode())
    key = ec.generate_private_key(ec.SECP256R1())
    ends = min(now + SERVING_LIFE, authority.not_valid_after_utc.timestamp())
    certificate = (
        _builder(_subject("berth-webhooks"), authority.subject, key.public_key(), now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return replace(material, certificate=_pem(certificate), key=_key_pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, ends: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.fromtimestamp(now - _EARLIER, datetime.UTC))
        .not_valid_after(datetime.datetime.fromtimestamp(ends, datetime.UTC))
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts(certificate: x509.Certificate) -> frozenset[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(str(each.value) for each in names)


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _dates(certificate: x509.Certificate) -> tuple[float, float]:
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def _key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("it is no elliptic-curve key")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


if __name__ == "__main__":
    main()
