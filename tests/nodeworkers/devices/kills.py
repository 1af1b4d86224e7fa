"""What goes on while the kubelet and berth are killed on a machine of simulated devices, and what is seen of it: pods
that hold devices throughout, pods that come and go, and how soon everything is there again. For the test that nothing
is lost, and for `benchmarks.device_kills`.

Cards and seats are offered by device plugin there, GPUs by DRA: one process serves both, and both share each kill.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

from kube.client import KubeClient
from kube.resources import RESOURCESLICES
from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.devices.holdings import Listed, PodResourcesError
from planning.devices.slices import DRIVER
from stack import kubelet_root
from tests.nodeworkers.devices.whole import GPU, N150, SEAT, Machine, claiming, pod, template
from tests.nodeworkers.pods import NODE

FRONTS = ("--device-plugin", "tenstorrent.com/*", "--device-plugin", "kyb.ai/*", "--dra", "nvidia.com/*")
BY_PLUGIN = {N150: 4, SEAT: 4}
BY_DRA = {GPU: 4}
TEMPLATE = "one-gpu"
PLUGIN, DRA = "device-plugin", "dra"
BOTH = frozenset({PLUGIN, DRA})
LOAD = {"load": "yes"}
Side = Literal["kubelet", "node"]
Make = Callable[[str], dict[str, Any]]


def offered(slices: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many devices without a taint stand in a node's ResourceSlices, by resource. Slices of a pool that is being
    written anew count as they do for the scheduler: not at all, unless all of the newest generation are there.
    """
    specs = [each["spec"] for each in slices]
    newest = max((each["pool"]["generation"] for each in specs), default=0)
    specs = [each for each in specs if each["pool"]["generation"] == newest]
    if any(each["pool"]["resourceSliceCount"] != len(specs) for each in specs):
        return {}
    well = [device for each in specs for device in each["devices"] if not device.get("taints")]
    return Counter(str(device["attributes"]["resource"]["string"]) for device in well)


def holders(listed: Listed) -> dict[str, set[str]]:
    """The pods that have each device, however they got it."""
    found: dict[str, set[str]] = {}
    for holding in listed.devices:
        found.setdefault(holding.device_id, set()).add(holding.pod)
    for claimed in listed.claimed:
        found.setdefault(claimed.name, set()).add(claimed.pod)
    return found


@dataclass(frozen=True, slots=True)
class Look:
    """One, at `time` (monotonic): which front ends have all their devices there. `who`: who has what, None where the
    kubelet did not answer.
    """

    time: float
    whole: frozenset[str]
    who: Listed | None


class Looking:
    """At one node: what the kubelet says of devices and pods, and what the API server has of ResourceSlices."""

    def __init__(self, node: Machine, kube: KubeClient) -> None:
        self._asking = PodResources(kubelet_root(node.stack.layout.root) / "pod-resources" / "kubelet.sock")
        self._kube = kube

    async def look(self) -> Look:
        plugin, dra, who = await asyncio.gather(self._plugin(), self._dra(), self._who())
        return Look(time.monotonic(), plugin | dra, who)

    async def _plugin(self) -> frozenset[str]:
        try:
            there = await self._asking.allocatable()
        except PodResourcesError:
            return frozenset()
        whole = all(len(there.get(resource, ())) == count for resource, count in BY_PLUGIN.items())
        return frozenset({PLUGIN} if whole else ())

    async def _dra(self) -> frozenset[str]:
        slices, _ = await self._kube.list(RESOURCESLICES, field_selector=f"spec.nodeName={NODE},spec.driver={DRIVER}")
        there = offered(slices)
        whole = all(there.get(resource) == count for resource, count in BY_DRA.items())
        return frozenset({DRA} if whole else ())

    async def _who(self) -> Listed | None:
        try:
            return await self._asking.pods()
        except PodResourcesError:
            return None


