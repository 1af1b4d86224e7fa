"""OCI image layout folders (`oci-layout`, `index.json`, `blobs/sha256/`): what `berth cache build` writes and what
`inspect` reads; `images.oci_folder` carries them from and to registries. Every blob is checked against its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from images.descriptor import INDEXES, MANIFESTS, OCI_INDEX, Descriptor, Malformed, Manifest
from images.reference import is_digest
from images.refused import Refused, shown
from planning.caches import limits

REF_NAME = "org.opencontainers.image.ref.name"
MARK = "oci-layout"
INDEX = "index.json"
BLOBS = Path("blobs") / "sha256"
VERSION = "1.0.0"
_NAMED = 16  # images, in a message


def blob_path(folder: Path, digest: str) -> Path:
    """Where a layout has a blob."""
    return folder / BLOBS / digest.removeprefix("sha256:")


def called(entry: Descriptor) -> str:
    """What a layout calls one of its images: by tag, or without one by digest."""
    return entry.annotations.get(REF_NAME, entry.digest)


class Folder:
    """An OCI layout folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> Folder:
        """A new one; Refused if something lies there already."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise Refused("Unsupported", f"{path} exists and is not empty; name a new folder.")
        (path / BLOBS).mkdir(parents=True)
        (path / MARK).write_bytes(canonical({"imageLayoutVersion": VERSION}))
        return cls(path)

    def blob(self, digest: str) -> Path:
        return blob_path(self.path, digest)

    def add(self, body: bytes, media_type: str) -> Descriptor:
        """Writes a blob."""
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        self.blob(digest).write_bytes(body)
        return Descriptor(media_type, digest, len(body))

    def add_json(self, content: Mapping[str, object], media_type: str) -> Descriptor:
        return self.add(canonical(content), media_type)

    def name(self, top: Descriptor, tag: str | None) -> None:
        """Makes `top` what the folder is about."""
        entry = replace(top, annotations={REF_NAME: tag} if tag else {})
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry.as_json()]}
        (self.path / INDEX).write_bytes(canonical(index))

    def read(self, digest: str, most: int, what: str) -> bytes:
        """A blob of at most `most` bytes; Refused if it is missing, longer, or not what its name says."""
        if not is_digest(digest):
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

    def check(self, blob: Descriptor) -> Path:
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

    def top(self, wanted: str | None = None) -> Descriptor:
        """The image or index that the folder calls `wanted` (a tag or a digest), else the only one in index.json."""
        entries = self._entries()
        chosen = [each for each in entries if wanted is None or wanted in (each.digest, called(each))]
        # one image under several tags is one image
        if len({each.digest for each in chosen}) != 1:
            raise Refused("Unsupported", self._ambiguous(entries, chosen, wanted))
        top = chosen[0]
        if top.media_type not in (*MANIFESTS, *INDEXES):
            raise Refused(
                "Unsupported", f"{shown(called(top))} in {self.path / INDEX} is neither an image nor an index."
            )
        return top

    def _ambiguous(self, entries: Sequence[Descriptor], chosen: Sequence[Descriptor], wanted: str | None) -> str:
        names = ", ".join(shown(called(each)) for each in entries[:_NAMED]) + (", …" if entries[_NAMED:] else "")
        what = f"{self.path / INDEX} names {names or 'no image'}"
        if wanted is not None:
            return f"{what}, {'several that are' if chosen else 'and nothing that is'} called {shown(wanted)}."
        return f"{what}; say which one with --image." if entries else f"{what}."

    def _entries(self) -> tuple[Descriptor, ...]:
        try:
            with (self.path / INDEX).open("rb") as file:
                body = file.read(limits.MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise Refused("Unsupported", f"{self.path} is no OCI layout folder: it has no {INDEX}.") from None
        if len(body) > limits.MANIFEST_BYTES:
            raise Refused("TooLarge", f"{self.path / INDEX} has more than {limits.MANIFEST_BYTES} bytes.")
        try:
            return Manifest.read(body, "", OCI_INDEX).images()
        except Malformed as wrong:
            raise Refused("Malformed", f"{self.path / INDEX}: {wrong}.") from None


def canonical(content: Mapping[str, object]) -> bytes:
    """JSON that is the same bytes whenever the content is."""
    return json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=True).encode()


def move_into(folder: Folder, file: Path, digest: str) -> None:
    """Makes a finished file a blob of the folder."""
    os.replace(file, folder.blob(digest))
