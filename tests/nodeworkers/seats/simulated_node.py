"""A node without a cluster: real servers on simulated GPUs in real processes, the real seat proxy and helper, a ledger,
and a test in place of the kubelet and the container runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nodeworkers.ledger import Ledger
from nodeworkers.seats.backend import Process
from nodeworkers.seats.backends.all import Backends
from nodeworkers.seats.doors import Doors
from nodeworkers.seats.gate import Gate
from nodeworkers.seats.helper.client import HelperClient
from nodeworkers.seats.helper.driver import CardMemory
from nodeworkers.seats.node_world import NodeWorld
from nodeworkers.seats.processes import started
from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_process import ProxyProcess
from nodeworkers.seats.proxy_words import News, ProxyError
from nodeworkers.seats.records import SeatRecords
from nodeworkers.seats.routes import Routes
from nodeworkers.seats.simulated_gpu.checker import Verdict, check
from nodeworkers.seats.simulated_gpu.machine import SimulatedCard, SimulatedMachine
from nodeworkers.seats.slots import Slots
from nodeworkers.seats.switching import Group, Patience
from nodeworkers.seats.tenants import GroupTenants, Tenant
from planning.seats.group import Policy
from planning.seats.host_memory import Level, NodeMemory
from planning.seats.pod_settings import pod_settings
from stack import StackError
from stack.native import cargo, ensure, find
from stack.ports import choose

GROUP = "G01"
CARDS = ("GPU-0", "GPU-1")
SIZE = 8 * 2**20  # bytes that a server has on each card
PATIENCE = Patience(settle=20.0, free=5.0, start=20.0, serve=10.0, again=0.1)


def program() -> Path:
    """The seat proxy; where there is none and none can be built the test is skipped."""
    try:
        if find("seat-proxy") is None:
            cargo()
    except StackError as missing:
        pytest.skip(f"the seat proxy cannot be had here: {missing}")
    return ensure("seat-proxy")


def seat(number: int) -> str:
    return f"kyb-{GROUP}-s{number}"


@dataclass
class Pod:
    """Of a seat: a container that is started as soon as it may, as the kubelet would."""

    seat: str
    port: int
    uid: str
    annotations: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class SimulatedNode:
    """Tenants and Host of one group, and what switches it."""

    def __init__(self, folder: Path, ledger: Ledger, policy: Policy) -> None:
        self.folder, self.pods = folder, dict[str, Pod | None]()
        self.machine = SimulatedMachine.make(folder / "gpus", [SimulatedCard(card, 12 * 2**20) for card in CARDS])
        self.policy, self.ledger = policy, ledger
        self.slots, self.records = (
            Slots(ledger),
            SeatRecords(ledger, [*choose([str(n) for n in range(8)], {}).values()]),
        )
        self.helper = HelperClient(folder / "helper.sock", f"simulated:{self.machine.folder}", phase=10.0)
        self.control = ProxyControl(folder / "proxy.sock")
        self.proxy = ProxyProcess(program(), folder / "proxy.sock", folder / "proxy.log", self.control)
        self.gate = Gate(self.slots, lambda group: None, 0.0)
        self.levels_told: tuple[Level, ...] = ()
        self.memory_told: NodeMemory | None = NodeMemory(2**34)
        self.missing: Sequence[str] = ()
        self.touched: Callable[[], None] = lambda: None
        self.world = self._world()
        self.session: aiohttp.ClientSession

    def _world(self) -> NodeWorld:
        self.routes = Routes(self.control, self._heard)
        doors = Doors(self.routes, self.records, "127.0.0.1")
        backends = Backends(lambda seat: self.helper, self)
        return NodeWorld(self, backends.of, doors, self, self.slots, self.records, self.gate, lambda seat: self.missing)

    def _heard(self, news: News) -> None:
        if self.world.heard(news):
            self.touched()

    # ---- Tenants

    def groups(self) -> Sequence[str]:
        return [GROUP]

    async def of(self, group: str, *, anew: bool = False) -> GroupTenants | None:
        if group != GROUP:
            return None
        return GroupTenants(group, CARDS, {each: self._tenant(each) for each in self.pods}, self.policy)

    def _tenant(self, name: str) -> Tenant | None:
        pod = self.pods[name]
        if pod is None:
            return None
        processes = _family(pod.process.pid) if pod.running and pod.process is not None else []
        return Tenant(
            name, CARDS, "default", f"pod-{name}", "server", pod.uid, "id", pod.running, processes, "127.0.0.1",
            1.0, pod_settings(pod.annotations), "" if pod.running else "its container has not started",
        )  # fmt: skip

    # ---- Host

    async def memory(self, group: str, cards: Sequence[str]) -> Mapping[str, CardMemory]:
        return await self.helper.memory(cards)

    async def serves(self, tenant: Tenant) -> str:
        if not tenant.settings.port:
            return ""
        try:
            async with self.session.get(f"http://{tenant.endpoint}/health") as response:
                return "" if response.status == 200 else f"it answers {response.status}"
        except aiohttp.ClientError as error:
            return str(error)

    async def levels(self, tenant: Tenant) -> tuple[Level, ...]:
        return self.levels_told

    async def node(self) -> NodeMemory | None:
        return self.memory_told

    async def end(self, tenant: Tenant) -> None:
        pod = self.pods[tenant.seat]
        if pod is not None and pod.process is not None:
            pod.process.kill()
            pod.process.wait()

    # ---- the kubelet

    def add(self, number: int, *options: str, **annotations: str) -> Pod:
        """A pod that holds the seat; with `port=""` one without a port."""
        port = choose(["one"], {})["one"]
        told = {f"kyb.ai/{name.replace('_', '-')}": value for name, value in annotations.items()}
        if annotations.get("port") == "":
            told.pop("kyb.ai/port")
            port = 0
        else:
            told["kyb.ai/port"] = str(port)
        self.pods[seat(number)] = pod = Pod(seat(number), port, f"uid-{number}", told, options)
        return pod

    def start(self) -> None:
        """Starts what may start; whoever may not has asked."""
        for name, pod in self.pods.items():
            if pod is None or pod.running:
                continue
            try:
                self.gate.start(GROUP, name)
            except Exception:
                continue
            pod.restarts += pod.process is not None
            command = [sys.executable, "-m", "nodeworkers.seats.simulated_gpu.server"]
            told = ["--folder", str(self.machine.folder), "--cards", ",".join(CARDS), "--bytes", str(SIZE)]
            pod.process = subprocess.Popen([*command, *told, "--name", name, "--port", str(pod.port), *pod.options])

    async def kubelet(self) -> None:
        """Until cancelled."""
        while True:
            self.start()
            await self.world.look(GROUP)
            with contextlib.suppress(ProxyError):
                await self.world.show(GROUP)
            await asyncio.sleep(0.02)

    # ---- whoever switches

    def group(self, run: str = "run") -> Group:
        return Group(GROUP, self.slots.enter(GROUP, run), self.slots, self.world, PATIENCE)

    async def switch(self, run: str = "run") -> str:
        """What the workflow does in one turn; who has the slot then."""
        cleared = await self.group(run).clear()
        if cleared.next:
            return (await self.group(run).fill(cleared.next)).active
        return cleared.active

    async def ask(self, number: int, tokens: int = 1, seconds: float = 20.0) -> tuple[int, Any]:
        """A request by way of the proxy: status and answer."""
        async with asyncio.timeout(10):
            while seat(number) not in await self.control.state():
                await asyncio.sleep(0.01)
        port = self.records.of(seat(number)).port
        async with self.session.post(
            f"http://127.0.0.1:{port}/v1/completions", json={"user": f"u{number}", "max_tokens": tokens},
            timeout=aiohttp.ClientTimeout(total=seconds),
        ) as response:  # fmt: skip
            return response.status, json.loads(await response.read())

    def verdict(self) -> Verdict:
        with (self.machine.folder / "log.jsonl").open() as log:
            return check(log)


def _family(pid: int) -> list[Process]:
    found = []
    for each in (pid, *_children(pid)):
        began = started(each)
        if began is not None:
            found.append(Process(each, began))
    return found


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@asynccontextmanager
async def simulated_node(folder: Path, policy: Policy) -> AsyncIterator[SimulatedNode]:
    ledger = Ledger(folder / "ledger")
    node = SimulatedNode(folder, ledger, policy)
    tasks = [asyncio.create_task(work) for work in (node.proxy.run(), node.routes.run())]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as node.session:
            tasks.append(asyncio.create_task(node.kubelet()))
            deadline = time.monotonic() + 20
            while node.proxy.trouble:
                assert time.monotonic() < deadline, node.proxy.trouble
                await asyncio.sleep(0.01)
            yield node
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        with contextlib.suppress(Exception):
            os.kill((await node.control.hello()).pid, signal.SIGKILL)
        await node.control.close()
        await asyncio.to_thread(subprocess.run, ["pkill", "-KILL", "-f", str(folder / "helper.sock")], check=False)
        for pod in node.pods.values():
            if pod is not None and pod.process is not None:
                pod.process.kill()
                pod.process.wait()
        ledger.close()
