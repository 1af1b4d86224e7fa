"""Looking into images: what they say beside what they hold, and folders that are no images."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from images import layout
from images.build import Said, build, read
from images.descriptor import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST, Descriptor
from images.folder import REF_NAME, Folder
from images.inspection import Inspected, inspect
from images.refused import Refused
from planning.caches import labels
from planning.caches.compatibility import Target
from tests.images import caches
from tests.images.archives import layer, member


def looked(path: Path) -> tuple[Inspected, ...]:
    return asyncio.run(inspect(path))


def handmade(path: Path, body: bytes, told: dict[str, str], media_type: str = OCI_LAYER) -> Folder:
    """An image as somebody else's tool would make it."""
    folder = Folder.create(path)
    config = folder.add_json({"config": {"Labels": told}}, OCI_CONFIG)
    blob = folder.add(body, media_type)
    manifest = {"schemaVersion": 2, "config": config.as_json(), "layers": [blob.as_json()]}
    folder.name(folder.add_json(manifest, OCI_MANIFEST), None)
    return folder


def summary(**target: Any) -> dict[str, str]:
    return {labels.summary("triton"): json.dumps({"targets": [target]})}


def test_what_was_built_holds_what_it_says(tmp_path: Path) -> None:
    caches.kernel(tmp_path / "cache", "a")
    caches.kernel(tmp_path / "cache", "b", target=caches.HIP)
    contents = read(tmp_path / "cache", Said())
    build(contents, tmp_path / "one", tag=None, index=False)
    build(contents, tmp_path / "many", tag=None, index=True)
    (one,) = looked(tmp_path / "one")
    assert not one.warnings and not one.refused and one.extracted is not None and one.extracted.kernels == 2
    assert [each.target for each in looked(tmp_path / "many")] == list(contents.targets)
    assert not [each.warnings for each in looked(tmp_path / "many") if each.warnings or each.refused]


def test_labels_that_lie_are_told(tmp_path: Path) -> None:
    """The GPU of the machine that packed it, as other tools write it."""
    kernel = caches.kernel(tmp_path / "cache")
    members = [member(b"io.triton.cache/%s/%s" % (kernel.name.encode(), path.name.encode()), path.read_bytes())
               for path in kernel.iterdir()]  # fmt: skip
    told = {**summary(backend="cuda", arch="75", warp_size=32), labels.entry_count("triton"): "7",
            labels.CAPTURE_PATH: "/elsewhere"}  # fmt: skip
    handmade(tmp_path / "image", layer(*members), told)
    (found,) = looked(tmp_path / "image")
    assert list(found.warnings) == [
        "Its labels say cuda sm_75 with warps of 32, its kernels are for cuda sm_90 with warps of 32.",
        f"Its labels say /elsewhere, its kernels were compiled at {caches.AT}.",
        "Its labels say 7 kernels, 1 lie there.",
    ]


def test_the_older_layout(tmp_path: Path) -> None:
    kernel = caches.kernel(tmp_path / "cache")
    members = [member(b"io.triton.cache/%s/%s" % (kernel.name.encode(), path.name.encode()), path.read_bytes())
               for path in kernel.iterdir()]  # fmt: skip
    handmade(tmp_path / "image", layer(*members), {}, "application/cache.triton.content.layer.v1+triton")
    (found,) = looked(tmp_path / "image")
    assert found.image.variant == "artifact" and found.extracted is not None
    assert found.extracted.targets == (Target("cuda", "90", 32),)


def test_what_a_node_would_refuse_is_told(tmp_path: Path) -> None:
    handmade(tmp_path / "image", layer(member(b"../evil", b"x")), summary(backend="cuda", arch="90", warp_size=32))
    (found,) = looked(tmp_path / "image")
    assert found.extracted is None and "'../evil'" in found.refused


def test_blobs_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    caches.kernel(tmp_path / "cache")
    built = build(read(tmp_path / "cache", Said()), tmp_path / "image", tag=None, index=False)
    folder = Folder(tmp_path / "image")
    manifest = layout.read_manifest(folder.read(built.top.digest, 2**20, "manifest"))
    blob = folder.blob(manifest.layers[0].digest)
    body = blob.read_bytes()
    blob.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert "other content than its digest says" in looked(tmp_path / "image")[0].refused
    blob.write_bytes(body + b"x")
    assert "bytes, not" in looked(tmp_path / "image")[0].refused
    folder.blob(built.top.digest).write_bytes(b"{}")
    with pytest.raises(Refused, match="other content than its digest says"):
        looked(tmp_path / "image")


def pointing(digest: str, media_type: str = OCI_MANIFEST) -> bytes:
    """An index.json."""
    return json.dumps({"manifests": [{"mediaType": media_type, "digest": digest, "size": 1}]}).encode()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "is no OCI layout folder"),
        (b"{", "index.json: the manifest is not JSON"),
        (b"[]", "index.json: the manifest is not an object"),
        (b" " * (4 * 2**20 + 1), "index.json has more than"),
        (b'{"manifests":[]}', "index.json names no image"),
        (b'{"manifests":[{"mediaType":"x","digest":"sha256:0","size":1}]}', "manifests.0..mediaType: must be"),
        (pointing("../x"), "manifests.0..digest: must be"),
        (pointing("sha256:" + "0" * 64, "a/b"), "neither an image nor an index"),
        (pointing("sha256:" + "0" * 64), "lacks manifest"),
    ],
)  # fmt: skip
def test_folders_that_are_no_images(tmp_path: Path, index: bytes | None, words: str) -> None:
    if index is not None:
        (tmp_path / "index.json").write_bytes(index)
    with pytest.raises(Refused, match=words):
        looked(tmp_path)


def test_of_several_images_one_says_which(tmp_path: Path) -> None:
    """As `pull` puts them beside each other."""
    told = summary(backend="cuda", arch="90", warp_size=32)
    folder = handmade(tmp_path, layer(member(b"io.triton.cache/", b"")), told)
    first = folder.top()
    other = folder.add_json(
        json.loads(folder.read(first.digest, 2**20, "manifest")) | {"annotations": {}}, OCI_MANIFEST
    )

    def holding(*entries: tuple[Descriptor, str]) -> None:
        named = [replace(each, annotations={REF_NAME: tag} if tag else {}).as_json() for each, tag in entries]
        (tmp_path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": named}))

    holding((first, "v1"), (other, "v2"))
    assert [folder.top(wanted).digest for wanted in ("v1", other.digest)] == [first.digest, other.digest]
    holding((first, "v1"), (first, "latest"))
    assert folder.top().digest == folder.top("latest").digest == first.digest, "one image under two tags"
    holding((first, "v1"), (other, ""))
    with pytest.raises(Refused, match=f"names 'v1', '{other.digest}'; say which one with --image"):
        looked(tmp_path)
    with pytest.raises(Refused, match="and nothing that is called 'v3'"):
        asyncio.run(inspect(tmp_path, "v3"))
    (found,) = asyncio.run(inspect(tmp_path, other.digest))
    assert found.digest == other.digest
