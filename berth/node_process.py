"""The node process: answers the kubelet from the node's own ledger before anything else, then does what the control
plane asks of this node about kernel caches.

The kubelet waits for nobody (law 3): devices are served first, then CSI, and both until the end; neither Temporal, the
API server nor a driver that hangs keeps the process from starting or ends it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

from activities.cache_signatures import node_attributes
from activities.signatures import TASK_QUEUE
from berth.node_seats import SeatNews
from berth.process import ProcessOptions, connect_temporal, ended, run_process, serve_http, until_one_ends
from controller.outage import TEMPORAL_AWAY, reason
from crds.gpuseatprofile import MOST_GROUPS
from kube.client import KubeClient
from nodeworkers.caches.obtaining import Images
from nodeworkers.caches.preparing import Caches
from nodeworkers.caches.pulling import Incoming
from nodeworkers.caches.reporting import Statuses
from nodeworkers.caches.rules import Rules
from nodeworkers.caches.startup import put_in_order
from nodeworkers.csi.driver import Driver, Places
from nodeworkers.devices.service import DeviceOptions, DeviceService
from nodeworkers.hardware.amd_smi import AmdSmi
from nodeworkers.hardware.simulated import Simulated
from nodeworkers.inventory import WATCHED, Hardware
from nodeworkers.ledger import Ledger
from nodeworkers.seats.activities import Switches
from nodeworkers.seats.service import SeatOptions, SeatService
from nodeworkers.store import Store
from planning.caches.orders import INVENTORY, NODE_WORKFLOW, Inventory, node_id, node_queue
from planning.seats.orders import seat_queue

log = logging.getLogger(__name__)

AT_ONCE = 4  # orders; each may extract gigabytes
LOOK = 60.0  # seconds between two looks at the hardware
# How long a cancelled order may take to be told so; its heartbeats are kept back that long.
HEARTBEATS = timedelta(seconds=5)
DRAIN = timedelta(seconds=15)
_PAUSES = (0.5, 15.0)  # seconds between attempts to reach Temporal: the first, and the longest


@dataclass(frozen=True)
class NodeOptions:
    """What one node is. `quota` bytes are kept for caches, `upper_limit` is the cap of a pod's writable layer;
    `simulated_gpus` such as `2xH100`, '' for those that are there; for kernel caches. `devices`: what is offered to
    pods, and how; `seats`: how those of model servers are switched, None where they are only handed out.
    """

    name: str
    root: Path
    kubelet_root: Path
    quota: int
    upper_limit: int
    simulated_gpus: str = ""
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    seats: SeatOptions | None = None


def run_node(options: ProcessOptions, node: NodeOptions) -> None:
    async def main(traced: bool) -> None:
        await serve(options, node, traced=traced)

    run_process("berth-node", options, main)


async def serve(options: ProcessOptions, node: NodeOptions, *, traced: bool) -> None:
    ledger = await asyncio.to_thread(Ledger, node.root)
    try:
        pretended = Hardware(Simulated(node.simulated_gpus), ledger.identity) if node.simulated_gpus else None
        hardware = pretended or Hardware(AmdSmi(), ledger.identity, WATCHED)
        async with await KubeClient.connect(options.kubeconfig, options.context, user_agent="berth-node") as kube:
            devices = DeviceService(node.name, node.kubelet_root, node.root, ledger, kube, node.devices, hardware)
            link = Link()
            seats = Seats(node, ledger, kube, devices, link) if node.seats is not None else None
            # Before all else: a kubelet that starts beside this process fails pods that were given devices until it has
            # them, and waits for mounts.
            handing_out = asyncio.create_task(_hand_out(devices, seats), name="devices")
            try:
                await _serve_caches(
                    options, node, ledger, kube, hardware, devices, seats, link, handing_out, traced=traced
                )
            finally:
                handing_out.cancel()
                await asyncio.wait([handing_out])
    finally:
        ledger.close()


async def _hand_out(devices: DeviceService, seats: Seats | None) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(devices.run())
        if seats is not None:
            tasks.create_task(seats.run())


async def _serve_caches(
    options: ProcessOptions,
    node: NodeOptions,
    ledger: Ledger,
    kube: KubeClient,
    hardware: Hardware,
    devices: DeviceService,
    seats: Seats | None,
    link: Link,
    handing_out: asyncio.Task[None],
    *,
    traced: bool,
) -> None:
    """CSI, and whatever waits for somebody."""
    store = Store(node.root / "store", node.quota)
    incoming = Incoming(node.root / "incoming")
    for sentence in await asyncio.to_thread(put_in_order, ledger, store, incoming):
        log.warning("After the last run: %s", sentence)
    driver = Driver(Places(node.kubelet_root, node.root), node.name, ledger, store, node.upper_limit)
    await driver.start()
    log.info("CSI is served for node %s", node.name)
    try:
        statuses = Statuses(kube, ledger, node.name, lambda: hardware.simulated)
        images = Images(ledger, store, incoming, hardware)
        caches = Caches(node.name, Rules(kube), ledger, store, images, hardware, statuses)
        process = Process(
            options, node.name, driver, hardware, statuses, caches, devices, seats, link, handing_out, traced=traced
        )
        await process.run()
    finally:
        await driver.stop()


@dataclass
class Link:
    """To Temporal: `client` while it was reached, `away` why it was not, '' while it is."""

    client: Client | None = None
    away: str = "it was not reached yet"


class Seats:
    """What a node does for its seats, and its word with their groups' workflows."""

    def __init__(self, node: NodeOptions, ledger: Ledger, kube: KubeClient, devices: DeviceService, link: Link) -> None:
        if node.seats is None:
            raise ValueError("seats are not switched on this node")
        self._news = SeatNews(node.name, lambda: link.client, lambda: self.service.groups)
        self.service = SeatService(
            node.name, node.root, ledger, kube, devices.core, devices.holdings, node.seats, self._news.poke,
            lambda: link.away or self._news.trouble,
        )  # fmt: skip
        devices.may_start = self.service.may_start

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.service.run())
            tasks.create_task(self._news.run())


