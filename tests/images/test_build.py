"""Images that are built: reproducible, labelled by what lies in the folder and by nothing of the machine."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from images import layout
from images.build import Said, build, read
from images.descriptor import OCI_INDEX
from images.folder import REF_NAME, Folder
from images.refused import Refused
from planning.caches import limits
from planning.caches.compatibility import Target, Variant
from planning.caches.hits import predict
from tests.images import caches

H100, MI300 = Target("cuda", "90", 32), Target("hip", "gfx942", 64)


def made(folder: Path, out: Path, said: Said | None = None, **options: Any) -> tuple[layout.CacheImage, Folder]:
    """Builds, and reads again what a registry would be given."""
    built = build(read(folder, said or Said()), out, tag=options.pop("tag", None), index=False)
    there = Folder(out)
    assert there.top().digest == built.top.digest
    manifest = layout.read_manifest(there.read(built.top.digest, limits.MANIFEST_BYTES, "manifest"))
    config = there.read(manifest.config.digest, limits.CONFIG_BYTES, "config")
    for each in manifest.layers:
        there.check(each)
    return layout.read_image(manifest, config), there


def names(image: layout.CacheImage, there: Folder) -> list[str]:
    with tarfile.open(there.blob(image.layers[0].digest)) as tar:
        return tar.getnames()


def manifest_json(image: layout.CacheImage, there: Folder) -> Any:
    with tarfile.open(there.blob(image.layers[0].digest)) as tar:
        member = tar.extractfile(f"{layout.manifest_folder(image.kind)}/manifest.json")
        assert member is not None
        return json.load(member)


def test_an_image_of_tritons(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    kernel = caches.kernel(folder, environment={"USE_IR_LOC": "ttir"})
    image, there = made(folder, tmp_path / "out")
    assert (image.kind, image.variant) == ("triton", "compat")
    size = sum(path.stat().st_size for path in kernel.iterdir())
    assert image.labels == {
        "org.opencontainers.image.title": "Triton kernel cache",
        "cache.triton.image/entry-count": "1",
        "cache.triton.image/cache-size-bytes": str(size),
        "cache.triton.image/summary": '{"targets":[{"backend":"cuda","arch":"90","warp_size":32}]}',
        "io.berth.cache/triton-version": "3.9.0",
        "io.berth.cache/ptxas-version": "Cuda compilation tools, release 12.9, V12.9.86",
        "io.berth.cache/environment": '{"USE_IR_LOC": "ttir"}',
        "io.berth.cache/capture-path": caches.AT,
    }
    assert names(image, there)[:3] == ["io.triton.cache", f"io.triton.cache/{kernel.name}",
                                       f"io.triton.cache/{kernel.name}/__grp__add.json"]  # fmt: skip
    (entry,) = manifest_json(image, there)["triton"]
    assert entry["backend"] == "cuda" and entry["arch"] == "90" and "dummy_key" not in entry
    told = json.loads(there.read(there.top().digest, limits.MANIFEST_BYTES, "manifest"))
    assert told["annotations"] == {"cache.triton.image/variant": "compat"}


def test_the_same_folder_gives_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for seed in "abc":
        caches.kernel(first, seed)
    shutil.copytree(first, second, copy_function=shutil.copyfile)
    for path in second.rglob("*"):
        path.chmod(0o700)
        os.utime(path, (1, 1))
    one = build(read(first, Said()), tmp_path / "o1", tag=None, index=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12345")
    two = build(read(second, Said()), tmp_path / "o2", tag="v2", index=False)
    assert one.top.digest == two.top.digest
    (second / "more").write_text("x")
    assert build(read(second, Said()), tmp_path / "o3", tag=None, index=False).top.digest != one.top.digest


def test_what_was_built_predicts_a_hit(tmp_path: Path) -> None:
    from crds.kernelcache import Runtime

    caches.kernel(tmp_path / "cache")
    image, _ = made(tmp_path / "cache", tmp_path / "out")
    assert predict(image.packed, Runtime(triton="3.9.0", ptxas="12.9.86"), None, None).hit is True


def test_an_index_has_an_image_for_each_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cuda, hip = caches.kernel(folder, "a"), caches.kernel(folder, "b", target=caches.HIP)
    helper = caches.helper(folder)
    built = build(read(folder, Said()), tmp_path / "out", tag="v1", index=True)
    there = Folder(tmp_path / "out")
    variants = layout.read_index(there.read(built.top.digest, limits.MANIFEST_BYTES, "index"))
    assert variants == tuple(Variant(each.blob.digest, each.blob.size, each.targets[0]) for each in built.images)
    assert [each.target for each in variants] == [H100, MI300]
    for variant, own, other in ((variants[0], cuda, hip), (variants[1], hip, cuda)):
        manifest = layout.read_manifest(there.read(variant.digest, limits.MANIFEST_BYTES, "manifest"))
        image = layout.read_image(manifest, there.read(manifest.config.digest, limits.CONFIG_BYTES, "config"))
        assert image.packed.targets == (variant.target,) and image.packed.entries == 1
        inside = names(image, there)
        assert f"io.triton.cache/{own.name}/add.json" in inside and f"io.triton.cache/{helper.name}" in inside
        assert not [each for each in inside if other.name in each]
    top = json.loads((tmp_path / "out" / "index.json").read_text())["manifests"][0]
    assert top["annotations"] == {REF_NAME: "v1"} and top["mediaType"] == OCI_INDEX


def test_without_an_index_one_image_names_all(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    caches.kernel(folder, "a")
    caches.kernel(folder, "b", target=caches.HIP)
    image, _ = made(folder, tmp_path / "out")
    assert image.packed.targets == (H100, MI300) and image.packed.entries == 2


def test_images_of_vllms(tmp_path: Path) -> None:
    """Its GPU is that of the kernels bundled in it, as whoever packs it may have another or none."""
    folder = tmp_path / "vllm"
    caches.vllm_binary(folder, target={"backend": "cuda", "arch": 75, "warp_size": 32})
    image, there = made(folder, tmp_path / "out")
    summary = '{"targets":[{"backend":"cuda","arch":"sm_75","warp_size":32,"cuda_version":"12.9"}]}'
    assert image.labels["cache.vllm.image/summary"] == summary
    assert image.labels["cache.vllm.image/format"] == "binary" and image.labels["cache.vllm.image/entry-count"] == "1"
    assert {name: value for name, value in image.labels.items() if name.startswith("io.kserve")} == {
        "io.kserve.km/framework": "vllm",
        "io.kserve.km/cache-type": "torch-compile",
        "io.kserve.km/cache-hash": "0a1b2c3d4e",
        "io.kserve.km/cache-mount-subpath": "torch_compile_cache",
        "io.kserve.km/cache-root-env": "VLLM_CACHE_ROOT=/root/.cache/vllm",
    }
    assert image.packed.capture_path == "/root/.cache/vllm"
    assert manifest_json(image, there)["vllm"][0]["cacheFormat"] == "binary"
    assert all(each.startswith(("io.vllm.cache", "io.vllm.manifest")) for each in names(image, there))


def test_an_image_of_aot_from_whichever_folder(tmp_path: Path) -> None:
    caches.vllm_aot(tmp_path / "vllm")
    digests = set()
    for number, given in enumerate(("", "torch_compile_cache", "torch_compile_cache/torch_aot_compile")):
        image, there = made(tmp_path / "vllm" / given, tmp_path / f"out{number}")
        digests.add(there.top().digest)
        assert image.labels["io.kserve.km/cache-mount-subpath"] == "torch_compile_cache/torch_aot_compile"
    assert len(digests) == 1


def test_legacy_of_vllms_takes_its_gpu_from_tritons_json(tmp_path: Path) -> None:
    caches.vllm_legacy(tmp_path / "vllm")
    image, _ = made(tmp_path / "vllm", tmp_path / "out")
    assert image.labels["cache.vllm.image/format"] == "triton" and image.packed.targets == (H100,)
    assert image.labels["cache.vllm.image/summary"] == '{"targets":[{"backend":"cuda","arch":"90","warp_size":32}]}'


def test_a_gpu_that_nothing_tells_must_be_said(tmp_path: Path) -> None:
    """Never a default, and never that of the machine that packs."""
    (caches.vllm_aot(tmp_path / "vllm") / "rank_0_0" / "model").write_bytes(b"compressed")
    with pytest.raises(Refused, match="say it with --target"):
        read(tmp_path / "vllm", Said())
    assert read(tmp_path / "vllm", Said(targets=(MI300,))).targets == (MI300,)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Said(targets=(MI300,)), "the kernels are for cuda sm_90|kernels are for cuda"),
        (Said(triton_version="3.8.0"), "--triton-version says 3.8.0"),
        (Said(ptxas="V12.8.93"), "--ptxas-version says"),
        (Said(environment={"A": "1"}), "--env says"),
        (Said(triton_key="3.8.0abc"), "--triton-key begins otherwise"),
        (Said(kind="vllm"), "holds no layout of vLLM's"),
    ],
)
def test_what_is_said_must_agree_with_what_lies_there(tmp_path: Path, said: Said, words: str) -> None:
    caches.kernel(tmp_path)
    with pytest.raises(Refused, match=words):
        read(tmp_path, said)


def test_what_is_said_completes_what_lies_there(tmp_path: Path) -> None:
    caches.kernel(tmp_path, version=None, target=caches.HIP)
    contents = read(tmp_path, Said(triton_version="3.1.0", triton_key="3.1.0" + "0" * 64, environment={}))
    assert contents.said.triton_version == "3.1.0" and contents.said.environment == {}
    silent = read(tmp_path, Said())
    assert silent.said.triton_version is None and len(silent.warnings) == 2


def test_two_paths_of_capture_are_refused_with_both(tmp_path: Path) -> None:
    caches.kernel(tmp_path, "a", at="/one")
    caches.kernel(tmp_path, "b", at="/two")
    with pytest.raises(Refused) as caught:
        read(tmp_path, Said())
    assert "'/one'" in str(caught.value) and "'/two'" in str(caught.value) and "__grp__add.json" in str(caught.value)


def test_several_versions_are_told_and_not_labelled(tmp_path: Path) -> None:
    caches.kernel(tmp_path, "a", version="3.8.0")
    caches.kernel(tmp_path, "b", version="3.9.0")
    contents = read(tmp_path, Said())
    assert contents.said.triton_version is None and "3.8.0, 3.9.0" in contents.warnings[0]


@pytest.mark.parametrize("what", ["empty", "missing", "forged", "odd gpu"])
def test_folders_that_no_node_would_take_are_refused_at_once(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "cache"
    if what != "missing":
        folder.mkdir()
    if what == "forged":
        caches.kernel(folder, hash_="0" * 64)
    if what == "odd gpu":
        caches.kernel(folder, target={"backend": "cuda", "arch": "what", "warp_size": 32})
    with pytest.raises(Refused):
        read(folder, Said())


def test_a_file_that_shrinks_meanwhile_is_told(tmp_path: Path) -> None:
    kernel = caches.kernel(tmp_path / "cache")
    contents = read(tmp_path / "cache", Said())
    (kernel / "add.ttir").write_text("")
    with pytest.raises(Refused, match="changed while it was packed"):
        build(contents, tmp_path / "out", tag=None, index=False)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    caches.kernel(tmp_path / "cache")
    contents = read(tmp_path / "cache", Said())
    build(contents, tmp_path / "out", tag=None, index=False)
    with pytest.raises(Refused, match="exists and is not empty"):
        build(contents, tmp_path / "out", tag=None, index=False)
