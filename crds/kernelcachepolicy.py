"""KernelCachePolicy (tkm.io/v1alpha1): who must have signed which cache images, for everyone who reads one.

Every policy that matches an image must be satisfied; of one policy's signers, one suffices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictStr

from crds.gpuworkload import SPEC_LIMIT, CRDModel, NamespaceName, ObjectName, serialised_size

KIND = "KernelCachePolicy"
PLURAL = "kernelcachepolicies"
PEM_LIMIT = 16 * 1024

_IMAGES = re.compile(r"[a-z0-9*\[][a-z0-9._:/*\[\]-]{0,510}")


def _image_pattern(pattern: str) -> str:
    if not _IMAGES.fullmatch(pattern):
        raise ValueError("is no pattern of images, such as registry.example/team/* (lower case, without tag or digest)")
    if "/" not in pattern and "**" not in pattern:
        raise ValueError("fits no image: * stands for no /; write ** for all, or registry.example/team/*")
    return pattern


def _anchored(pattern: str) -> str:
    if not (pattern.startswith("^") and pattern.endswith("$")):
        raise ValueError("must begin with ^ and end with $, so that it says the whole")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as wrong:
        raise ValueError(f"is no regular expression: {wrong}") from None
    return pattern


ImagePattern = Annotated[StrictStr, Field(min_length=1, max_length=512), AfterValidator(_image_pattern)]
Exact = Annotated[StrictStr, Field(min_length=1, max_length=512)]
Anchored = Annotated[StrictStr, Field(min_length=3, max_length=512), AfterValidator(_anchored)]
PEM = Annotated[StrictStr, Field(min_length=32, max_length=PEM_LIMIT, pattern=r"^\s*-----BEGIN ")]


def _exactly_one(*names: str) -> ConfigDict:
    rule = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in names)
    told = f"exactly one of {', '.join(names)} must be given"
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": [{"rule": f"{rule} == 1", "message": told}]})


class ConfigMapKey(CRDModel):
    """A key of a ConfigMap in berth-system."""

    name: ObjectName
    key: Annotated[StrictStr, Field(min_length=1, max_length=253)]


class Keyless(CRDModel):
    """A certificate that an identity was given for a moment, with proofs that are checked without any network."""

    issuer: Exact | None = Field(default=None, description="Who vouched for the identity, exactly.")
    issuer_pattern: Anchored | None = Field(default=None)
    identity: Exact | None = Field(default=None, description="The certificate's subject alternative name, exactly.")
    identity_pattern: Anchored | None = Field(default=None)
    trusted_root: ConfigMapKey = Field(
        description="Where trusted_root.json lies: certificate authorities, logs, time stamps."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.issuer) != has(self.issuerPattern)",
                    "message": "exactly one of issuer, issuerPattern must be given",
                },
                {
                    "rule": "has(self.identity) != has(self.identityPattern)",
                    "message": "exactly one of identity, identityPattern must be given",
                },
            ]
        }
    )


class Certificate(CRDModel):
    """A certificate of one's own authority, without any log."""

    authorities: PEM = Field(description="The roots, and intermediates if need be, as PEM.")
    identity: Exact | None = Field(default=None, description="The certificate's subject alternative name, exactly.")
    identity_pattern: Anchored | None = Field(default=None)
    trusted_root: ConfigMapKey | None = Field(
        default=None,
        description="Where trusted_root.json lies, whose time stamps say when a certificate signed that ended since; "
        "left out, it must be valid when it is checked.",
    )

    model_config = _exactly_one("identity", "identityPattern")


class Signer(CRDModel):
    """One who may have signed: by a pinned key, by an identity, or by an authority of one's own."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=128)]
    key: PEM | None = Field(default=None, description="A public key as PEM: ECDSA P-256, P-384, P-521, Ed25519 or RSA.")
    keyless: Keyless | None = None
    certificate: Certificate | None = None

    model_config = _exactly_one("key", "keyless", "certificate")


class KernelCachePolicySpec(CRDModel):
    """What a platform engineer demands of cache images."""

    images: Annotated[list[ImagePattern], Field(min_length=1, max_length=64)] = Field(
        description="Repositories: * stands for any characters but /, ** for any."
    )
    namespaces: Annotated[list[NamespaceName], Field(max_length=256)] = Field(
        default_factory=list,
        description="Whose caches it is about; left out, all, and those of the cluster.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    signers: Annotated[list[Signer], Field(min_length=1, max_length=16)] = Field(
        description="One of them must have signed.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    allow_skipping: StrictBool = Field(
        default=False, description="Whether validateSignature: false counts for these images."
    )

    @classmethod
    def parse(cls, raw: object) -> tuple[KernelCachePolicySpec | None, str]:
        """The spec, or None and a sentence with path and reason. Never raises, whatever `raw` is."""
        if not isinstance(raw, Mapping):
            return None, "spec: must be an object"
        if serialised_size(raw, 2 * SPEC_LIMIT) > 2 * SPEC_LIMIT:
            return None, f"spec: must be at most {2 * SPEC_LIMIT // 1024} KiB as JSON"
        return cls.validated(raw, "spec")
