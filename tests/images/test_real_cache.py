"""A cache that Triton itself wrote (tests/images/data): what berth believes of Triton's format holds for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from crds.kernelcache import Runtime
from images import triton
from images.build import Said, build, read
from images.inspection import inspect
from images.tree import files
from planning.caches.compatibility import Target
from planning.caches.hits import predict

CACHE = Path(__file__).parent / "data" / "triton-3.9.0"
H100, MI300 = Target("cuda", "90", 32), Target("hip", "gfx942", 64)


def test_every_folder_is_called_by_its_kernels_hash() -> None:
    cache = triton.read(files(CACHE))
    assert not cache.wrong and not cache.warnings and cache.groups == len(cache.kernels) == 4
    assert cache.targets == (H100, MI300) and cache.capture_path == "/home/app/.triton/cache"


def test_it_tells_its_making() -> None:
    """Also the ptxas: 3.9.0 takes its second one, 13.4, for sm_90, whatever `ptxas --version` says."""
    said = read(CACHE, Said()).said
    assert said.triton_version == "3.9.0" and said.environment == {"TRITON_DISABLE_LINE_INFO": "true"}
    assert said.ptxas == "Cuda compilation tools, release 13.4, V13.4.59"


def test_it_becomes_an_index_that_holds_what_it_says(tmp_path: Path) -> None:
    contents = read(CACHE, Said())
    assert not contents.warnings
    build(contents, tmp_path / "image", tag=None, index=True)
    found = asyncio.run(inspect(tmp_path / "image"))
    assert [each.target for each in found] == [H100, MI300]
    for each in found:
        assert not each.refused and not each.warnings and each.extracted is not None and each.extracted.kernels == 2
        runtime = Runtime(triton="3.9.0", ptxas="13.4.59", environment={"TRITON_DISABLE_LINE_INFO": "1"})
        assert predict(each.image.packed, runtime, None, None).hit is True


def test_its_groups_are_rewritten_for_another_path(tmp_path: Path) -> None:
    assert triton.relocate(CACHE, "/mnt/warm", tmp_path) == 4
    for group in tmp_path.rglob("__grp__*.json"):
        there = CACHE / group.parent.name
        children = json.loads(group.read_text())["child_paths"]
        assert set(children) == set(json.loads((there / group.name).read_text())["child_paths"])
        assert all(path == f"/mnt/warm/{there.name}/{name}" for name, path in children.items())
