"""What a folder of Triton's tells: kernels, versions, paths, and whatever is wrong with it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images import triton
from images.refused import Refused
from images.tree import File, files
from images.triton import child_paths, folder_name, read, relocate
from planning.caches.compatibility import Target
from tests.images import caches


def test_a_folder_is_named_by_the_bytes_of_the_hash() -> None:
    assert folder_name("edbea4c0" + "0" * 56).startswith("5W7KJ")
    assert len(folder_name("f" * 64)) == 52 and "=" not in folder_name("f" * 64)


def test_what_a_kernel_tells(tmp_path: Path) -> None:
    caches.kernel(tmp_path, "a", environment={"TRITON_DEFAULT_FP_FUSION": "true"})
    caches.helper(tmp_path)
    (tmp_path / "tmp.pid_1_x").mkdir()
    (tmp_path / "tmp.pid_1_x" / "half").write_text("x")
    cache = read(files(tmp_path))
    (kernel,) = cache.kernels
    assert kernel.target == Target("cuda", "90", 32) and kernel.version == "3.9.0"
    assert cache.environment == {"TRITON_DEFAULT_FP_FUSION": "true"} and cache.capture_path == caches.AT
    assert triton.entry(kernel) == {
        "hash": kernel.hash, "num_warps": 4, "num_stages": 3, "debug": False,
        "backend": "cuda", "arch": "90", "warp_size": 32,
    }  # fmt: skip
    assert dict(triton.ptxas_versions(files(tmp_path))) == {caches.TOOLS.decode(): 1}
    assert not cache.wrong and not cache.warnings


def test_old_kernels_do_not_tell_their_environment(tmp_path: Path) -> None:
    caches.kernel(tmp_path, "a", version=None, environment={"USE_IR_LOC": "ttir"})
    assert read(files(tmp_path)).environment is None


def test_results_of_autotuning_are_no_kernels(tmp_path: Path) -> None:
    folder = caches.kernel(tmp_path)
    (folder / "add.autotune.json").write_text('{"key": [1], "configs_timings": []}')
    cache = read(files(tmp_path))
    assert len(cache.kernels) == 1 and not cache.wrong


def test_a_forged_hash_is_found(tmp_path: Path) -> None:
    caches.kernel(tmp_path, "a", hash_="0" * 64)
    with pytest.raises(Refused, match="moved or forged"):
        read(files(tmp_path)).require()


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    (caches.kernel(tmp_path) / "add.cubin").unlink()
    cache = read(files(tmp_path))
    assert not cache.wrong and "'add.cubin' is missing" in cache.warnings[0]


def test_two_paths_of_capture_are_both_known(tmp_path: Path) -> None:
    caches.kernel(tmp_path, "a", at="/one")
    caches.kernel(tmp_path, "b", at="/two")
    cache = read(files(tmp_path))
    assert set(cache.capture_paths) == {"/one", "/two"} and cache.capture_path is None


def test_relocation_makes_the_groups_name_the_files_where_they_are_mounted(tmp_path: Path) -> None:
    content, into = tmp_path / "content", tmp_path / "into"
    first, second = caches.kernel(content, "a"), caches.kernel(content / "deep", "b", at=f"{caches.AT}/deep")
    caches.helper(content)
    into.mkdir()
    assert relocate(content, "/mnt/warm", into) == 2
    groups = sorted(path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file())
    assert groups == sorted([f"{first.name}/__grp__add.json", f"deep/{second.name}/__grp__add.json"])
    moved = json.loads((into / "deep" / second.name / "__grp__add.json").read_text())
    assert set(moved) == {"child_paths"}
    for name, path in moved["child_paths"].items():
        assert path == f"/mnt/warm/deep/{second.name}/{name}" and (second / name).is_file()


def test_relocating_back_gives_what_was_there(tmp_path: Path) -> None:
    content, into = tmp_path / "content", tmp_path / "into"
    folder = caches.kernel(content)
    into.mkdir()
    relocate(content, caches.AT, into)
    group = f"{folder.name}/__grp__add.json"
    assert json.loads((into / group).read_text()) == json.loads((content / group).read_text())


@pytest.mark.parametrize("make", ["symlink", "fifo", "deep", "newline"])
def test_a_folder_of_which_no_image_can_be_made(tmp_path: Path, make: str) -> None:
    folder = caches.kernel(tmp_path)
    if make == "symlink":
        (folder / "x").symlink_to("/etc/passwd")
    elif make == "fifo":
        os.mkfifo(folder / "x")
    elif make == "deep":
        (folder / ("d/" * 20)).mkdir(parents=True)
    else:
        (folder / "a\nb").write_text("x")
    with pytest.raises(Refused):
        files(tmp_path)


def test_a_mounted_cache_is_listed_without_what_is_berths(tmp_path: Path) -> None:
    folder = caches.kernel(tmp_path)
    mine = files(tmp_path)
    (tmp_path / ".berth" / "python").mkdir(parents=True)
    (tmp_path / ".berth" / "python" / "sitecustomize.py").touch()
    (tmp_path / ".berth" / "link").symlink_to("/etc/passwd")
    assert files(tmp_path) == mine
    (folder / ".berth").mkdir()
    (folder / ".berth" / "x").touch()
    assert len(files(tmp_path)) == len(mine) + 1, "only at the top"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.just("0" * 64),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["hash", "target", "child_paths", "triton_version", "A", "arch"]), inner),
    max_leaves=8,
)  # fmt: skip


@given(anything.map(json.dumps).map(str.encode) | st.binary(max_size=60), st.sampled_from(["k.json", "__grp__k.json"]),
       st.sampled_from(["A" * 52, folder_name("0" * 64), "elsewhere"]))  # fmt: skip
def test_no_json_is_too_odd(content: bytes, name: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as top:
        place = Path(top) / folder / name
        place.parent.mkdir()
        place.write_bytes(content)
        cache = read([File(f"{folder}/{name}", len(content), str(place))])
        for kernel in cache.kernels:
            assert folder_name(kernel.hash) == folder


@given(anything)
def test_a_group_names_plain_files_only(content: object) -> None:
    try:
        found = child_paths(content)
    except ValueError:
        return
    assert not any("/" in name or name in ("", ".", "..") for name in found)
