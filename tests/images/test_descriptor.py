"""Manifests as anybody may have written them: what they say is read, or refused with the place."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.descriptor import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, Descriptor, Malformed, Manifest
from planning.caches.limits import INDEX_ENTRIES, LAYERS
from tests.images.hostile import an_image, descriptor

LAYER = descriptor(b"layer").as_json()


def manifest(media_type: str = OCI_MANIFEST, **changes: Any) -> Manifest:
    document = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": LAYER, "layers": [LAYER]} | changes
    return Manifest.read(orjson.dumps({k: v for k, v in document.items() if v is not ...}), "sha256:0", media_type)


def test_an_image_is_read() -> None:
    image = an_image(100)
    read = Manifest.read(image.manifest, image.descriptor.digest, OCI_MANIFEST)
    assert read.descriptor == image.descriptor
    assert read.config().size == len(image.config)
    assert [layer.digest for layer in read.layers()] == [descriptor(each).digest for each in image.layers]
    assert read.subject() is None and not read.is_index


@pytest.mark.parametrize(
    ("media_type", "changes", "told"),
    [
        (OCI_MANIFEST, {"mediaType": DOCKER_MANIFEST}, f"calls the manifest {OCI_MANIFEST}, and it calls itself"),
        (OCI_MANIFEST, {"manifests": [LAYER]}, "the content of another type"),
        (OCI_INDEX, {"mediaType": OCI_INDEX}, "the content of another type"),
        (OCI_MANIFEST, {"layers": ...}, "the content of another type"),
        ("text/html", {"mediaType": ...}, "of the type 'text/html', which berth does not read"),
        (OCI_MANIFEST, {"mediaType": ["x"]}, "which berth does not read"),
    ],
)
def test_what_could_be_read_as_two_things_is_refused(media_type: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Malformed) as caught:
        manifest(media_type, **changes)
    assert told in str(caught.value)


def test_the_type_may_stand_in_one_place_only() -> None:
    assert manifest(OCI_MANIFEST, mediaType=...).descriptor.media_type == OCI_MANIFEST
    assert manifest("application/octet-stream").descriptor.media_type == OCI_MANIFEST


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ("x", "layers[0]: must be an object"),
        (LAYER | {"digest": "sha256:0"}, "layers[0].digest"),
        (LAYER | {"digest": 7}, "layers[0].digest"),
        (LAYER | {"digest": "sha256:" + "A" * 64}, "layers[0].digest"),
        (LAYER | {"size": -1}, "layers[0].size"),
        (LAYER | {"size": True}, "layers[0].size"),
        (LAYER | {"size": 1.5}, "layers[0].size"),
        (LAYER | {"mediaType": "x"}, "layers[0].mediaType"),
        (LAYER | {"mediaType": "a/b\nc"}, "layers[0].mediaType"),
        (LAYER | {"artifactType": 1}, "layers[0].artifactType"),
        (LAYER | {"annotations": {"a": 1}}, "layers[0].annotations"),
    ],
)
def test_descriptors_are_refused_by_place(raw: Any, told: str) -> None:
    with pytest.raises(Malformed, match=r"^layers\[0\]") as caught:
        manifest(layers=[raw]).layers()
    assert told in str(caught.value)


def test_lists_are_bounded() -> None:
    manifest(layers=[LAYER] * LAYERS).layers()
    with pytest.raises(Malformed, match=f"{LAYERS + 1} are more than the {LAYERS}"):
        manifest(layers=[LAYER] * (LAYERS + 1)).layers()
    index = {"mediaType": OCI_INDEX, "layers": ..., "config": ..., "manifests": [LAYER] * (INDEX_ENTRIES + 1)}
    with pytest.raises(Malformed, match=f"{INDEX_ENTRIES + 1} are more"):
        manifest(OCI_INDEX, **index).images()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=10,
)
PART = st.sampled_from([LAYER, OCI_MANIFEST, OCI_INDEX, LAYER["digest"]]) | JSON
NAMES = ("mediaType", "config", "layers", "manifests", "subject", "annotations", "artifactType", "digest", "size")


@given(
    st.dictionaries(st.sampled_from(NAMES), PART | st.lists(PART, max_size=3), max_size=6).map(orjson.dumps)
    | st.binary(max_size=60),
    st.sampled_from([OCI_MANIFEST, OCI_INDEX, "", "text/plain"]),
)
def test_any_document_is_read_or_refused(data: bytes, media_type: str) -> None:
    with contextlib.suppress(Malformed):
        read = Manifest.read(data, "sha256:0", media_type)
        for part in (read.config, read.layers, read.images, read.subject):
            with contextlib.suppress(Malformed):
                part()


@given(PART)
def test_a_descriptor_is_written_as_it_was_read(raw: Any) -> None:
    with contextlib.suppress(Malformed):
        read = Descriptor.parse(raw, "x")
        assert Descriptor.parse(read.as_json(), "x") == read
