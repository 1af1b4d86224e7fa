"""Reads the openb trace: nodes and whole-GPU pods as values, for the demo and the benchmarks.

The files are an extract of Alibaba's cluster-trace-gpu-v2023; examples/openb/README.md says whose they are and
`berth.demo.extract` makes them. Units are the trace's: CPU in millicores, memory in MiB, times in seconds.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stack.errors import StackError

NODES_FILE = "nodes.csv"
PODS_FILE = "pods.csv.gz"
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS = (
    "name", "cpu_milli", "memory_mib", "num_gpu", "gpu_spec", "creation_time", "scheduled_time", "deletion_time"
)  # fmt: skip

_HERE = Path(__file__).parent
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A node of the traced cluster. G1, G2 and G3 are code names of GPUs that Alibaba does not disclose."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str

    @property
    def kind(self) -> tuple[str, int, int, int]:
        """What nodes of one make have in common: model, GPUs, CPU, memory."""
        return self.model, self.gpus, self.cpu_milli, self.memory_mib


@dataclass(frozen=True, slots=True)
class TracePod:
    """A pod of the trace that asked for whole GPUs. `gpu_models` is empty where any model will do."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_models: tuple[str, ...]
    created: int
    scheduled: int | None
    deleted: int

    @property
    def seconds(self) -> int:
        """How long it ran: from being scheduled to its deletion, or from its creation if it never was scheduled."""
        return max(1, self.deleted - (self.created if self.scheduled is None else self.scheduled))


@dataclass(frozen=True, slots=True)
class Trace:
    """Nodes and pods in the trace's order."""

    nodes: tuple[TraceNode, ...]
    pods: tuple[TracePod, ...]


def default_folder() -> Path:
    """Where the extract lies: in the checkout, or in the installed package."""
    for folder in (_HERE / "_openb", _HERE.parent.parent / "examples" / "openb"):
        if (folder / NODES_FILE).is_file():
            return folder
    raise StackError(
        "The openb trace is neither in a checkout (examples/openb) nor in the installed package.",
        "Run berth from a clone of its repository, or name a folder with the extract: --trace DIR.",
    )


def load(folder: Path | None = None) -> Trace:
    """The extract in `folder` (left out: berth's own). StackError names file, line and column of what is wrong."""
    folder = folder or default_folder()
    nodes = tuple(_rows(folder / NODES_FILE, NODE_COLUMNS, node_from_row))
    pods = tuple(_rows(folder / PODS_FILE, POD_COLUMNS, pod_from_row))
    return Trace(nodes, pods)


def node_from_row(row: dict[str, str]) -> TraceNode:
    """A row of openb_node_list_gpu_node.csv."""
    return TraceNode(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])


def pod_from_row(row: dict[str, str]) -> TracePod:
    """A row of openb_pod_list_default.csv; times are seconds since the trace began."""
    scheduled = row["scheduled_time"]
    return TracePod(
        name=row["name"],
        cpu_milli=int(row["cpu_milli"]),
        memory_mib=int(row["memory_mib"]),
        gpus=int(row["num_gpu"]),
        gpu_models=tuple(model for model in row["gpu_spec"].split("|") if model),
        created=int(float(row["creation_time"])),
        scheduled=int(float(scheduled)) if scheduled else None,
        deleted=int(float(row["deletion_time"])),
    )


def _rows(path: Path, columns: tuple[str, ...], parse: Callable[[dict[str, str]], T]) -> Iterator[T]:
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    except FileNotFoundError:
        raise StackError(
            f"{path} does not exist.", "`python -m berth.demo.extract SOURCE DEST` makes it from the original files."
        ) from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise StackError(f"{path} cannot be read: {error}.", "Make the extract anew: berth.demo.extract.") from error
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise StackError(f"{path} has no column {missing[0]}.", f"Expected: {', '.join(columns)}.")
    for row in reader:
        try:
            yield parse(row)
        except (TypeError, ValueError, AttributeError) as error:
            raise StackError(f"{path}, line {reader.line_num}: {error}.", "Is this the extract of openb?") from error
