"""A process with tens of gigabytes on a real GPU, parked and woken by berth's own code, beside the rate at which the
machine copies pinned memory.

For whoever has a node with an NVIDIA GPU and driver 570 or later, as root: seconds and GB/s of each stage, whether the
memory is what it was after fifty cycles, whether a restore without room is refused, what huge pages, NUMA and a dropped
KV cache give, and two processes that take turns. `--simulated` rehearses it without a GPU. It ends with 1 where memory
was not what it was, or a restore without room was not refused, and with 2 where there is no GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Report, arguments, progress
from nodeworkers.seats.backend import Process, Server
from nodeworkers.seats.backends.cuda_checkpoint import CudaCheckpoint
from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.preflight import read_kernel
from nodeworkers.seats.processes import started
from nodeworkers.seats.simulated_gpu.machine import SimulatedCard, SimulatedMachine
from nodeworkers.seats.world import UntouchedError
from planning.seats.room import CardRoom, lacks

GIGABYTE = 10**9
_MOST_SHARE = 0.9  # of the GPU's memory: contexts need some
_LOOK = 0.05  # seconds between looks at free memory
_WAIT = 60.0  # seconds that memory may take to be free
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STAGES = ("lock", "checkpoint", "verify", "restore", "unlock")


@dataclass
class Gpu:
    """Whom the benchmark asks. `simulated`: the folder of simulated GPUs, None for a real one."""

    card: str
    helper: HelperClient
    simulated: Path | None = None
    wrong: list[str] = field(default_factory=list)

    @contextmanager
    def holder(self, size: int, cpus: Sequence[int] = ()) -> Iterator[Holder]:
        """A process with so many bytes on it."""
        command = [sys.executable, "-m", "benchmarks.cuda_holder", "--bytes", str(size)]
        command += ["--cpus", ",".join(map(str, cpus))] if cpus else []
        command += ["--simulated", str(self.simulated), "--card", self.card] if self.simulated is not None else []
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": self.card}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        try:
            holder = Holder(process, self.card)
            if holder.said().get("ready") != size:
                raise SystemExit(f"A process with {size / GIGABYTE:.1f} GB on {self.card} did not start.")
            yield holder
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


class Holder:
    """`benchmarks.cuda_holder`, as a seat's server."""

    def __init__(self, process: subprocess.Popen[str], card: str) -> None:
        self._process = process
        self.process = Process(process.pid, started(process.pid) or 0)
        self.server = Server(f"holder-{process.pid}", [card], [self.process], [self.process])

    def order(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.said()

    def said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}


async def park(gpu: Gpu, holder: Holder, free: int) -> dict[str, float]:
    """Seconds by stage, until the driver says that as much is free as was before the process began, nearly."""
    moved = await CudaCheckpoint(gpu.helper).park(holder.server, 1)
    began = time.monotonic()
    while True:
        memory = (await gpu.helper.memory([gpu.card]))[gpu.card]
        if memory.holders.get(holder.process.pid, 0) == 0 and memory.free >= 0.98 * free:
            return {**moved.seconds, "verify": time.monotonic() - began}
        if time.monotonic() - began > _WAIT:
            raise SystemExit(f"{memory.free} bytes of {gpu.card} are free after a park, of {free} before.")
        await asyncio.sleep(_LOOK)


async def cycle(gpu: Gpu, holder: Holder, free: int) -> dict[str, float]:
    """Parks and wakes, once. Seconds by stage."""
    parked = await park(gpu, holder, free)
    woken = await CudaCheckpoint(gpu.helper).wake(holder.server, 1)
    return {**parked, **woken.seconds}


def rates(cycles: Sequence[Mapping[str, float]], size: int) -> dict[str, dict[str, float]]:
    """p50 and longest of each stage in seconds, and GB/s of those that move memory."""
    found = {}
    for stage in _STAGES:
        took = sorted(each[stage] for each in cycles if stage in each)
        if took:
            middle = statistics.median(took)
            found[stage] = {"p50": middle, "max": took[-1]}
            if stage in ("checkpoint", "restore") and middle > 0:
                found[stage]["rate"] = size / middle / GIGABYTE
    return found


