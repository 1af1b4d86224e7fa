"""How soon the device plugin answers the kubelet: Allocate, the first list of devices, and which devices go together.

For whoever changes the node's device plugin. The plugin runs in a process of its own behind a real unix socket, with
simulated devices: what the node's ledger adds is not in these figures, what the choice takes is. Beside it, in turn,
answers a bare gRPC server that always says the same; what is above it is ours. It asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.report import Report, arguments, progress
from berth.demo.report import percentile
from nodeworkers.device_plugin.plugin import DevicePlugin
from nodeworkers.rpc import deviceplugin_pb2 as messages
from nodeworkers.sockets import handler, serve
from planning.devices.cards import Card, Connection, Link
from planning.devices.offers import Device, Injection, Node
from planning.devices.preference import Affinity, preferred

RESOURCE = "tenstorrent.com/n150"
COUNTS = (8, 16, 1_000, 10_000)
_SERVICE = messages.DESCRIPTOR.services_by_name["DevicePlugin"]


class SimulatedDevices:
    """An allocation core without hardware and ledger: it is there, and it never changes. Of its devices the first 16
    are as 16 GPUs of one machine: four with NVLinks between each other, eight on a socket.
    """

    version = 1

    def __init__(self, count: int) -> None:
        named = [f"tt-{number:016x}" for number in range(count)]
        self._devices = {each: Device(each, RESOURCE, (each,), numa=(place % 2,)) for place, each in enumerate(named)}
        cards = [Card(each, "nvidia", "simulated", RESOURCE, place) for place, each in enumerate(named)]
        self._affinity = Affinity(cards, [_link(named, a, b) for a, b in combinations(range(min(count, 16)), 2)])
        self._cards = {each.id: each.cards for each in self._devices.values()}

    def offered(self) -> Mapping[str, tuple[Device, ...]]:
        return {RESOURCE: tuple(self._devices.values())}

    async def changed(self, version: int) -> int:
        await asyncio.Event().wait()
        return version

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        return preferred(self._affinity, self._cards, available, must, size)

    def allocate(self, resource: str, ids: Sequence[str], claim: str = "", admin: bool = False) -> Injection:
        chosen = [self._devices[each].id for each in ids]
        return Injection(
            env={"TT_VISIBLE_DEVICES": ",".join("0000:01:00.0" for _ in chosen)},
            nodes=tuple(Node(f"/dev/tenstorrent/by-id/{each}", "/dev/tenstorrent/0") for each in chosen),
            cdi=tuple(f"berth.dev/tenstorrent={each}" for each in chosen),
        )

    def before_start(self, resource: str, ids: Sequence[str]) -> None: ...

    def holds(self, claim: str) -> bool:
        return False

    def release(self, claim: str) -> None: ...


def _link(named: Sequence[str], a: int, b: int) -> Link:
    how: Connection = "nvlink" if a // 4 == b // 4 else "same-cpu" if a // 8 == b // 8 else "cross-cpu"
    return Link(named[a], named[b], how, lanes=4 if how == "nvlink" else 0)


class Bare:
    """What gRPC for Python costs by itself: the same answer always."""

    def __init__(self, devices: SimulatedDevices) -> None:
        plugin = DevicePlugin(RESOURCE, devices)
        self._snapshot = plugin.snapshot()

    async def Allocate(self, request: messages.AllocateRequest, context: Any) -> messages.AllocateResponse:
        return messages.AllocateResponse(container_responses=[messages.ContainerAllocateResponse(envs={"A": "B"})])

    async def ListAndWatch(self, request: messages.Empty, context: Any) -> None:
        await context.write(self._snapshot)

    async def GetPreferredAllocation(
        self, request: messages.PreferredAllocationRequest, context: Any
    ) -> messages.PreferredAllocationResponse:
        return messages.PreferredAllocationResponse()


def serving(path: Path, count: int, bare: bool) -> None:
    """A process that serves until it is killed."""

    async def main() -> None:
        devices = SimulatedDevices(count)
        plugin = DevicePlugin(RESOURCE, devices)
        plugin.snapshot()  # as before it is registered
        service = handler(_SERVICE, Bare(devices)) if bare else plugin.service()
        server = await serve(path, [service], 64 * 1024 * 1024)
        await server.wait_for_termination()

    asyncio.run(main())


class Kubelet:
    """The other side, which waits for each answer as the kubelet does."""

    def __init__(self, path: Path) -> None:
        self.channel = grpc.insecure_channel(f"unix:{path}")
        grpc.channel_ready_future(self.channel).result(timeout=60)

    def call(self, name: str, request: Any) -> bytes:
        """The answer as it came."""
        whole = f"/{_SERVICE.full_name}/{name}"
        write = type(request).SerializeToString
        if name == "ListAndWatch":
            stream = self.channel.unary_stream(whole, write, _as_it_is)(request)
            answer: bytes = next(stream)
            stream.cancel()
            return answer
        answered: bytes = self.channel.unary_unary(whole, write, _as_it_is)(request, timeout=60)
        return answered


def _as_it_is(answer: bytes) -> bytes:
    return answer


def allocate(ids: Sequence[str]) -> messages.AllocateRequest:
    """For one container."""
    return messages.AllocateRequest(container_requests=[messages.ContainerAllocateRequest(devices_ids=ids)])


def prefer(ids: Sequence[str], size: int) -> messages.PreferredAllocationRequest:
    """For one container that needs no device in particular."""
    each = messages.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=size)
    return messages.PreferredAllocationRequest(container_requests=[each])


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each, after a tenth more that nobody counts."""
    for _ in range(times // 10):
        call()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def summary(taken: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    return {"p50": round(statistics.median(taken), 3), "p99": round(percentile(taken, 0.99), 3)}


def measure(count: int, calls: int, folder: Path, report: Report) -> None:
    """One node with so many devices."""
    progress(f"{count} devices ...")
    context = multiprocessing.get_context("spawn")
    paths = {"ours": folder / f"{count}-ours.sock", "bare": folder / f"{count}-bare.sock"}
    processes = [
        context.Process(target=serving, args=(path, count, name == "bare"), daemon=True) for name, path in paths.items()
    ]
    for process in processes:
        process.start()
    try:
        sides = {name: Kubelet(path) for name, path in paths.items()}
        ids = list(SimulatedDevices(count).offered()[RESOURCE])
        names = [each.id for each in ids]
        requests: list[tuple[str, str, Any, int]] = [
            ("Allocate", "Allocate", allocate(names[-1:]), calls),
            ("first list", "ListAndWatch", messages.Empty(), max(20, calls // 50)),
            ("preferred 1", "GetPreferredAllocation", prefer(names, 1), max(20, calls // 50)),
        ]
        if count == 16:
            requests = [("preferred 4", "GetPreferredAllocation", prefer(names, 4), calls)]
        for title, method, request, times in requests:
            _compare(f"{title}, {count} devices", method, request, times, sides, report)
        for side in sides.values():
            side.channel.close()
    finally:
        for process in processes:
            process.kill()
            process.join()
    if count == 16:
        return
    devices = SimulatedDevices(count)
    building = timed(lambda: DevicePlugin(RESOURCE, devices).snapshot(), 10)
    report.row(f"building the list, {count} devices", f"{statistics.median(building):.1f} ms", "once for each change")
    report.note({f"building, {count} devices": summary(building)})


def _compare(title: str, method: str, request: Any, times: int, sides: Mapping[str, Kubelet], report: Report) -> None:
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(4):  # in turn: what else runs on the machine disturbs both
        for name, side in sides.items():
            taken[name] += timed(lambda: side.call(method, request), max(1, times // 4))  # noqa: B023
    ours, bare = summary(taken["ours"]), summary(taken["bare"])
    report.row(
        title,
        f"{ours['p50']:.2f} / {ours['p99']:.2f} ms",
        f"p50 / p99; a bare server {bare['p50']:.2f} / {bare['p99']:.2f}: {ours['p50'] / bare['p50']:.1f} times",
    )
    report.note({title: {"ours": ours, "bare": bare, "calls": len(taken["ours"])}})


def main() -> None:
    parser = arguments("devices", str(__doc__).partition("\n")[0])
    parser.add_argument("--calls", type=int, default=4000, help="of Allocate, for each number of devices")
    options: argparse.Namespace = parser.parse_args()
    report = Report("The device plugin's answers, with simulated devices")
    with tempfile.TemporaryDirectory() as folder:
        for count in COUNTS:
            measure(count, options.calls, Path(folder), report)
    report.finish(options.json)


if __name__ == "__main__":
    main()
