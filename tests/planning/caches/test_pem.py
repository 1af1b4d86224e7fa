"""What is no PEM is told at the door; whatever the verifier takes, the door takes."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from images.signatures.keys import BadKey, load_public_key
from planning.caches.pem import certificates_problem, public_key_problem

_RSA = rsa.generate_private_key(65537, 2048)
_EC = ec.generate_private_key(ec.SECP256R1())


def public(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def certificate() -> str:
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")]), datetime.now(UTC)
    built = x509.CertificateBuilder(name, name, _EC.public_key(), 7, now, now + timedelta(days=1)).sign(
        _EC, hashes.SHA256()
    )
    return built.public_bytes(serialization.Encoding.PEM).decode()


PKCS1 = _RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.PKCS1).decode()
KEYS = [
    public(_EC),
    public(ec.generate_private_key(ec.SECP384R1())),
    public(ec.generate_private_key(ec.SECP521R1())),
    public(ed25519.Ed25519PrivateKey.generate()),
    public(_RSA),
    PKCS1,
]
PRIVATE = _EC.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
).decode()
CERTIFICATE = certificate()
PLAIN = KEYS[0]


@pytest.mark.parametrize("pem", KEYS, ids=range(len(KEYS)))
def test_every_kind_of_key_is_let_in(pem: str) -> None:
    for text in (pem, "\n " + pem, pem.replace("\n", "\r\n"), pem + "\nof the release team\n"):
        load_public_key(text)
        assert public_key_problem(text) == ""


@pytest.mark.parametrize(
    ("pem", "said"),
    [
        (CERTIFICATE, "it is a certificate: give its public key"),
        (PLAIN + KEYS[1], "it must be one public key and nothing else"),
        (PLAIN.replace("PUBLIC", "OTHER"), "it is no public key as PEM (-----BEGIN PUBLIC KEY-----)"),
        (PLAIN.replace("-----END", "----END"), "it is no public key as PEM (-----BEGIN PUBLIC KEY-----)"),
        (PLAIN.replace("PUBLIC KEY", "SSH2 PUBLIC KEY"), "it is no public key as PEM (-----BEGIN PUBLIC KEY-----)"),
    ],
    ids=range(5),
)
def test_the_verifiers_words_are_used(pem: str, said: str) -> None:
    assert public_key_problem(pem).startswith(said)
    with pytest.raises(BadKey) as caught:
        load_public_key(pem)
    assert str(caught.value) == public_key_problem(pem)


@pytest.mark.parametrize("lost", range(1, 64))
def test_a_key_that_was_cut_is_noticed(lost: int) -> None:
    for pem, problem in ((PLAIN, public_key_problem), (CERTIFICATE, certificates_problem)):
        body, end, label = pem.partition("\n-----END")
        assert "is not whole" in problem(body.rstrip("=")[:-lost] + end + label)


def test_a_private_key_is_never_let_in_alone() -> None:
    assert "private key" in public_key_problem(PRIVATE)
    assert "private key" in public_key_problem(PLAIN + PRIVATE)
    assert "private key" in certificates_problem(PRIVATE)


def test_certificates() -> None:
    assert certificates_problem(CERTIFICATE) == certificates_problem(f"root\n{CERTIFICATE}\n{certificate()}") == ""
    assert certificates_problem(PLAIN) == "they are no certificates as PEM (-----BEGIN CERTIFICATE-----)"
    assert "is not whole" in certificates_problem(CERTIFICATE.replace("MI", "!!", 1))


def test_a_long_text_is_read_once() -> None:
    began = time.process_time()
    for label in ("CERTIFICATE", "PUBLIC KEY", "X509 CERTIFICATE"):
        certificates_problem(f"-----BEGIN {label}-----" * 5000)
        public_key_problem(f"-----BEGIN {label}-----" + "-" * 100_000)
    assert time.process_time() - began < 5.0


PIECES = st.sampled_from(
    ["", " ", "\n", "\r\n", "=", "-", "-----", ":", "a: b\n\n", "A", "é", "-----BEGIN CERTIFICATE-----", "-----END "]
)


def edited(pem: str) -> st.SearchStrategy[str]:
    """One of it with pieces put in, taken out, doubled or turned."""
    edit = st.tuples(st.integers(0, len(pem)), st.integers(0, 70), PIECES)

    def apply(edits: list[tuple[int, int, str]]) -> str:
        text = pem
        for at, length, piece in edits:
            text = text[:at] + piece + text[at + length :]
        return text

    return st.lists(edit, max_size=3).map(apply)


@given(st.sampled_from(KEYS).flatmap(edited))
def test_what_the_verifier_takes_the_door_takes(pem: str) -> None:
    try:
        load_public_key(pem)
    except (BadKey, UnsupportedAlgorithm):
        return
    assert public_key_problem(pem) == ""


@given(st.just(CERTIFICATE + "\n" + CERTIFICATE).flatmap(edited))
def test_certificates_that_can_be_read_are_let_in(pem: str) -> None:
    try:
        x509.load_pem_x509_certificates(pem.encode())
    except ValueError:
        return
    assert certificates_problem(pem) == ""
