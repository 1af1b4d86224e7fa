"""What a manifest says about something else: its type, digest and size. Read from JSON that anybody may have written.

For the registry client and all that follow a manifest's content. A descriptor is a claim until the bytes were counted
and hashed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from images.reference import is_digest
from planning.caches.limits import INDEX_ENTRIES, LAYERS

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
INDEXES = (OCI_INDEX, DOCKER_LIST)

_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}")
_LARGEST = 2**63 - 1


class Malformed(ValueError):
    """A document is not what the specification says; the message says where and why."""


@dataclass(frozen=True)
class Descriptor:
    """Of a manifest, a config or a layer."""

    media_type: str
    digest: str
    size: int
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: object, place: str) -> Descriptor:
        """Raises Malformed, whatever `raw` is."""
        if not isinstance(raw, dict):
            raise Malformed(f"{place}: must be an object")
        media_type, digest, size = raw.get("mediaType"), raw.get("digest"), raw.get("size")
        if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
            raise Malformed(f"{place}.mediaType: must be a media type")
        if not isinstance(digest, str) or not is_digest(digest):
            raise Malformed(f"{place}.digest: must be sha256: and 64 hexadecimal digits")
        if type(size) is not int or not 0 <= size <= _LARGEST:
            raise Malformed(f"{place}.size: must be a number of bytes")
        artifact_type = raw.get("artifactType") or ""
        annotations = raw.get("annotations") or {}
        if not isinstance(artifact_type, str) or (artifact_type and not _MEDIA_TYPE.fullmatch(artifact_type)):
            raise Malformed(f"{place}.artifactType: must be a media type")
        if not isinstance(annotations, dict) or not all(isinstance(value, str) for value in annotations.values()):
            raise Malformed(f"{place}.annotations: must be texts by name")
        return cls(media_type, digest, size, artifact_type, annotations)

    def as_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type:
            result["artifactType"] = self.artifact_type
        if self.annotations:
            result["annotations"] = dict(self.annotations)
        return result


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index as it came: the bytes are what its digest is of."""

    descriptor: Descriptor
    data: bytes
    document: Mapping[str, Any]

    @classmethod
    def read(cls, data: bytes, digest: str, media_type: str) -> Manifest:
        """`media_type` is what the registry called it. Raises Malformed: also where it could be read as two things."""
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise Malformed(f"the manifest is not JSON ({error})") from None
        if not isinstance(document, dict):
            raise Malformed("the manifest is not an object")
        said = document.get("mediaType", media_type)
        if said not in (*MANIFESTS, *INDEXES):
            raise Malformed(f"the manifest is of the type {str(said)[:100]!r}, which berth does not read")
        if media_type in (*MANIFESTS, *INDEXES) and media_type != said:
            raise Malformed(f"the registry calls the manifest {media_type}, and it calls itself {said}")
        if (said in INDEXES) != ("manifests" in document) or (said in INDEXES) == ("layers" in document):
            raise Malformed(f"the manifest calls itself {said} and has the content of another type")
        return cls(Descriptor(said, digest, len(data)), data, document)

    @property
    def is_index(self) -> bool:
        return self.descriptor.media_type in INDEXES

    def images(self) -> tuple[Descriptor, ...]:
        """Of an index: what it offers. Raises Malformed."""
        return _descriptors(self.document.get("manifests"), "manifests", INDEX_ENTRIES)

    def listed(self) -> tuple[Descriptor, ...]:
        """Of an index that anybody may add to: what can be read of it, so that no entry hides the others."""
        found = []
        raw = self.document.get("manifests")
        for each in raw if isinstance(raw, list) else ():
            with contextlib.suppress(Malformed):
                found.append(Descriptor.parse(each, "manifests"))
        return tuple(found)

    def config(self) -> Descriptor:
        """Of an image. Raises Malformed."""
        return Descriptor.parse(self.document.get("config"), "config")

    def layers(self) -> tuple[Descriptor, ...]:
        """Of an image. Raises Malformed."""
        return _descriptors(self.document.get("layers"), "layers", LAYERS)

    def subject(self) -> Descriptor | None:
        """What it refers to, such as the image that it is a signature of. Raises Malformed."""
        raw = self.document.get("subject")
        return None if raw is None else Descriptor.parse(raw, "subject")


def _descriptors(raw: object, place: str, most: int) -> tuple[Descriptor, ...]:
    if not isinstance(raw, list):
        raise Malformed(f"{place}: must be a list")
    if len(raw) > most:
        raise Malformed(f"{place}: {len(raw)} are more than the {most} that are allowed")
    return tuple(Descriptor.parse(each, f"{place}[{index}]") for index, each in enumerate(raw))
