"""Labels as other tools write them, and as nobody should."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.caches import labels, limits
from planning.caches.compatibility import Target
from planning.caches.labels import Packed, read
from tests.images.archives import short

SUMMARY = "cache.triton.image/summary"


def test_an_image_of_mcvs() -> None:
    told = {
        "cache.vllm.image/entry-count": "1",
        "cache.vllm.image/cache-size-bytes": "35702329",
        "cache.vllm.image/format": "binary",
        "cache.vllm.image/summary": json.dumps(
            {"targets": [{"backend": "cuda", "arch": "sm_75", "warp_size": 32, "ptx_version": 590}]}
        ),
    }
    assert read(told) == Packed("vllm", (Target("cuda", "75", 32),), 1, 35702329)


def test_the_summary_decides_the_kind_and_tritons_goes_first() -> None:
    one = json.dumps({"targets": []})
    assert read({labels.summary("triton"): one, labels.summary("vllm"): one}).kind == "triton"
    assert read({}).kind is None


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({SUMMARY: "{"}, "label cache.triton.image/summary: is no JSON"),
        ({SUMMARY: "[" * 100_000}, "is no JSON"),
        ({SUMMARY: " " * (limits.SUMMARY_BYTES + 1)}, "is longer than"),
        ({SUMMARY: "\ud800" * limits.SUMMARY_BYTES}, "is longer than"),
        ({SUMMARY: "[]"}, "has no list of at most"),
        ({SUMMARY: json.dumps({"targets": [{}] * 300})}, "has no list of at most"),
        ({SUMMARY: json.dumps({"targets": [{"backend": "cuda"}]})}, "target 0 has no backend, arch and warp_size"),
        ({SUMMARY: '{"targets":[]}', "cache.triton.image/entry-count": "many"}, "entry-count: is no number"),
        ({SUMMARY: '{"targets":[]}', "cache.triton.image/cache-size-bytes": "9" * 5000}, "is no number"),
        ({labels.ENVIRONMENT: "[]"}, "environment: is no object"),
        ({labels.ENVIRONMENT: '{"A":1}'}, "environment: is no object"),
        ({labels.CAPTURE_PATH: "/a/../b"}, "capture-path: is no absolute path"),
        ({labels.CAPTURE_PATH: "a"}, "capture-path: is no absolute path"),
        ({labels.TRITON_VERSION: "9" * 200}, "triton-version: is no text of at most 128"),
    ],
    ids=short,
)
def test_what_is_wrong_is_told_and_the_rest_counts(told: dict[str, str], words: str) -> None:
    found = read({labels.PTXAS_VERSION: "12.9", **told})
    assert words in found.problems[0] and found.ptxas == "12.9"


names = st.sampled_from([SUMMARY, labels.ENVIRONMENT, labels.CAPTURE_PATH, labels.TRITON_KEY])
values = st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)


@given(st.dictionaries(names, values))
def test_no_label_is_too_odd(told: dict[str, str]) -> None:
    found = read(told)
    assert found.environment is None or all(isinstance(each, str) for each in found.environment.values())
