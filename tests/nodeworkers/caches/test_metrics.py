"""What is counted while a node carries out orders: each order, refusal and pull once, and bytes as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from images.descriptor import Manifest
from images.errors import RegistryError
from images.reference import Reference
from nodeworkers.caches.pulling import Incoming
from nodeworkers.caches.startup import put_in_order
from planning.caches.trust import REFUSALS
from tests.images import hostile
from tests.images.signatures.rig import new_key
from tests.nodeworkers.caches.rig import MI300X, QUOTA, Rig, node
from tests.nodeworkers.caches.test_preparing import kernels
from tests.scraping import Read


@pytest.fixture
async def rig(scraped: Read, tmp_path: Path, registry: hostile.Registry) -> AsyncIterator[Rig]:
    """A node that begins after the instruments are there, as in its process."""
    async with node(tmp_path / "node", registry.settings, registry.host) as made:
        yield made


def outcomes(scraped: Read) -> dict[str, float]:
    return _by("berth_cache_order_outcomes_total", "outcome", scraped)


def refusals(scraped: Read) -> dict[str, float]:
    """Those that were counted at all."""
    return {reason: count for reason, count in _by("berth_cache_refusals_total", "reason", scraped).items() if count}


def _by(name: str, label: str, scraped: Read) -> dict[str, float]:
    begin = f'{name}{{{label}="'
    return {key.removeprefix(begin)[:-2]: value for key, value in scraped().items() if key.startswith(begin)}


async def test_a_pull_is_counted_with_what_came_and_what_it_takes(
    rig: Rig, registry: hostile.Registry, scraped: Read, tmp_path: Path
) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    for epoch in (1, 2):  # the second finds it there
        assert (await rig.prepare(ref, digest, epoch)).outcome == "ready"
    assert (await rig.remove(ref, 3)).outcome == "removed"
    found = scraped()
    assert outcomes(scraped) == {"ready": 2, "removed": 1} and refusals(scraped) == {}
    assert found["berth_cache_pulls_total"] == found["berth_cache_extraction_seconds_count"] == 1
    (kept,) = rig.store.cached()
    files = [path for path in kept.content.rglob("*") if path.is_file()]
    there = sum(path.stat().st_size for path in files)
    assert there <= found["berth_cache_extracted_bytes_total"] < 2 * there, "the image's own manifest is unpacked too"
    manifest, media = registry.manifests[digest]
    sizes = [layer.size for layer in Manifest.read(manifest, digest, media).layers()]
    assert found["berth_cache_pulled_bytes_total"] == sum(sizes)
    assert found["berth_cache_extraction_seconds_sum"] > 0
    assert (found["berth_cache_disk_bytes"], found["berth_cache_quota_bytes"]) == (kept.size, QUOTA)


async def test_verification_counts_from_zero_and_by_reason(rig: Rig, scraped: Read, tmp_path: Path) -> None:
    assert _by("berth_cache_refusals_total", "reason", scraped) == dict.fromkeys(REFUSALS, 0), "so that it can rise"
    digest = await rig.push(kernels(tmp_path / "cache"), signed=new_key())
    ref = rig.cache()
    report = await rig.prepare(ref, digest)
    assert report.outcome == "failed" and refusals(scraped) == {report.reason: 1} and report.reason in REFUSALS
    assert outcomes(scraped) == {"failed": 1} and "berth_cache_pulls_total" not in scraped()


async def test_what_is_tried_again_or_fits_no_gpu_is_no_refusal(rig: Rig, scraped: Read, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    rig.hardware.gpus = (MI300X,)
    await rig.prepare(ref, digest)
    rig.hardware.gpus = None
    await rig.prepare(ref, digest, 2)
    assert outcomes(scraped) == {"incompatible": 1, "retrying": 1} and refusals(scraped) == {}


class Broken:
    """A registry that gives a part of the one layer, and a digest that turns out wrong the time after."""

    def __init__(self) -> None:
        self.calls = 0

    async def blobs(self, _: object, wanted: list[tuple[object, Path]]) -> None:
        self.calls += 1
        part = wanted[0][1].with_suffix(".part")
        if self.calls == 1:
            part.write_bytes(b"x" * 500)
        else:
            part.unlink()
        raise RegistryError("away", "team/cache", "it went away")


async def test_what_came_before_it_broke_off_is_counted(scraped: Read, tmp_path: Path) -> None:
    layer = SimpleNamespace(digest="sha256:" + "a" * 64, media_type="m", size=1000)
    chosen: Any = SimpleNamespace(digest="sha256:" + "b" * 64, image=SimpleNamespace(layers=(layer,)))
    incoming, registry = Incoming(tmp_path), cast(Any, Broken())
    for _ in range(2):
        with pytest.raises(RegistryError):
            await incoming.fetch(registry, Reference.parse("registry.example/team/cache"), chosen)
        assert scraped()["berth_cache_pulled_bytes_total"] == 500


async def test_the_disk_is_told_from_the_start(rig: Rig, scraped: Read) -> None:
    put_in_order(rig.ledger, rig.store, Incoming(rig.folder / "incoming"))
    assert scraped()["berth_cache_disk_bytes"] == 0 and scraped()["berth_cache_quota_bytes"] == QUOTA
