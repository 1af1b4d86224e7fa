"""Cache folders for tests, as Triton and vLLM leave them, without either."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from images.triton import folder_name

CUDA: Mapping[str, Any] = {"backend": "cuda", "arch": 90, "warp_size": 32}
HIP: Mapping[str, Any] = {"backend": "hip", "arch": "gfx942", "warp_size": 64}
AT = "/home/app/.triton/cache"
TOOLS = b"Cuda compilation tools, release 12.9, V12.9.86"


def kernel(
    root: Path,
    seed: str = "add",
    *,
    at: str = AT,
    target: Mapping[str, Any] = CUDA,
    name: str = "add",
    version: str | None = "3.9.0",
    environment: Mapping[str, str] | None = None,
    hash_: str | None = None,
) -> Path:
    """One compiled kernel below `root`, which was `at` when it was compiled; its folder."""
    digest = hashlib.sha256(seed.encode()).hexdigest()
    folder = root / folder_name(digest)
    folder.mkdir(parents=True)
    binary = "cubin" if target["backend"] == "cuda" else "hsaco"
    metadata = {"hash": hash_ or digest, "target": target, "num_warps": 4, "num_stages": 3, "debug": False}
    metadata |= {"ptx_version": None, **({"triton_version": version} if version else {}), **(environment or {})}
    texts = {
        f"{name}.json": json.dumps(metadata).encode(),
        f"{name}.ttir": f"module {seed}".encode(),
        f"{name}.{binary}": b"\x7fELF" + digest.encode() + (TOOLS if binary == "cubin" else b""),
    }
    for file, content in texts.items():
        (folder / file).write_bytes(content)
    children = {file: f"{at}/{folder.name}/{file}" for file in texts}
    (folder / f"__grp__{name}.json").write_text(json.dumps({"child_paths": children}))
    return folder


def helper(root: Path) -> Path:
    """A launcher, which belongs to no kernel."""
    folder = root / folder_name(hashlib.sha256(b"launcher").hexdigest())
    folder.mkdir(parents=True)
    (folder / "cuda_utils.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF helper")
    return folder


def bundled(target: Mapping[str, Any]) -> bytes:
    """An artifact of Inductor's: a pickle in which the JSON of a kernel stands as it is."""
    return b"\x80\x05pickle\x00" + json.dumps({"hash": "ab", "target": target, "num_warps": 4}).encode() + b"\x00" * 99


def vllm_binary(
    root: Path, hash_: str = "0a1b2c3d4e", *, at: str = "/root/.cache/vllm", target: Mapping[str, Any] = CUDA,
    prefix: str = "backbone", unpacked: bool = False, device: str = "cuda",
) -> Path:  # fmt: skip
    """The binary (or unpacked) layout of one rank below a VLLM_CACHE_ROOT."""
    place = f"torch_compile_cache/{hash_}/rank_0_0/{prefix}"
    folder = root / place
    folder.mkdir(parents=True)
    env = {"VLLM_TARGET_DEVICE": device, "VLLM_MAIN_CUDA_VERSION": "12.9", "VLLM_COMPILE_CACHE_SAVE_FORMAT": "binary"}
    factors = {"code_hash": "c" * 64, "config_hash": "d" * 10, "compiler_hash": "e" * 10, "env": env}
    (folder / "cache_key_factors.json").write_text(json.dumps(factors))
    (folder / "computation_graph.py").write_text("# graph\n")
    names = [f"artifact_compile_range_1_8192_subgraph_{number}" for number in range(2)]
    for name in names:
        if unpacked:
            (folder / name).mkdir()
            (folder / name / "kernel.py").write_bytes(bundled(target))
        else:
            (folder / name).write_bytes(bundled(target))
    handles = {(None, number, "inductor"): ("key", f"{at}/{place}/{name}") for number, name in enumerate(names)}
    (folder / "vllm_compile_cache.py").write_text(repr(handles))
    return folder


def vllm_aot(root: Path, hash_: str = "f" * 64, *, target: Mapping[str, Any] = CUDA, mega: bool = False) -> Path:
    """The AOT layout: one model a rank; mega has Inductor's cache beside."""
    place = root / "torch_compile_cache" / "torch_aot_compile" / hash_
    (place / "rank_0_0").mkdir(parents=True)
    (place / "rank_0_0" / "model").write_bytes(bundled(target))
    if mega:
        (place / "inductor_cache" / "o7").mkdir(parents=True)
        (place / "inductor_cache" / "o7" / "co7.py").write_text("# code\n")
    return place


def vllm_legacy(root: Path, hash_: str = "99887766aa", *, at: str = "/root/.cache/vllm") -> Path:
    """The legacy layout: Triton's own folders within."""
    place = f"torch_compile_cache/{hash_}/rank_0_0"
    kernel(root / place / "triton_cache", at=f"{at}/{place}/triton_cache")
    (root / place / "inductor_cache").mkdir()
    (root / place / "inductor_cache" / "fx.py").write_text("# graph\n")
    return root / place
