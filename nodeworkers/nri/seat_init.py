"""seat-init for the node: builds it, puts it before a container's command line, and gives it orders. `seat_init.c` says
what it does with them.

Whoever has written `hold` or `down`, and then finds that `others` of seat-init's pid are none, knows that none will be
before the next `run`: nobody has to be told by the container.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nodeworkers.nri.values import Adjustment, Container
from planning.devices.offers import Mount

SOURCE = Path(__file__).with_name("seat_init.c")
INSIDE, ORDERS_INSIDE = (
    "/.berth/seat-init",
    "/.berth/slot",
)  # where a container has the program and its folder of orders
MOST_GRACE = 86_400  # seconds

_FLAGS = (
    *("-Os", "-std=gnu11", "-static", "-nostdlib", "-nostartfiles", "-ffreestanding", "-fno-pie", "-no-pie", "-s"),
    *("-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-Wl,--build-id=none", "-Wl,-z,noexecstack"),
)


class SeatInitError(Exception):
    """seat-init cannot be built. The text says why."""


def build(target: Path, compiler: str = "cc") -> None:
    """Writes the program to `target`, for this machine's processor; containers that run keep the one that they have.
    Raises SeatInitError where there is no C compiler, or it fails, and OSError.
    """
    if shutil.which(compiler) is None:
        raise SeatInitError(f"seat-init cannot be built: there is no C compiler ({compiler}). Install gcc or clang.")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "seat-init"
        result = subprocess.run(
            [compiler, *_FLAGS, "-o", str(built), str(SOURCE)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise SeatInitError(f"seat-init cannot be built: {compiler} says:\n{result.stderr[-2000:]}")
        built.chmod(0o755)
        built.replace(target)


def behind(container: Container, program: Path, orders: Path) -> Adjustment:
    """What makes a container run its command line behind seat-init. `program` and `orders` are paths of the host; the
    folder `orders` is that one container's, has an order already, and stays until the container is removed.
    """
    before = (INSIDE, ORDERS_INSIDE)
    args = container.args[2:] if container.args[:2] == before else container.args
    mounts = (Mount(str(program), INSIDE), Mount(str(orders), ORDERS_INSIDE))
    return Adjustment(mounts=mounts, args=(*before, *args))


def run(orders: Path) -> None:
    """The seat has the slot: the server runs, or starts, and the container ends with it. Raises OSError."""
    _order(orders, "run")


def hold(orders: Path) -> None:
    """A server that runs goes on, none starts, and the container stays also if it ends: while a seat is parked. Raises
    OSError.
    """
    _order(orders, "hold")


def down(orders: Path, grace: int) -> None:
    """The server ends: SIGTERM to it, after `grace` seconds (0: at once) SIGKILL to all that is in the container. None
    starts. Raises ValueError for less than 0 or more than MOST_GRACE, and OSError.
    """
    if not 0 <= grace <= MOST_GRACE:
        raise ValueError(f"a grace of {grace} s is not possible: 0 to {MOST_GRACE}")
    _order(orders, f"down {grace}")


def _order(orders: Path, line: str) -> None:
    orders.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Whatever user the container has must be able to read it, and whatever umask we have.
    orders.chmod(0o755)
    written = orders / ".order"
    written.write_text(f"{line}\n")
    written.chmod(0o644)
    written.replace(orders / "order")


def others(pid: int, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """The processes in the container whose seat-init has the pid `pid` on the host, beside it, in ascending order:
    those in its cgroups (cgroups(7)), or below them. Raises ProcessLookupError where there is no such process, or where
    it is in no cgroup of its own and nothing can be told.
    """
    try:
        ours = _cgroups(proc / str(pid))
    except OSError as error:
        raise ProcessLookupError(f"no process has the pid {pid}") from error
    if not ours:
        raise ProcessLookupError(f"the process {pid} is in no cgroup of a container")
    found: list[int] = []
    for entry in proc.iterdir():
        if entry.name.isdigit() and int(entry.name) != pid:
            with contextlib.suppress(OSError):  # it ended meanwhile
                if _within(_cgroups(entry), ours):
                    found.append(int(entry.name))
    return tuple(sorted(found))


def _cgroups(process: Path) -> dict[str, str]:
    """The paths of a process's cgroups by hierarchy, without roots, in which everything is."""
    lines = (line.split(":", 2) for line in (process / "cgroup").read_text().splitlines())
    return {f"{number}:{names}": path for number, names, path in lines if path != "/"}


def _within(theirs: dict[str, str], ours: dict[str, str]) -> bool:
    return all(f"{theirs.get(name, '')}/".startswith(f"{path}/") for name, path in ours.items())


if __name__ == "__main__":  # for images that are built: `python -m nodeworkers.nri.seat_init TARGET`
    try:
        build(Path(sys.argv[1]))
    except (IndexError, SeatInitError) as problem:
        sys.exit(f"usage: python -m nodeworkers.nri.seat_init TARGET\n{problem}")
