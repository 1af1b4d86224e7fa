"""Makes the extract in examples/openb from Alibaba's original files, byte for byte the same each time.

`python -m berth.demo.extract SOURCE [DEST]`; for maintainers. It keeps all GPU nodes and every pod that asked for
whole GPUs, and of those only the columns that the demo reads.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from berth.demo.trace import NODE_COLUMNS, NODES_FILE, POD_COLUMNS, PODS_FILE, load

NODES_SOURCE = "openb_node_list_gpu_node.csv"
PODS_SOURCE = "openb_pod_list_default.csv"
SHA256 = {
    NODES_SOURCE: "2beca64b4d3dfa342036a34b56a495c6cef9225db836c81f541282cb1df320b5",
    PODS_SOURCE: "1ee7ed79c27a3b0861cda8ddba86a004c6aba904caafa329a76ae93ca63834a8",
}


def whole_gpu(row: Mapping[str, str]) -> bool:
    """Whether a pod asked for at least one GPU, and for all of it."""
    return int(row["num_gpu"]) >= 1 and int(row["gpu_milli"]) == 1000


def extract(source: Path, dest: Path) -> dict[str, int]:
    """Writes both files to `dest` and returns how many rows each has."""
    nodes = list(_rows(source / NODES_SOURCE))
    pods = [row for row in _rows(source / PODS_SOURCE) if whole_gpu(row)]
    dest.mkdir(parents=True, exist_ok=True)
    (dest / NODES_FILE).write_bytes(_csv(NODE_COLUMNS, nodes))
    # No file name and no time in the header: the same rows give the same bytes.
    (dest / PODS_FILE).write_bytes(gzip.compress(_csv(POD_COLUMNS, pods), compresslevel=9, mtime=0))
    return {NODES_FILE: len(nodes), PODS_FILE: len(pods)}


def _rows(path: Path) -> Iterator[dict[str, str]]:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256[path.name]:
        print(f"warning: {path} is not the file the extract was made from (sha256 {digest})", file=sys.stderr)
    yield from csv.DictReader(data.decode().splitlines())


def _csv(columns: Iterable[str], rows: Iterable[Mapping[str, str]]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def main() -> None:
    """Entry point."""
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: python -m berth.demo.extract SOURCE [DEST]\nSOURCE holds {NODES_SOURCE} and {PODS_SOURCE}")
    dest = Path(sys.argv[2]) if len(sys.argv) == 3 else Path("examples/openb")
    try:
        for name, count in extract(Path(sys.argv[1]), dest).items():
            print(f"{dest / name}: {count} rows")
    except FileNotFoundError as missing:
        sys.exit(
            f"{missing.filename} does not exist: get it from github.com/alibaba/clusterdata, cluster-trace-gpu-v2023"
        )
    load(dest)


if __name__ == "__main__":
    main()
