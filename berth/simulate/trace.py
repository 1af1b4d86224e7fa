"""Reads traces for the simulation: nodes and pods from CSV files in the columns of openb, or of a person's own.

Whatever a file holds, its reader learns what is wrong, in which file, line and column.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from planning.filters import Constraints, Requirement, Shape
from planning.model import GPU_MODEL_LABEL, WHOLE, NodeView, Resources
from planning.simulation import Arrival
from planning.typical import Kind
from stack.errors import StackError

NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu")
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu")
TIMES = ("creation_time", "deletion_time")
# What tells whose a pod is: the first of these columns that there is.
TENANTS = ("tenant", "namespace", "qos")
DOCUMENTED = "docs/simulate.md says which columns there are."

_MEBIBYTE = 1024 * 1024
_LARGEST = 256 * _MEBIBYTE  # bytes of a file: far more than any trace
_MOST = 10**12  # of whatever a column counts
_MOST_GPUS = 64
_PODS_OF_A_NODE = 10_000  # traces know no such limit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A pod with its times: created so many seconds after the trace's zero, it ran for so many."""

    arrival: Arrival
    tenant: str
    created: float
    seconds: float


class _Row:
    """A row of a file; what cannot be read raises ValueError with the column's name."""

    def __init__(self, values: Mapping[str | None, object]) -> None:
        self._values = values

    def text(self, column: str) -> str:
        value = self._values.get(column)
        return value.strip() if isinstance(value, str) else ""

    def name(self, column: str) -> str:
        text = self.text(column)
        if not text:
            raise ValueError(f"{column} is empty")
        return text

    def number(self, column: str, least: int, most: int, default: int | None = None) -> int:
        text = self.text(column)
        if not text and default is not None:
            return default
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{column} is {text[:40]!r}, not a whole number") from None
        if not least <= value <= most:
            raise ValueError(f"{column} is {value}, not from {least} to {most}")
        return value

    def seconds(self, column: str, least: float, since: str) -> float:
        """A moment, which is not before `least`: that is the column `since`."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{column} is {text[:40]!r}, not a number of seconds") from None
        if not 0 <= value <= _MOST:
            raise ValueError(f"{column} is {value:g}, not from 0 to {_MOST:g} seconds")
        if value < least:
            raise ValueError(f"{column} is {value:.17g}, before {since} ({least:.17g})")
        return value

    @property
    def surplus(self) -> bool:
        return None in self._values


def read_nodes(path: Path) -> tuple[NodeView, ...]:
    """The nodes of a file in the columns of openb_node_list_*.csv: sn, cpu_milli, memory_mib, gpu, model.

    Raises StackError: what is wrong, in which line of the file.
    """
    nodes = tuple(_rows(path, NODE_COLUMNS, _node))
    if not sum(node.allocatable.gpus for node in nodes):
        raise StackError(f"{path} has no node with a GPU.", DOCUMENTED)
    return nodes


def read_pods(path: Path) -> tuple[Arrival, ...]:
    """The pods of a file in the columns of openb_pod_list_*.csv; each column beyond the first four may be absent.

    Raises StackError: what is wrong, in which line of the file.
    """
    pods = tuple(_rows(path, POD_COLUMNS, _pod))
    if not any(pod.gpu_milli for pod in pods):
        raise StackError(f"{path} has no pod that asks for a GPU.", DOCUMENTED)
    return pods


def read_history(path: Path) -> tuple[Recorded, ...]:
    """The pods of such a file with their times, in the order in which they were created.

    Raises StackError: what is wrong, in which line of the file.
    """
    pods = tuple(_rows(path, (*POD_COLUMNS, *TIMES), _recorded))
    if not any(pod.arrival.gpu_milli for pod in pods):
        raise StackError(f"{path} has no pod that asks for a GPU.", DOCUMENTED)
    return tuple(sorted(pods, key=lambda pod: pod.created))


def _recorded(row: _Row) -> tuple[str, Recorded]:
    name, arrival = _pod(row)
    created = begun = row.seconds("creation_time", 0.0, "")
    since = "creation_time"
    if row.text("scheduled_time"):
        begun, since = row.seconds("scheduled_time", created, since), "scheduled_time"
    ended = row.seconds("deletion_time", begun, since)
    tenant = next((text for column in TENANTS if (text := row.text(column))), "")
    return name, Recorded(arrival, tenant, created, max(ended - begun, 1.0))


def _node(row: _Row) -> tuple[str, NodeView]:
    name = row.name("sn")
    whole = Resources(
        gpus=row.number("gpu", 0, _MOST_GPUS),
        cpu_milli=row.number("cpu_milli", 0, _MOST),
        memory=row.number("memory_mib", 0, _MOST) * _MEBIBYTE,
        pods=_PODS_OF_A_NODE,
    )
    view = NodeView(
        name=name,
        uid=name,
        resource_version=1,
        ready=True,
        unschedulable=False,
        taints=(),
        labels={GPU_MODEL_LABEL: row.text("model"), "kubernetes.io/hostname": name},
        allocatable=whole,
        gpu_models=(("", row.text("model")),),
    )
    return name, view


def _pod(row: _Row) -> tuple[str, Arrival]:
    name = row.name("name")
    gpus = row.number("num_gpu", 0, _MOST_GPUS)
    # openb writes 0 for a pod without a GPU, and 1000 for each of several.
    milli = row.number("gpu_milli", 0 if gpus == 0 else 1, WHOLE, default=WHOLE) or WHOLE
    if gpus > 1 and milli != WHOLE:
        raise ValueError(f"gpu_milli is {milli}: a part of a GPU can be asked for of one only, not of {gpus}")
    need = Resources(
        gpus=gpus,
        cpu_milli=row.number("cpu_milli", 0, _MOST),
        memory=row.number("memory_mib", 0, _MOST) * _MEBIBYTE,
        pods=1,
        gpu_milli=milli,
    )
    models = tuple(sorted({model for model in row.text("gpu_spec").split("|") if model}))
    allowed = Constraints(affinity=((Requirement(GPU_MODEL_LABEL, "In", models),),)) if models else Constraints()
    kind = Kind(gpus, milli if gpus else 0, need.cpu_milli, models)
    return name, Arrival(name, Shape(need, allowed), kind)


def _rows(path: Path, columns: tuple[str, ...], parse: Callable[[_Row], tuple[str, T]]) -> Iterator[T]:
    reader = csv.DictReader(text_of(path).splitlines())
    seen: set[str] = set()
    try:
        present = reader.fieldnames or ()
        missing = [column for column in columns if column not in present]
        if missing:
            raise StackError(f"{path} has no column {missing[0]}.", f"It needs {', '.join(columns)}. {DOCUMENTED}")
        for values in reader:
            row = _Row(values)
            if row.surplus:
                raise ValueError(f"it has more values than the {len(present)} columns of the first line")
            name, parsed = parse(row)
            if name in seen:
                raise ValueError(f"{columns[0]} is {name[:80]!r} again")
            seen.add(name)
            yield parsed
    except (ValueError, csv.Error) as wrong:
        raise StackError(f"{path}, line {reader.line_num}: {wrong}.", DOCUMENTED) from None
    if not seen:
        raise StackError(f"{path} has no rows.", DOCUMENTED)


def text_of(path: Path, documented: str = DOCUMENTED) -> str:
    """What a file holds, plain or in gzip. Raises StackError if it cannot be read; `documented` says what to do."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise StackError(f"{path} is larger than {_LARGEST // _MEBIBYTE} MiB.", "Cut the trace.")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise StackError(f"{path} does not exist.", documented) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise StackError(
            f"{path} cannot be read: {error}.", "It must be a CSV file in UTF-8, or one in gzip."
        ) from None