def tell(report: Report, name: str, found: Mapping[str, Mapping[str, float]], copy: Mapping[str, float]) -> None:
    """Rows of one measurement; `copy`: GB/s of pinned memory, from the GPU and to it."""
    report.note({name: found})
    for stage, told in found.items():
        note = f"{told['max']:.3f} s at most"
        if "rate" in told:
            peer = copy["from_gpu"] if stage == "checkpoint" else copy["to_gpu"]
            note += f"; {told['rate']:.2f} GB/s, {100 * told['rate'] / peer:.0f} % of the copy rate"
        report.row(f"{name}: {stage}", f"{told['p50']:.3f} s", note)


async def refused(gpu: Gpu, size: int, free: int) -> str:
    """Whether a restore is refused before the driver hears of it while another has the memory; '' if all is well."""
    with gpu.holder(size) as first:
        await park(gpu, first, free)
        with gpu.holder((free - size // 2) // 2**20 * 2**20) as other:
            memory = (await gpu.helper.memory([gpu.card]))[gpu.card]
            rooms = {gpu.card: CardRoom(memory.free, memory.holders)}
            owners = {first.process.pid: "first", other.process.pid: "other"}
            if not lacks("bench", "first", rooms, owners, {gpu.card: size}):
                return "a restore for which there is no room would have been begun"
            stranger = lacks("bench", "first", rooms, {first.process.pid: "first"}, {gpu.card: size})
            if str(other.process.pid) not in stranger:
                return "a process of no seat that has memory was not seen"
            if (await gpu.helper.read([first.process])).held != "Parked":
                return "the parked process is not parked any more"
        await CudaCheckpoint(gpu.helper).wake(first.server, 1)
        return str(first.order("check").get("wrong", "it did not answer"))


async def turns(gpu: Gpu, size: int, free: int, count: int) -> list[float]:
    """Seconds of each switch between two processes that share the GPU."""
    took = []
    with gpu.holder(size) as first:
        await park(gpu, first, free)
        with gpu.holder(size) as second:
            awake, parked = second, first
            for _ in range(count):
                began = time.monotonic()
                await park(gpu, awake, free)
                await CudaCheckpoint(gpu.helper).wake(parked.server, 1)
                took.append(time.monotonic() - began)
                awake, parked = parked, awake
            if wrong := awake.order("check").get("wrong", "it did not answer"):
                gpu.wrong.append(f"after {count} switches: {wrong}")
    return took


@contextmanager
def huge_pages(mode: str) -> Iterator[None]:
    """The kernel's setting, which is put back."""
    before = read_kernel().huge_pages
    _HUGE_PAGES.write_text(mode)
    try:
        yield
    finally:
        _HUGE_PAGES.write_text(before)


def numa_cpus() -> dict[str, list[int]]:
    """CPUs by NUMA node."""
    found = {}
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        cpus: list[int] = []
        for part in filter(None, (node / "cpulist").read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
        if cpus:
            found[node.name] = cpus
    return found


async def levers(gpu: Gpu, size: int, free: int, report: Report, copy: Mapping[str, float]) -> None:
    """What each is worth, with two cycles each."""

    async def measured(name: str, cpus: Sequence[int] = (), *, drop: bool = False) -> None:
        progress(f"{name} ...")
        with gpu.holder(size, cpus) as holder:
            left = int(holder.order("drop")["left"]) if drop else size
            tell(report, name, rates([await cycle(gpu, holder, free) for _ in range(2)], left), copy)

    for mode in ("always", "madvise", "never"):
        try:
            with huge_pages(mode):
                await measured(f"huge pages: {mode}")
        except OSError as error:
            report.row(f"huge pages: {mode}", "not tried", f"they cannot be set: {error}")
    nodes = numa_cpus()
    for name, cpus in nodes.items() if len(nodes) > 1 else ():
        await measured(f"on {name}", cpus)
    if len(nodes) < 2:
        report.row("NUMA", "not tried", "the machine has one node")
    await measured("half dropped first, as a KV cache", drop=True)


async def measure(gpu: Gpu, size: int, cycles: int, report: Report, *, all_levers: bool) -> None:
    """All of it."""
    free = (await gpu.helper.memory([gpu.card]))[gpu.card].free
    report.note({"driver": (await gpu.helper.hello()).version, "bytes": size, "free": free})
    with gpu.holder(min(size, 2 * 2**30)) as holder:
        copy = {way: rate / GIGABYTE for way, rate in holder.order("rate").items()}
    report.note({"copy": copy})
    report.row("copy of pinned memory", f"{copy['to_gpu']:.1f} GB/s", f"to the GPU; {copy['from_gpu']:.1f} from it")
    progress(f"{cycles} cycles of {size / GIGABYTE:.1f} GB ...")
    done: list[dict[str, float]] = []
    with gpu.holder(size) as holder:
        for number in range(1, cycles + 1):
            done.append(await cycle(gpu, holder, free))
            if number in (1, cycles) and (wrong := holder.order("check").get("wrong", "it did not answer")):
                gpu.wrong.append(f"after {number} cycles: {wrong}")
            progress(f"{number} of {cycles}: {sum(done[-1].values()):.1f} s")
    tell(report, "parked and woken", rates(done, size), copy)
    report.row("memory after the cycles", "wrong" if gpu.wrong else "right", "; ".join(gpu.wrong))
    progress("a restore without room ...")
    why = await refused(gpu, size, free)
    report.row("restore without room", "not refused" if why else "refused", why or "before the driver heard of it")
    gpu.wrong += [why] if why else []
    progress("two take turns ...")
    took = await turns(gpu, size, free, 4)
    report.note({"switches": took})
    report.row("a switch of two", f"{statistics.median(took):.2f} s", f"{max(took):.2f} s at most, of {len(took)}")
    if all_levers and gpu.simulated is None:
        await levers(gpu, size, free, report, copy)
    else:
        report.row(
            "levers",
            "not tried",
            "--levers does, on a real GPU: huge pages (set back after), NUMA, a dropped cache",
        )


def main() -> int:
    parser = arguments("seats_gpu", str(__doc__).partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--gigabytes", type=float, default=40.0, help="on the GPU, or what it has room for")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--levers", action="store_true", help="tries huge pages, NUMA, and a dropped cache too")
    parser.add_argument("--simulated", action="store_true", help="rehearses it on a simulated GPU: no figure counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="berth-gpu-") as place:
        folder = Path(place)
        simulated = folder / "gpus" if options.simulated else None
        if simulated is not None:
            SimulatedMachine.make(simulated, [SimulatedCard("GPU-0", 2**30)])
        helper = HelperClient(folder / "helper.sock", f"simulated:{simulated}" if simulated else "cuda")
        try:
            devices = asyncio.run(helper.hello()).devices
        except UntouchedError as error:
            print(f"There is no GPU that could be parked: {error}", file=sys.stderr)
            return 2
        gpu = Gpu(devices[0], helper, simulated)
        title = "A process parked and woken on " + ("a simulated GPU" if simulated else "a real GPU")
        report = Report(title)
        try:
            room = asyncio.run(helper.memory([gpu.card]))[gpu.card].free
            size = int(min(options.gigabytes * GIGABYTE, _MOST_SHARE * room)) // 2**20 * 2**20
            if size < options.gigabytes * GIGABYTE * 0.99:
                report.row("asked for", f"{options.gigabytes:g} GB", f"the GPU has room for {size / GIGABYTE:.1f}")
            asyncio.run(measure(gpu, size, options.cycles, report, all_levers=options.levers))
        finally:
            subprocess.run(["pkill", "-KILL", "-f", str(folder / "helper.sock")], check=False)
        report.finish(options.json)
    return 1 if gpu.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
