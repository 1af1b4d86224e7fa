"""Which signatures of an image are looked at: both places, within bounds, and nobody can hide one for good."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from images.signatures import limits, signing
from images.signatures.discovery import Found, Referrer, discover, sig_tag
from images.signatures.envelopes import BUNDLE_TYPE
from tests.images.signatures.rig import DIGEST, MemoryRepository, digest_of, new_key

KEY = new_key()
BUNDLE = signing.sign(DIGEST, KEY)


def find(repository: MemoryRepository, *good: str, seed: int = 1) -> Found:
    return asyncio.run(discover(repository, DIGEST, good, seed))


def layer(number: int) -> tuple[bytes, dict[str, str]]:
    return b"{}", {"dev.cosignproject.cosign/signature": str(number)}


def test_both_places_are_looked_at() -> None:
    repository = MemoryRepository()
    place = repository.add_bundle(BUNDLE)
    repository.add_layers(layer(1), layer(2))
    found = find(repository)
    assert {each.form for each in found.candidates} == {"bundle", "simple"}
    assert [each.content for each in found.candidates if each.place == place] == [BUNDLE]
    assert len({each.place for each in found.candidates}) == 3 and found.more == 0


def test_an_image_without_signatures() -> None:
    assert find(MemoryRepository()) == Found()


def test_what_says_it_is_something_else_is_not_asked_for() -> None:
    repository = MemoryRepository(
        listed=[
            Referrer("sha256:" + "1" * 64, 10, "application/spdx+json"),
            Referrer(
                "sha256:" + "2" * 64,
                10,
                BUNDLE_TYPE,
                {"dev.sigstore.bundle.predicateType": "https://slsa.dev/provenance/v1"},
            ),
        ]
    )
    assert find(repository) == Found()
    assert repository.asked == [sig_tag(DIGEST)]


@pytest.mark.parametrize(
    "listed_as", ["", "application/vnd.oci.empty.v1+json", "application/vnd.oci.image.config.v1+json"]
)
def test_registries_that_do_not_tell_the_type(listed_as: str) -> None:
    repository = MemoryRepository()
    repository.add_bundle(BUNDLE)
    repository.listed = [Referrer(each.digest, each.size, listed_as) for each in repository.listed]
    sbom = json.dumps({"artifactType": "application/spdx+json", "layers": [{"mediaType": "text/spdx"}]}).encode()
    repository.manifests[digest_of(sbom)] = sbom
    repository.listed.append(Referrer(digest_of(sbom), len(sbom), listed_as))
    assert [each.content for each in find(repository).candidates] == [BUNDLE]


@pytest.mark.parametrize("false_bundles", [20, 500])
@pytest.mark.parametrize("false_layers", [0, 20, 500])
def test_a_flood_is_bounded_and_hides_nothing_for_good(false_bundles: int, false_layers: int) -> None:
    repository = MemoryRepository()
    for number in range(false_bundles):
        repository.add_bundle(b"%d" % number)
    place = repository.add_bundle(BUNDLE)
    repository.add_layers(*(layer(number) for number in range(false_layers)))
    drawn = [find(repository, seed=seed) for seed in range(200)]
    for found in drawn:
        assert len(found.candidates) == min(limits.CANDIDATES, false_bundles + false_layers + 1)
        assert found.more == false_bundles + false_layers + 1 - len(found.candidates)
    assert any(place in [each.place for each in found.candidates] for found in drawn)
    assert all(place in [each.place for each in find(repository, place, seed=seed).candidates] for seed in range(20))


def test_neither_place_crowds_out_the_other() -> None:
    repository = MemoryRepository()
    for number in range(100):
        repository.add_bundle(b"%d" % number)
    repository.add_layers(*(layer(number) for number in range(100)))
    assert sum(each.form == "bundle" for each in find(repository).candidates) == limits.CANDIDATES // 2


def test_what_was_good_before_comes_first_in_the_older_place_too() -> None:
    repository = MemoryRepository()
    repository.add_layers(*(layer(number) for number in range(100)))
    place = next(each.place for seed in range(9) for each in find(repository, seed=seed).candidates)
    assert all(place in [each.place for each in find(repository, place, seed=seed).candidates] for seed in range(20))


def manifest(**fields: Any) -> bytes:
    layer = {"mediaType": BUNDLE_TYPE, "digest": digest_of(BUNDLE), "size": len(BUNDLE)}
    return json.dumps({"artifactType": BUNDLE_TYPE, "layers": [layer]} | fields).encode()


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (manifest(layers=[]), "exactly one layer"),
        (manifest(layers=7), "exactly one layer"),
        (manifest(layers=[{"mediaType": BUNDLE_TYPE}] * 2), "exactly one layer"),
        (manifest(layers=[{"mediaType": BUNDLE_TYPE}]), "no digest"),
        (manifest(layers=[{"mediaType": BUNDLE_TYPE, "digest": "../../etc/passwd", "size": 9}]), "no digest"),
        (
            manifest(layers=[{"mediaType": BUNDLE_TYPE, "digest": digest_of(b"x"), "size": 9}]),
            "missing in the registry",
        ),
        (
            manifest(layers=[{"mediaType": BUNDLE_TYPE, "digest": digest_of(BUNDLE), "size": 2**31}]),
            "has 2147483648 bytes",
        ),
        (manifest(layers=[{"mediaType": BUNDLE_TYPE, "digest": digest_of(BUNDLE), "size": "9"}]), "has 9 bytes"),
        (manifest(layers=[{"mediaType": BUNDLE_TYPE, "digest": digest_of(BUNDLE), "size": -1}]), "has -1 bytes"),
    ],
    ids=range(11),
)
def test_a_false_manifest_is_a_bad_signature_and_hides_no_other(raw: bytes, told: str) -> None:
    repository = MemoryRepository()
    good = repository.add_bundle(BUNDLE)
    repository.manifests[digest_of(raw)] = raw
    repository.listed.append(Referrer(digest_of(raw), len(raw), BUNDLE_TYPE))
    problems = {each.place: each.problem for each in find(repository).candidates}
    assert problems[good] == "" and told in problems[f"bundle {digest_of(raw)}"]


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"{", "is no JSON"),
        (
            json.dumps({"layers": [{"mediaType": "application/vnd.dev.cosign.simplesigning.v1+json"}]}).encode(),
            "no digest",
        ),
    ],
)
def test_a_false_tag_is_a_bad_signature(raw: bytes, told: str) -> None:
    repository = MemoryRepository(manifests={sig_tag(DIGEST): raw})
    assert [told in each.problem for each in find(repository).candidates] == [True]


def test_listings_that_are_no_digests_are_told() -> None:
    repository = MemoryRepository(listed=[Referrer("latest/../..", 9, BUNDLE_TYPE)])
    assert [each.problem for each in find(repository).candidates] == ["is listed with something that is no digest"]


def test_what_the_registry_raises_passes_through() -> None:
    class Away(Exception):
        pass

    class Silent(MemoryRepository):
        async def blob(self, digest: str, size: int) -> bytes:
            raise Away

    repository = Silent()
    repository.add_bundle(BUNDLE)
    with pytest.raises(Away):
        find(repository)
