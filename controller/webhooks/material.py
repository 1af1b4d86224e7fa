"""Certificates and keys as the Secret holds them, for the server that serves with them and the keeper that renews them.

Keys are in here: nothing of this is ever printed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crds.settings import SETTINGS_NAMESPACE

SECRET_NAMESPACE = SETTINGS_NAMESPACE
SECRET_NAME = "berth-webhook-certificates"  # noqa: S105  # its name

_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


@dataclass(frozen=True, slots=True)
class Material:
    """PEM texts, '' for what is not there: the trusted authorities (the newest last), the newest one's key, and the
    certificate that is served with its key.
    """

    authorities: str = ""
    authority_key: str = field(default="", repr=False)
    certificate: str = ""
    key: str = field(default="", repr=False)

    @property
    def servable(self) -> bool:
        return bool(self.certificate and self.key)

    def data(self) -> dict[str, str]:
        """As a Secret's data."""
        return {name: base64.b64encode(text.encode()).decode() for name, text in self._fields().items()}

    def _fields(self) -> dict[str, str]:
        return {
            "ca.crt": self.authorities,
            "ca.key": self.authority_key,
            "tls.crt": self.certificate,
            "tls.key": self.key,
        }


@dataclass(frozen=True, slots=True)
class Secret:
    """The Secret as it was seen; `version` is its resourceVersion."""

    version: str
    material: Material


def secret(raw: Mapping[str, Any]) -> Secret:
    """The Secret; what cannot be read in it counts as not there."""
    data = raw.get("data")

    def text(key: str) -> str:
        value = data.get(key) if isinstance(data, Mapping) else None
        try:
            return base64.b64decode(value, validate=True).decode() if isinstance(value, str) else ""
        except (binascii.Error, ValueError):
            return ""

    material = Material(text("ca.crt"), text("ca.key"), text("tls.crt"), text("tls.key"))
    return Secret(str((raw.get("metadata") or {}).get("resourceVersion", "")), material)


def blocks(pem: str) -> list[str]:
    """The certificates of a PEM text, each as PEM."""
    return [f"{block}\n" for block in _BLOCK.findall(pem)]


def fingerprint(block: str) -> str:
    """What tells certificates apart: the SHA-256 of one; '' if it cannot be read."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(block)).hexdigest()
    except (binascii.Error, ValueError):
        return ""
