"""What memory a seat's container may still take, and what its node has: the numbers by which `planning/seats/
host_memory.py` decides whether it may be parked.
"""

from __future__ import annotations

import re
from pathlib import Path

from nodeworkers.seats.cgroups import Cgroup, usage
from planning.seats.host_memory import Level, NodeMemory, NumaNode

PROC, SYS = Path("/proc"), Path("/sys")
_LINE = re.compile(r"^(?:Node [0-9]+ )?([A-Za-z()_]+):\s+([0-9]+) kB$", re.MULTILINE)
_MOST_NUMA = 1024


class LimitsError(Exception):
    """The numbers cannot be read. The text is a sentence."""


def levels(cgroup: Cgroup, uid: str = "") -> tuple[Level, ...]:
    """The container's control group, then those that it is in, up to the node's root, which has no limit; `uid`: of its
    pod, by which the pod's is told. Raises CgroupError, and LimitsError where the container has none any more.
    """
    found: list[Level] = []
    folder, path = cgroup.folder, Path(cgroup.path)
    while folder != cgroup.mounted:
        used = usage(folder, cgroup.unified)
        if used is not None:
            found.append(Level(_name(path, cgroup, uid), used.limit, max(used.used - used.idle, 0)))
        elif folder == cgroup.folder:
            raise LimitsError(f"The control group {cgroup.path} has no memory that is counted, or is gone.")
        folder, path = folder.parent, path.parent
    return tuple(found)


def node_memory(proc: Path = PROC, sys: Path = SYS) -> NodeMemory:
    """What the node has now; what berth itself knows of its seats (`parked`, `budget`, `coming`, `keep`) is left to
    fill in. Of a NUMA node, pages that are free and idle pages of files are available. Raises LimitsError.
    """
    available = numbers(proc / "meminfo").get("MemAvailable")
    if available is None:
        raise LimitsError(f"{proc / 'meminfo'} does not tell how much memory is available.")
    numa = []
    for place in (sys / "devices" / "system" / "node").glob("node[0-9]*"):
        number = place.name.removeprefix("node")
        there = numbers(place / "meminfo")
        if number.isdigit() and int(number) < _MOST_NUMA and "MemFree" in there:
            numa.append(NumaNode(int(number), there["MemFree"] + there.get("Inactive(file)", 0)))
    return NodeMemory(available, numa=tuple(sorted(numa, key=lambda each: each.number)))


def _name(path: Path, cgroup: Cgroup, uid: str) -> str:
    if str(path) == cgroup.path:
        return "container"
    # Under systemd dashes separate the levels of a slice, and those of a name are written as underscores.
    if uid and (path.name == f"pod{uid}" or path.name.endswith(f"-pod{uid.replace('-', '_')}.slice")):
        return "pod"
    return f"control group {path}"


def numbers(path: Path) -> dict[str, int]:
    """Bytes by name, of a file like /proc/meminfo; none where it cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    return {name: int(number) * 1024 for name, number in _LINE.findall(text)}
