"""How fast a cache image's layer is extracted beside `tar -xzf`, for whoever changes the extraction.

Both unpack the same layer onto the same disk, turn by turn, and both end with everything on it (syncfs; `sync -f` for
tar). Ours starts its child, gives up privileges, checks every name and looks at every kernel; tar does none of that.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.report import Report, arguments, progress
from images.build import Said, build, read
from images.extraction import extract
from images.folder import Folder
from images.layout import read_manifest
from images.triton import folder_name
from planning.caches.labels import Kind
from planning.caches.limits import MANIFEST_BYTES, MIB

WORDS = [f"%{number} = arith.addi %{number + 1}, %c{number}_i32 : tensor<1024xi32>\n".encode() for number in range(997)]


def text(draw: random.Random, size: int) -> bytes:
    """Like an intermediate representation: many lines, few different ones."""
    return b"".join(draw.choices(WORDS, k=size // 60))


def triton_cache(folder: Path, kernels: int, draw: random.Random) -> None:
    """Kernels with the files and sizes that Triton 3.9 leaves for one of middling size."""
    for number in range(kernels):
        hash_ = hashlib.sha256(b"%d" % number).hexdigest()
        place = folder / folder_name(hash_)
        place.mkdir(parents=True)
        metadata = {
            "hash": hash_,
            "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
            "triton_version": "3.9.0",
        }
        files = {
            "k.json": json.dumps(metadata).encode(),
            "k.source": text(draw, 8_000),
            "k.ttir": text(draw, 8_000),
            "k.ttgir": text(draw, 16_000),
            "k.llir": text(draw, 40_000),
            "k.ptx": text(draw, 30_000),
            "k.cubin": text(draw, 10_000) + draw.randbytes(10_000),
        }
        for name, content in files.items():
            (place / name).write_bytes(content)
        children = {name: f"/root/.triton/cache/{place.name}/{name}" for name in files}
        (place / "__grp__k.json").write_text(json.dumps({"child_paths": children}))


def vllm_cache(folder: Path, artifacts: int, draw: random.Random) -> None:
    """Few large files, as vLLM's binary layout has them."""
    place = folder / "torch_compile_cache" / "0a1b2c3d4e" / "rank_0_0" / "backbone"
    place.mkdir(parents=True)
    target = b'"target": {"backend": "cuda", "arch": 90, "warp_size": 32}'
    for number in range(artifacts):
        body = b"".join(text(draw, 40_000) + draw.randbytes(20_000) for _ in range(100))
        (place / f"artifact_compile_range_1_8192_subgraph_{number}").write_bytes(target + body)
    (place / "cache_key_factors.json").write_text("{}")


def packed(folder: Path, top: Path) -> Path:
    """The layer of an image of that folder."""
    built = build(read(folder, Said()), top / "image", tag=None, index=False)
    there = Folder(top / "image")
    manifest = read_manifest(there.read(built.top.digest, MANIFEST_BYTES, "manifest"))
    return there.blob(manifest.layers[0].digest)


def ours(layer: Path, kind: Kind, into: Path) -> float:
    began = time.perf_counter()
    asyncio.run(extract([layer], kind, into))
    return time.perf_counter() - began


def tar(layer: Path, into: Path) -> float:
    began = time.perf_counter()
    subprocess.run(["tar", "-xzf", str(layer), "-C", str(into)], check=True)
    subprocess.run(["sync", "-f", str(into)], check=True)
    return time.perf_counter() - began


def compare(name: str, kind: Kind, folder: Path, top: Path, options: argparse.Namespace, report: Report) -> None:
    """Both in turns, and the medians."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    count = sum(1 for path in folder.rglob("*") if path.is_file())
    progress(f"packing {name}: {size / MIB:.0f} MiB in {count} files")
    layer = packed(folder, top)
    times: dict[str, list[float]] = {"berth": [], "tar": []}
    for turn in range(options.turns + 1):
        for who in sorted(times, reverse=bool(turn % 2)):
            # Nothing is removed meanwhile: where the disk is told of every free block (discard), that slows the next.
            into = Path(tempfile.mkdtemp(dir=top))
            subprocess.run(["sync", "-f", str(top)], check=True)
            took = ours(layer, kind, into) if who == "berth" else tar(layer, into)
            if turn:  # the first warms the page cache
                times[who].append(took)
    speed = {who: size / MIB / statistics.median(each) for who, each in times.items()}
    ratio = speed["berth"] / speed["tar"]
    report.note(
        {
            name: {
                "bytes": size,
                "files": count,
                "compressed_bytes": layer.stat().st_size,
                "seconds": {who: [round(one, 4) for one in each] for who, each in times.items()},
                "mebibytes_per_second": {who: round(each, 1) for who, each in speed.items()},
                "ratio": round(ratio, 2),
            }
        }
    )
    report.row(
        name, f"{speed['berth']:.0f} MiB/s",
        f"{ratio:.2f}× tar -xzf ({speed['tar']:.0f} MiB/s); {size / MIB:.0f} MiB in {count:,} files, "
        f"{layer.stat().st_size / MIB:.0f} MiB compressed, median of {options.turns}",
    )  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = arguments("extraction", "extraction of cache images beside tar -xzf")
    parser.add_argument("--kernels", type=int, default=1000, help="of the Triton cache (1000)")
    parser.add_argument("--artifacts", type=int, default=25, help="of the vLLM cache, 6 MB each (25)")
    parser.add_argument("--turns", type=int, default=5, help="how often each extracts (5)")
    parser.add_argument("--folder", type=Path, default=None, help="on which disk; left out: that of temporary files")
    options = parser.parse_args()
    report = Report("extraction: cache images beside tar")
    draw = random.Random(1)
    for name, kind in (("triton", "triton"), ("vllm", "vllm")):
        with tempfile.TemporaryDirectory(dir=options.folder) as made:
            top = Path(made)
            if kind == "triton":
                triton_cache(top / "cache", options.kernels, draw)
                compare(name, "triton", top / "cache", top, options, report)
            else:
                vllm_cache(top / "cache", options.artifacts, draw)
                compare(name, "vllm", top / "cache", top, options, report)
    report.finish(options.json)


if __name__ == "__main__":
    main()
