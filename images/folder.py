"""OCI image layout folders (`oci-layout`, `index.json`, `blobs/sha256/`): what `berth cache build` writes and what
`inspect` and `push` read. Every blob is checked against its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from images.layout import INDEXES, MANIFESTS, Blob
from images.refused import Refused, shown
from planning.caches import limits
from planning.caches.labels import parse_json

REF_NAME = "org.opencontainers.image.ref.name"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHUNK = limits.MIB


class Folder:
    """An OCI layout folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> Folder:
        """A new one; Refused if something lies there already."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise Refused("Unsupported", f"{path} exists and is not empty; name a new folder.")
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        return cls(path)

    def blob(self, digest: str) -> Path:
        return self.path / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def add(self, body: bytes, media_type: str) -> Blob:
        """Writes a blob."""
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        self.blob(digest).write_bytes(body)
        return Blob(media_type, digest, len(body))

    def add_json(self, content: Mapping[str, object], media_type: str) -> Blob:
        return self.add(canonical(content), media_type)

    def name(self, top: Blob, tag: str | None) -> None:
        """Makes `top` what the folder is about."""
        annotations = {"annotations": {REF_NAME: tag}} if tag else {}
        entry = {**descriptor(top), **annotations}
        (self.path / "index.json").write_bytes(
            canonical({"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": [entry]})
        )

    def read(self, digest: str, most: int, what: str) -> bytes:
        """A blob of at most `most` bytes; Refused if it is missing, longer, or not what its name says."""
        if not _DIGEST.fullmatch(digest):
            raise Refused("Malformed", f"{shown(digest)} is no digest that berth knows (sha256).")
        try:
            with self.blob(digest).open("rb") as file:
                body = file.read(most + 1)
        except FileNotFoundError:
            raise Refused("Malformed", f"{self.path} lacks {what} {digest}.") from None
        if len(body) > most:
            raise Refused("TooLarge", f"{what.capitalize()} {digest} has more than {most} bytes.")
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
            raise Refused("Inconsistent", f"{what.capitalize()} {digest} has other content than its digest says.")
        return body

    def check(self, blob: Blob) -> Path:
        """Where a large blob lies, once its size and digest are seen to be right."""
        path = self.blob(blob.digest)
        if not path.is_file():
            raise Refused("Malformed", f"{self.path} lacks layer {blob.digest}.")
        if path.stat().st_size != blob.size:
            raise Refused("Inconsistent", f"Layer {blob.digest} has {path.stat().st_size} bytes, not {blob.size}.")
        with path.open("rb") as file:
            if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" != blob.digest:
                raise Refused("Inconsistent", f"Layer {blob.digest} has other content than its digest says.")
        return path

    def top(self) -> Blob:
        """The image or index that the folder is about: the only one in index.json."""
        try:
            with (self.path / "index.json").open("rb") as file:
                raw = parse_json(file.read(limits.MANIFEST_BYTES + 1), limits.MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise Refused("Unsupported", f"{self.path} is no OCI layout folder: it has no index.json.") from None
        except ValueError as wrong:
            raise Refused("Malformed", f"{self.path}/index.json {wrong}.") from None
        listed = raw.get("manifests") if isinstance(raw, Mapping) else None
        if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], Mapping):
            raise Refused("Unsupported", f"{self.path}/index.json must name exactly one image or index.")
        media, digest, size = (listed[0].get(name) for name in ("mediaType", "digest", "size"))
        if media not in (*MANIFESTS, *INDEXES) or not isinstance(digest, str) or not isinstance(size, int):
            raise Refused("Unsupported", f"{self.path}/index.json names neither an image nor an index.")
        return Blob(str(media), digest, size)


def canonical(content: Mapping[str, object]) -> bytes:
    """JSON that is the same bytes whenever the content is."""
    return json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=True).encode()


def descriptor(blob: Blob, annotations: Mapping[str, str] | None = None) -> dict[str, object]:
    """A blob as manifests and indexes name it."""
    told = {"mediaType": blob.media_type, "digest": blob.digest, "size": blob.size}
    return {**told, **({"annotations": dict(annotations)} if annotations else {})}


def move_into(folder: Folder, file: Path, digest: str) -> None:
    """Makes a finished file a blob of the folder."""
    os.replace(file, folder.blob(digest))
