"""What is a reference, what is not, and that a refusal says what to write."""

from __future__ import annotations

import contextlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.reference import LIMIT, BadReference, Reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("registry.example/team/cache:v1", "registry.example", "team/cache", "v1", ""),
        ("registry.example/cache", "registry.example", "cache", "latest", ""),
        ("localhost:5000/a/b/c/d-e__f.g_h:1.0_x", "localhost:5000", "a/b/c/d-e__f.g_h", "1.0_x", ""),
        ("localhost/a", "localhost", "a", "latest", ""),
        (f"r.example:443/a@{DIGEST}", "r.example:443", "a", "", DIGEST),
        (f"r.example/a:v2@{DIGEST}", "r.example", "a", "v2", DIGEST),
        ("R.Example/a", "r.example", "a", "latest", ""),
        ("10.0.0.7:5000/a", "10.0.0.7:5000", "a", "latest", ""),
        ("[::1]:5000/a:v1", "[::1]:5000", "a", "v1", ""),
        ("docker.io/triton", "docker.io", "library/triton", "latest", ""),
        ("index.docker.io/team/triton", "docker.io", "team/triton", "latest", ""),
    ],
)
def test_references(text: str, registry: str, repository: str, tag: str, digest: str) -> None:
    assert Reference.parse(text) == Reference(registry, repository, tag, digest)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cache:v1", "names no registry: write it with its host, such as 'registry.example/cache:v1'"),
        ("team/cache", "names no registry: write it with its host, such as 'registry.example/team/cache'"),
        ("", "names no registry"),
        ("/a", "names no registry"),
        ("registry.example/", "cannot be a part of a repository's name"),
        ("registry.example/Team/cache", "'Team' cannot be a part"),
        ("registry.example/a//b", "'' cannot be a part"),
        ("registry.example/a/../b", "'..' cannot be a part"),
        ("registry.example/a:", "the tag must be"),
        ("registry.example/a:-x", "the tag must be"),
        ("registry.example/a:" + "x" * 129, "the tag must be"),
        ("registry.example/a@sha256:ABC", "what follows @"),
        (f"registry.example/a@{DIGEST}@{DIGEST}", "what follows @"),
        ("registry.example/a@sha512:" + "0" * 128, "what follows @"),
        ("registry.example:0/a", "the port"),
        ("registry.example:65536/a", "the port"),
        ("registry.example:/a", "the port"),
        ("-x.example/a", "is not the name of a host"),
        ("https://registry.example/a", "the port"),
        ("user:pw@registry.example/a", "what follows @"),
        ("[::1/a", "is not an IPv6 address"),
        ("[1.2.3.4]/a", "is not an IPv6 address"),
        ("registry.example/" + "a" * 256, "longer than 255"),
        ("registry.example/" + "a/" * LIMIT, f"longer than {LIMIT} bytes"),
        ("registry.example/a b", "cannot be a part"),
        ("registry.example/a\n", "cannot be a part"),
        ("registry.exämple/a", "is not the name of a host"),
    ],
)
def test_what_is_none_is_told_why(text: str, told: str) -> None:
    with pytest.raises(BadReference) as caught:
        Reference.parse(text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


WORD = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
COMPONENT = st.lists(WORD, min_size=1, max_size=3).flatmap(
    lambda words: st.sampled_from([".", "_", "__", "-", "---"]).map(lambda between: between.join(words))
)
REGISTRY = st.builds(
    lambda words, port: ".".join(words) + ("" if port is None else f":{port}"),
    st.lists(WORD, min_size=2, max_size=4),
    st.none() | st.integers(1, 65535),
)
TAG = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=1).flatmap(
    lambda first: st.text(string.ascii_letters + string.digits + "_.-", max_size=40).map(lambda rest: first + rest)
)


@given(REGISTRY, st.lists(COMPONENT, min_size=1, max_size=5).map("/".join), TAG | st.just(""), st.booleans())
def test_what_is_written_is_read_back(registry: str, repository: str, tag: str, digest: bool) -> None:
    reference = Reference(registry, repository, tag, DIGEST if digest or not tag else "")
    assert Reference.parse(str(reference)) == reference


@given(st.text(max_size=80) | st.text("ab.:/@[]-_sha256", max_size=80))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    with contextlib.suppress(BadReference):
        reference = Reference.parse(text)
        assert Reference.parse(str(reference)) == reference
        assert reference.registry and reference.repository and reference.target


@given(st.text(min_size=LIMIT, max_size=2 * LIMIT))
def test_a_refusal_is_short_whatever_was_written(text: str) -> None:
    with pytest.raises(BadReference) as caught:
        Reference.parse(text + "é")
    assert len(str(caught.value)) < 600


def test_a_digest_is_what_counts() -> None:
    reference = Reference.parse(f"r.example/a:v1@{DIGEST}")
    assert reference.target == DIGEST
    assert reference.tagged("v2").target == "v2"
    assert str(reference.tagged("v2").at(DIGEST)) == f"r.example/a:v2@{DIGEST}"