class Watch(Thread):
    """Looks several times a second: a device in two pods, and capacity that is away, are seen whenever that is."""

    def __init__(self, node: Machine) -> None:
        super().__init__(daemon=True)
        self.looks: list[Look] = []
        self.over = Event()
        self._node = node

    def run(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        admin = self._node.stack.endpoints.kubeconfig("admin")
        async with await KubeClient.connect(admin, user_agent="watch") as kube:
            looking = Looking(self._node, kube)
            while not self.over.is_set():
                self.looks.append(await looking.look())
                await asyncio.sleep(0.15)

    def until_whole(self, since: float, seconds: float = 60.0) -> None:
        """Until a look after `since` found all devices of both front ends."""
        while not any(each.time > since and each.whole >= BOTH for each in self.looks[-20:]):
            assert self.is_alive(), "nobody looks any more"
            assert time.monotonic() < since + seconds, self._missing(seconds)
            time.sleep(0.05)

    def _missing(self, seconds: float) -> str:
        folder = self._node.stack.layout.log
        logs = [f"--- {name}\n{_tail(folder / name)}" for name in ("node.log", "kubelet.log")]
        return "\n".join([f"after {seconds:.0f} s devices are missing: {self.looks[-1]}", *logs])

    def doubled(self) -> list[str]:
        """Devices that more than one pod had, with those pods."""
        seen = [holders(each.who) for each in self.looks if each.who is not None]
        return [f"{device}: {sorted(pods)}" for held in seen for device, pods in held.items() if len(pods) > 1]


def _tail(log: Path, lines: int = 150) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def away(looks: Sequence[Look], front: str, since: float, until: float) -> float:
    """The longest that devices of a front end were missing between two times, in seconds: from when they were last
    seen until they were seen again. Nobody has seen them at first.
    """
    longest, last, missing = 0.0, since, True
    for look in (each for each in looks if since <= each.time <= until):
        whole = front in look.whole
        if missing or not whole:
            longest = max(longest, look.time - last)
        if whole:
            last = look.time
        missing = not whole
    return max(longest, until - last) if missing else longest


class Load(Thread):
    """Pods that come one after another, each with a device, and end. `trouble`: those that berth should have saved;
    `unsaved`: how many failed that no plugin could have saved.
    """

    def __init__(self, node: Machine, name: str, makes: Sequence[Make]) -> None:
        super().__init__(daemon=True)
        self.over = Event()
        self.ended = 0
        self.unsaved = 0
        self.trouble: list[str] = []
        self._node, self._name, self._makes = node, name, makes

    def run(self) -> None:
        number = 0
        while not self.over.is_set() and not self.trouble:
            number += 1
            self._one(self._makes[number % len(self._makes)](f"{self._name}{number}"))

    def _one(self, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        self._node.apply(body)
        deadline = time.monotonic() + 240
        while (status := self._node.status(name)).get("phase") not in ("Succeeded", "Failed"):
            if self.over.is_set():
                return
            if time.monotonic() > deadline:
                self.trouble.append(f"{name} is {status.get('phase')} after four minutes: {status}")
                return
            time.sleep(0.1)
        self.ended += 1
        if status["phase"] == "Succeeded":
            return
        # A kubelet that has just begun has no devices at all: no plugin can save who is admitted in that moment.
        if "no healthy devices present" in str(status.get("message")):
            self.unsaved += 1
        else:
            self.trouble.append(f"{name}: {status.get('reason')} {status.get('message')}")


@dataclass
class Seen:
    """`away`: the longest that devices were missing while kubelet and berth ran, in seconds, after each kill, by who
    was killed and by front end; `whole` the same from the kill on. `moved`: pods that held devices throughout, and did
    not keep them.
    """

    away: dict[tuple[Side, str], list[float]] = field(default_factory=dict)
    whole: dict[tuple[Side, str], list[float]] = field(default_factory=dict)
    ended: int = 0
    unsaved: int = 0
    looks: int = 0
    trouble: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)


LASTING: Mapping[str, Make] = {
    "lasting-card": lambda name: pod(name, N150, 2),
    "lasting-claim": lambda name: claiming(name, TEMPLATE),
    "lasting-named": lambda name: pod(name, GPU),
}
COMING: Mapping[str, Sequence[Make]] = {
    "card": (lambda name: pod(name, N150, script="sleep 1", labels=LOAD),),
    "gpu": (
        lambda name: claiming(name, TEMPLATE, "sleep 1", labels=LOAD),
        lambda name: pod(name, GPU, script="sleep 1", labels=LOAD),
    ),
}


def kill(node: Machine, kills: int) -> Seen:
    """Kills the kubelet and the node's process in turn, each `kills` times, while three pods hold devices and pods come
    and go in two rows. Asserts nothing: gives what was seen.
    """
    seen = Seen()
    node.apply(template(TEMPLATE), *(make(name) for name, make in LASTING.items()))
    for name in LASTING:
        node.until_phase(name)
    loads = [Load(node, name, makes) for name, makes in COMING.items()]
    watch = Watch(node)
    watch.start()
    try:
        before = until_they_hold(node, watch)
        for load in loads:
            load.start()
        node.until("pods come and go", lambda: all(load.ended or load.trouble for load in loads), 120)
        spans = [_killed(node, ("kubelet", "node")[number % 2], watch, number, loads) for number in range(2 * kills)]
        # A claim that was refused while nobody answered is tried again after a minute or more.
        goes_on(node, loads, 240)
        after = until_they_hold(node, watch)
    finally:
        for load in loads:
            load.over.set()
        for load in loads:
            load.join(250)
        watch.over.set()
        watch.join(20)
    for victim, killed, since, until in spans:
        for front in sorted(BOTH):
            seen.away.setdefault((victim, front), []).append(away(watch.looks, front, since, until))
            seen.whole.setdefault((victim, front), []).append(away(watch.looks, front, killed, until))
    seen.moved = [f"{name} had {before[name]}, has {after[name]}" for name in LASTING if before[name] != after[name]]
    seen.moved += [f"{name} ended" for name in LASTING if node.status(name).get("phase") != "Running"]
    seen.ended, seen.unsaved = sum(load.ended for load in loads), sum(load.unsaved for load in loads)
    seen.trouble = [each for load in loads for each in load.trouble]
    seen.doubled, seen.looks = watch.doubled(), len(watch.looks)
    node.remove(*LASTING)
    node.stack.kubectl("delete", "pod", "-l", "load=yes", "--timeout=120s")
    return seen


def _killed(
    node: Machine, victim: Side, watch: Watch, number: int, loads: Sequence[Load]
) -> tuple[Side, float, float, float]:
    """Who was killed and when, when it ran again, and until when both did."""
    killed = time.monotonic()
    node.stack.wait_restarted(victim, node.stack.kill(victim), 60)
    up = time.monotonic()
    watch.until_whole(up)
    # A kubelet that is killed every few seconds would start no pod at all. One that met `berth node` killed when it
    # prepared a claim asks again only after 10 s and more, so that it takes longer until such a pod gets through.
    if number % 4 == 3:
        goes_on(node, loads if number % 8 == 7 else loads[:1], 240)
    return victim, killed, up, time.monotonic()


def goes_on(node: Machine, loads: Sequence[Load], seconds: float) -> None:
    """Until another pod of each row has ended."""
    before = [load.ended for load in loads]
    node.until(
        "pods come and go",
        lambda: all(load.ended > ended or load.trouble for load, ended in zip(loads, before, strict=True)),
        seconds,
    )


def until_they_hold(node: Machine, watch: Watch) -> dict[str, set[str]]:
    """The devices of the pods that last, once the kubelet shows them all."""

    def held() -> dict[str, set[str]]:
        who = watch.looks[-1].who if watch.looks else None
        devices = holders(who or Listed())
        return {name: {device for device, pods in devices.items() if name in pods} for name in LASTING}

    node.until("the kubelet shows what pods hold", lambda: [len(each) for each in held().values()] == [2, 1, 1])
    return held()
