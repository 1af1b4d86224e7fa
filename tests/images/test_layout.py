"""Manifests, configs and indexes: both layouts of cache images, and everything that a hostile registry could answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.descriptor import DOCKER_LAYER, MANIFESTS, OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST
from images.layout import image_for, is_index, read_image, read_index, read_manifest
from images.refused import Refused
from planning.caches import labels, limits
from planning.caches.compatibility import Target
from tests.images.archives import short

DIGEST = "sha256:" + "a" * 64
SUMMARY = json.dumps({"targets": [{"backend": "cuda", "arch": "90", "warp_size": 32}]})


def blob(media_type: str = OCI_LAYER, size: object = 100, digest: object = DIGEST) -> dict[str, object]:
    return {"mediaType": media_type, "digest": digest, "size": size}


def manifest(*layers: object, config: object = None, **more: object) -> bytes:
    return json.dumps({"schemaVersion": 2, "config": config or blob(OCI_CONFIG), "layers": layers, **more}).encode()


def config(**told: str) -> bytes:
    return json.dumps({"config": {"Labels": {name.replace("__", "/"): value for name, value in told.items()}}}).encode()


TRITON = json.dumps({"config": {"Labels": {labels.summary("triton"): SUMMARY}}}).encode()
VLLM = json.dumps({"config": {"Labels": {labels.summary("vllm"): SUMMARY}}}).encode()


@pytest.mark.parametrize("media_type", [OCI_LAYER, DOCKER_LAYER])
@pytest.mark.parametrize("top", MANIFESTS)
def test_the_ordinary_layout_whatever_media_type_the_manifest_has(media_type: str, top: str) -> None:
    found = read_image(read_manifest(manifest(blob(media_type), mediaType=top)), TRITON)
    assert (found.variant, found.kind, found.packed.targets) == ("compat", "triton", (Target("cuda", "90", 32),))


def test_the_content_and_its_manifest_may_be_two_layers() -> None:
    assert len(read_image(read_manifest(manifest(blob(), blob())), VLLM).layers) == 2


@pytest.mark.parametrize("kind", ["triton", "vllm"])
@pytest.mark.parametrize("body", [b"{}", b"", b"no json", b'{"config":{}}'])
def test_the_older_layout_is_known_by_its_layer(kind: str, body: bytes) -> None:
    found = read_image(read_manifest(manifest(blob(f"application/cache.{kind}.content.layer.v1+{kind}"))), body)
    assert (found.variant, found.kind, found.packed.targets) == ("artifact", kind, ())


def test_the_older_layout_has_one_layer_and_agrees_with_its_labels() -> None:
    special = "application/cache.triton.content.layer.v1+triton"
    with pytest.raises(Refused, match="Layer 0 is of media type"):
        read_manifest(manifest(blob(special), blob(special)))
    with pytest.raises(Refused, match="Layer 0 is of media type"):
        read_manifest(manifest(blob("application/cache.triton.content.layer.v1+vllm")))
    with pytest.raises(Refused, match="The layer says triton, the labels say vllm"):
        read_image(read_manifest(manifest(blob(special))), VLLM)


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        (b"", "Malformed", "The manifest is no JSON"),
        (b"[]", "Malformed", "no JSON object"),
        (b"[" * 500_000, "Malformed", "is no JSON"),
        (b" " * (limits.MANIFEST_BYTES + 1), "Malformed", "is longer than"),
        (b'{"manifests":[]}', "Unsupported", "is an index"),
        (manifest(), "Malformed", "names no layers"),
        (manifest(*[blob()] * 17), "TooLarge", "17 layers"),
        (manifest(blob(size=0)), "Malformed", "Layer 0 has 0 bytes"),
        (manifest(blob(size=2**40)), "TooLarge", "more than 8 GiB"),
        (manifest(blob(size=-1)), "Malformed", "Layer 0 has no size"),
        (manifest(blob(size=True)), "Malformed", "Layer 0 has no size"),
        (manifest(blob(digest="sha256:../../x")), "Malformed", "no mediaType and digest"),
        (manifest(blob(digest="md5:" + "a" * 32)), "Malformed", "no mediaType and digest"),
        (manifest(blob("application/vnd.oci.image.layer.v1.tar+zstd")), "Unsupported", r"tar\+zstd"),
        (manifest(blob(), config=blob(OCI_CONFIG, 2**30)), "TooLarge", "The config has"),
        (manifest("layer"), "Malformed", "Layer 0 has no mediaType"),
    ],
    ids=short,
)
def test_manifests_that_are_refused(body: bytes, reason: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        read_manifest(body)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "The config is no JSON"),
        (b"{}", "it is no kernel cache"),
        (config(), "it is no kernel cache"),
        (b'{"config":{"Labels":[]}}', "Labels are no object of texts"),
        (b'{"config":{"Labels":{"a":1}}}', "Labels are no object of texts"),
    ],
    ids=short,
)
def test_configs_that_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read_image(read_manifest(manifest(blob())), body)


def entry(target: object, digest: str = DIGEST, media_type: str = OCI_MANIFEST) -> dict[str, object]:
    return {**blob(media_type, 500, digest), "annotations": {labels.TARGET: json.dumps(target)}}


def index(*entries: object) -> bytes:
    return json.dumps({"schemaVersion": 2, "manifests": entries}).encode()


def test_an_index_has_an_image_for_each_gpu_and_other_things() -> None:
    attestation = {**blob(OCI_MANIFEST), "platform": {"os": "unknown", "architecture": "unknown"}}
    body = index(attestation, entry({"backend": "rocm", "arch": "gfx942", "warp_size": 64}), "odd", None)
    (found,) = read_index(body)
    assert is_index(body) and found.target == Target("hip", "gfx942", 64) and found.size == 500
    assert not is_index(manifest(blob()))


def test_an_index_of_somebody_elses_builder_has_an_image_for_the_cpu() -> None:
    attestation = {**blob(OCI_MANIFEST), "platform": {"os": "unknown", "architecture": "unknown"}}
    image = {**blob(OCI_MANIFEST, 7), "platform": {"os": "linux", "architecture": "amd64"}}
    body = index(None, attestation, image)
    found = image_for(body, "x86_64")
    assert read_index(body) == () and found is not None and found.size == 7
    assert image_for(body, "aarch64") is None and image_for(b"{}", "x86_64") is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (index(*[entry({})] * 300), "names 300 images"),
        (index(entry({})), "names no GPU"),
        (index({**blob(OCI_MANIFEST), "annotations": {labels.TARGET: "{"}}), "is no JSON"),
        (index({**blob(OCI_MANIFEST), "annotations": {labels.TARGET: 5}}), "is not text"),
        (index(entry({}, media_type=OCI_INDEX)), "is of media type"),
        (b'{"manifests":5}', "no list of manifests"),
    ],
    ids=short,
)
def test_indexes_that_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read_index(body)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=10) | st.sampled_from([True, DIGEST, OCI_LAYER, OCI_CONFIG, SUMMARY]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["manifests", "layers", "config", "mediaType", "digest", "size", "annotations", "Labels",
                         labels.TARGET, labels.summary("triton")]), inner),
    max_leaves=15,
)  # fmt: skip


@given(values, values)
def test_no_answer_of_a_registry_is_too_odd(first: Any, second: Any) -> None:
    try:
        read_index(json.dumps(first).encode())
        image_for(json.dumps(first).encode(), "x86_64")
    except Refused:
        pass
    try:
        found = read_image(read_manifest(json.dumps(first).encode()), json.dumps(second).encode())
    except Refused:
        return
    assert found.layers