class Process:
    """What runs beside CSI, until it is cancelled."""

    def __init__(
        self,
        options: ProcessOptions,
        name: str,
        driver: Driver,
        hardware: Hardware,
        statuses: Statuses,
        caches: Caches,
        devices: DeviceService,
        seats: Seats | None,
        link: Link,
        handing_out: asyncio.Task[None],
        *,
        traced: bool,
    ) -> None:
        """`handing_out`: the devices' and seats' work, which goes on until this is over."""
        self._devices, self._seats, self._handing_out = devices, seats, handing_out
        self._link = link
        self._options = options
        self._name = name
        self._driver = driver
        self._hardware = hardware
        self._statuses = statuses
        self._caches = caches
        self._traced = traced
        self._background: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Ends with what ended first of all that should run for ever."""
        stop_http = await serve_http(
            self._options, healthy=lambda: ended(self._background), ready=self._ready, note=self._note
        )
        try:
            async with asyncio.TaskGroup() as group:
                for name, work in (
                    ("sockets", self._driver.watch),
                    ("statuses", self._statuses.run),
                    ("hardware", self._look),
                    ("inventory", self._announce),
                    ("devices", self._hand_out),
                ):
                    self._background.append(group.create_task(work(), name=name))
                try:
                    await self._work()
                finally:
                    for task in self._background:
                        task.cancel()
        finally:
            await stop_http()

    def _ready(self) -> str:
        return f"Temporal cannot be reached: {self._link.away}" if self._link.away else ""

    def _note(self) -> str:
        status = self._statuses.trouble and f"statuses of caches cannot be written: {self._statuses.trouble}"
        simulated = "its GPUs are simulated" if self._hardware.simulated else ""
        seats = self._seats.service.note if self._seats is not None else ""
        return "; ".join(filter(None, (self._hardware.problem, status, simulated, self._devices.note, seats)))

    async def _hand_out(self) -> None:
        await asyncio.shield(self._handing_out)

    async def _look(self) -> None:
        while True:
            await self._hardware.look()
            await asyncio.sleep(LOOK)

    async def _announce(self) -> None:
        """Tells this node's workflow what there is, at the start and whenever that is something else."""
        told, pause = "", _PAUSES[0]
        while True:
            fingerprint, temporal = self._hardware.fingerprint, self._link.client
            if temporal is not None and fingerprint not in ("", told):
                found = Inventory(self._name, fingerprint)
                try:
                    await temporal.start_workflow(
                        NODE_WORKFLOW,
                        found,
                        id=node_id(self._name),
                        task_queue=TASK_QUEUE,
                        search_attributes=node_attributes(self._name),
                        static_summary=f"Node {self._name}",
                        start_signal=INVENTORY,
                        start_signal_args=[found],
                    )
                    told, pause = fingerprint, _PAUSES[0]
                    log.info("told the control plane of %d GPUs", len(self._hardware.gpus or ()))
                except TEMPORAL_AWAY as away:
                    log.warning("the control plane cannot be told of this node: %s", reason(away))
                    pause = min(2 * pause, _PAUSES[1])
            await asyncio.sleep(pause)

    async def _work(self) -> None:
        """Serves the node's queue, however often Temporal goes away. Cancelled, it takes no more work and lets what
        runs come to its end, or to the point from which it is gone on with.
        """
        pause = _PAUSES[0]
        while True:
            try:
                temporal = await connect_temporal(self._options, traced=self._traced, lazy=False)
                self._link.client = temporal
                self._hear("")
                pause = _PAUSES[0]
                workers = [build_worker(temporal, self._name, self._caches)]
                if self._seats is not None:
                    workers.append(build_seat_worker(temporal, self._name, self._seats.service.switches))
                await until_one_ends(workers)
            except TEMPORAL_AWAY as away:
                self._link.client = None
                self._hear(reason(away))
            # A certificate that cannot be read, perhaps: the kubelet is answered all the same.
            except Exception as wrong:
                self._link.client = None
                self._hear(f"{type(wrong).__name__}: {wrong}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    def _hear(self, away: str) -> None:
        if away and away != self._link.away:
            log.warning("waiting for Temporal: %s", away)
        self._link.away = away


def build_worker(temporal: Client, node: str, caches: Caches) -> Worker:
    """Unversioned, unlike the control plane's: a deployment version has 100 queues, and there are more nodes."""
    return Worker(
        temporal,
        task_queue=node_queue(node),
        activities=[caches.prepare, caches.remove],
        max_concurrent_activities=AT_ONCE,
        max_heartbeat_throttle_interval=HEARTBEATS,
        default_heartbeat_throttle_interval=HEARTBEATS,
        graceful_shutdown_timeout=DRAIN,
    )


def build_seat_worker(temporal: Client, node: str, switches: Switches) -> Worker:
    """On a queue of its own: a switch is not to wait for gigabytes of kernels that are extracted."""
    return Worker(
        temporal,
        task_queue=seat_queue(node),
        activities=[switches.turn, switches.pass_on, switches.prefer],
        max_concurrent_activities=2 * MOST_GROUPS,  # of a group a switch, and a migration that waits for it
        max_heartbeat_throttle_interval=HEARTBEATS,
        default_heartbeat_throttle_interval=HEARTBEATS,
        graceful_shutdown_timeout=DRAIN,
    )
