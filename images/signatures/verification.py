"""Checks the signatures that were found beside an image against the signers that policies name.

Pure work on bytes in memory, for the child process (`child`). Whatever the bytes are, what comes out is a finding for
each of them: whose signatures it is, or why it is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from crds.kernelcachepolicy import Certificate
from images.signatures import certificates, keys
from images.signatures.documents import BadSignature, shown
from images.signatures.envelopes import Candidate, NoImageSignature, Signed, take_apart
from images.signatures.request import Check
from planning.caches.trust import RootKey, Signature

if TYPE_CHECKING:  # what sigstore needs takes most of a second to load, and pinned keys need none of it
    from images.signatures.trustedroot import TrustedRoot

_TOLD = 480  # characters of one finding


class BadSigner(Exception):
    """Why nobody can be this signer: what a policy says, or a ConfigMap it names, is wrong."""


@dataclass(frozen=True)
class _Asked:
    check: Check
    key: keys.PublicKey | None = None
    authorities: tuple[x509.Certificate, ...] = ()
    root: TrustedRoot | None = None
    problem: str = ""


class Verification:
    """The signers, read once. `roots` are the trusted roots that they name, as far as there are such."""

    def __init__(self, checks: Sequence[Check], roots: Mapping[RootKey, bytes], now: float) -> None:
        self._now = datetime.fromtimestamp(now, UTC)
        self._raw = roots
        self._roots: dict[RootKey, TrustedRoot] = {}
        self._asked = [self._read(check) for check in checks]

    def examine(self, candidate: Candidate, digest: str) -> Signature | None:
        """What a signature is worth for the image `digest`; None where it is no signature but an attestation."""
        try:
            signed = take_apart(candidate, digest)
        except NoImageSignature:
            return None
        except BadSignature as wrong:
            return Signature(candidate.place, problem=str(wrong))
        satisfied: dict[tuple[str, str], str] = {}
        problems: dict[str, None] = {}
        for asked in self._asked:
            try:
                by = self._by(asked, signed)
            except BadSigner as wrong:
                problems[f"{asked.check.signer.name} cannot be checked: {wrong}"] = None
            except BadSignature as wrong:
                problems[str(wrong)] = None
            except Exception as wrong:  # hostile bytes reach parsers of others: what they raise is a refusal as well
                problems[f"cannot be read ({type(wrong).__name__}: {shown(wrong)})"] = None
            else:
                satisfied[(asked.check.policy, asked.check.signer.name)] = by
        return Signature(
            candidate.place,
            signer=shown("; ".join(dict.fromkeys(satisfied.values())), _TOLD),
            satisfies=frozenset(satisfied),
            problem="" if satisfied else shown("; ".join(problems), _TOLD),
        )

    def _by(self, asked: _Asked, signed: Signed) -> str:
        if asked.problem:
            raise BadSigner(asked.problem)
        signer = asked.check.signer
        if asked.key is not None:
            keys.check(asked.key, signed.signature, signed.message)
            return f"the key of {signer.name}"
        if signer.keyless is not None and asked.root is not None:
            from images.signatures import keyless  # which `_read` has loaded: here files can no longer be opened

            return keyless.check(signer.keyless, asked.root, signed)
        if signer.certificate is not None:
            return self._by_authority(signer.certificate, asked, signed)
        raise BadSigner("it has neither key, keyless nor certificate")

    def _by_authority(self, wanted: Certificate, asked: _Asked, signed: Signed) -> str:
        """By a certificate of one's own authority.

        It must be valid now, for without a log nobody knows when it signed; unless a time stamp that the trusted root
        vouches for says when.
        """
        if not signed.certificates:
            raise BadSignature("is by a key without a certificate")
        leaf, *between = (certificates.load(each) for each in signed.certificates)
        stamps = (
            [] if asked.root is None else [asked.root.stamped(each, signed.signature) for each in signed.timestamps]
        )
        at = next((each for each in stamps if each is not None), self._now)
        certificates.chain(leaf, between, asked.authorities, at)
        certificates.may_sign(leaf)
        try:
            keys.check(keys.checked_key(leaf.public_key()), signed.signature, signed.message)
        except (keys.BadKey, UnsupportedAlgorithm) as wrong:
            raise BadSignature(f"has a certificate whose key does not count: {shown(wrong)}") from None
        found = certificates.names(leaf)
        for name in found:
            if certificates.means(wanted.identity, wanted.identity_pattern, name):
                return f"{shown(name)} (by the authority of {asked.check.signer.name})"
        raise BadSignature(f"is by {shown(', '.join(found[:2]))}, who is not the identity demanded")

    def _read(self, check: Check) -> _Asked:
        signer = check.signer
        try:
            if signer.key is not None:
                return _Asked(check, key=keys.load_public_key(signer.key))
            if signer.keyless is not None:
                root = self._root((signer.keyless.trusted_root.name, signer.keyless.trusted_root.key))
                from images.signatures import keyless  # noqa: F401 - loaded while files can still be opened

                _ = root.verifier
                return _Asked(check, root=root)
            if signer.certificate is not None:
                named = signer.certificate.trusted_root
                return _Asked(
                    check,
                    authorities=_authorities(signer.certificate.authorities),
                    root=None if named is None else self._root((named.name, named.key)),
                )
        except (BadSigner, ValueError, UnsupportedAlgorithm) as wrong:
            return _Asked(check, problem=shown(wrong))
        return _Asked(check)

    def _root(self, key: RootKey) -> TrustedRoot:
        from images.signatures.trustedroot import BadTrustedRoot, TrustedRoot

        if key not in self._roots:
            if key not in self._raw:
                raise BadSigner(
                    f"ConfigMap {key[0]} in berth-system has no key {key[1]}, where its trusted root should be"
                )
            try:
                self._roots[key] = TrustedRoot.parse(self._raw[key])
            except BadTrustedRoot as wrong:
                raise BadSigner(f"key {key[1]} of ConfigMap {key[0]}: {wrong}") from None
        return self._roots[key]


def _authorities(pem: str) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(x509.load_pem_x509_certificates(pem.encode()))
    except ValueError:
        raise BadSigner("its authorities are no certificates as PEM") from None
