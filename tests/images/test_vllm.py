"""vLLM's layouts are recognised by what lies there, and their GPUs by the kernels in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from images import vllm
from images.refused import Refused
from images.tree import files
from images.triton import read as read_triton
from planning.caches.compatibility import Target
from tests.images import caches
from tests.images.archives import short

H100 = Target("cuda", "90", 32)


def test_binary(tmp_path: Path) -> None:
    caches.vllm_binary(tmp_path)
    found = files(tmp_path)
    assert vllm.prefix_of(found, "vllm") == ""
    (part,) = vllm.read(found)
    assert (part.hash, part.rank, part.format, part.prefix) == ("0a1b2c3d4e", "rank_0_0", "binary", "backbone")
    assert part.save_format == "binary" and len(part.artifacts) == 2 and part.device == "cuda"
    assert vllm.bundled_targets(found) == (H100,)
    assert list(vllm.capture_paths(found)) == ["/root/.cache/vllm"]
    (entry,) = vllm.manifest([part], [])
    assert entry["vllmHash"] == "0a1b2c3d4e" and entry["cacheFormat"] == "binary"
    (row,) = cast("list[dict[str, Any]]", entry["binary"])
    assert row["artifact_count"] == 2 and row["target_device"] == "cuda" and row["code_hash"] == "c" * 64
    assert row["env"]["VLLM_MAIN_CUDA_VERSION"] == "12.9"


def test_unpacked(tmp_path: Path) -> None:
    caches.vllm_binary(tmp_path, unpacked=True)
    (part,) = vllm.read(files(tmp_path))
    assert part.save_format == "unpacked" and len(part.artifacts) == 2
    assert vllm.bundled_targets(files(tmp_path)) == (H100,)


def test_aot_and_mega(tmp_path: Path) -> None:
    caches.vllm_aot(tmp_path, "a" * 64)
    caches.vllm_aot(tmp_path, "b" * 64, mega=True)
    plain, mega = vllm.read(files(tmp_path))
    assert plain.format == "aot_compile" and (mega.format, mega.save_format) == ("binary", "mega-aot")
    assert vllm.formats([plain, mega]) == "aot_compile,binary"
    first, second = vllm.manifest([plain, mega], [])
    size = plain.artifacts["model"]
    assert first["aot_compile"] == [{"hash": "a" * 64, "rank": "rank_0_0", "model_file": "model", "file_size": size}]
    assert second["binary"][0]["artifact_names"] == ["model"]  # type: ignore[index]


def test_legacy(tmp_path: Path) -> None:
    caches.vllm_legacy(tmp_path)
    found = files(tmp_path)
    (part,) = vllm.read(found)
    cache = read_triton(found)
    assert part.format == "triton" and cache.targets == (H100,) and cache.capture_path == "/root/.cache/vllm"
    (entry,) = vllm.manifest([part], cache.kernels)
    assert [row["hash"] for row in entry["triton"]] == [cache.kernels[0].hash]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "prefix"),
    [
        ("", ""),
        ("torch_compile_cache", "torch_compile_cache/"),
        ("torch_compile_cache/torch_aot_compile", "torch_compile_cache/torch_aot_compile/"),
    ],
)
def test_whichever_folder_is_given_the_image_is_the_same(tmp_path: Path, given: str, prefix: str) -> None:
    caches.vllm_aot(tmp_path)
    folder = tmp_path / given
    assert vllm.prefix_of(files(folder), folder.name) == prefix


def test_both_layouts_below_the_compile_cache(tmp_path: Path) -> None:
    caches.vllm_aot(tmp_path)
    caches.vllm_binary(tmp_path)
    folder = tmp_path / "torch_compile_cache"
    assert vllm.prefix_of(files(tmp_path), "x") == ""
    assert vllm.prefix_of(files(folder), folder.name) == "torch_compile_cache/"


def test_a_folder_too_far_up_is_refused(tmp_path: Path) -> None:
    caches.vllm_binary(tmp_path / ".cache" / "vllm")
    with pytest.raises(Refused, match="give the folder that holds torch_compile_cache"):
        vllm.prefix_of(files(tmp_path), "root")


def test_what_is_no_cache_of_vllms(tmp_path: Path) -> None:
    caches.kernel(tmp_path)
    assert vllm.prefix_of(files(tmp_path), "x") is None


@pytest.mark.parametrize("factors", [b"{", b"[]", b"[" * 100_000, b"\xff"], ids=short)
def test_broken_factors_are_told(tmp_path: Path, factors: bytes) -> None:
    (caches.vllm_binary(tmp_path) / "cache_key_factors.json").write_bytes(factors)
    with pytest.raises(Refused, match="cache_key_factors"):
        vllm.read(files(tmp_path))


def test_a_target_on_the_edge_of_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in range(200, 340, 7):
        monkeypatch.setattr(vllm, "_CHUNK", chunk)
        place = tmp_path / str(chunk)
        folder = caches.vllm_aot(place)
        (folder / "rank_0_0" / "model").write_bytes(b"x" * 150 + caches.bundled(caches.HIP) + b"y" * 500)
        assert vllm.bundled_targets(files(place)) == (Target("hip", "gfx942", 64),)
