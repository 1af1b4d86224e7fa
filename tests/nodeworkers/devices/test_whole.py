"""Simulated devices under a real kubelet, cards and seats by device plugin and GPUs by DRA: what pods get, what becomes
of a card that dies, and that neither the kubelet nor berth loses a device when either is killed, again and again,
under load.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest

from nodeworkers.device_plugin.podresources import PodResources
from nodeworkers.devices.holdings import Listed, PodResourcesError
from stack import StackError, kubelet_root
from stack.realnode import unavailable
from tests.nodeworkers.csi_rig import needs_mounts
from tests.nodeworkers.devices.whole import CARDS, GPU, N150, SEAT, Machine, claiming, machine, pod, seats, template
from tests.nodeworkers.pods import NODE

pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]

KILLS = 5  # of each; twenty take two minutes and a half
BACK = 5.0  # seconds in which all is back once the kubelet and berth are up


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    fronts = ("--device-plugin", "tenstorrent.com/*", "--device-plugin", "kyb.ai/*", "--dra", "nvidia.com/*")
    with machine(tmp_path_factory.mktemp("devices"), *fronts) as made:
        for resource, count in ((N150, 4), (SEAT, 4)):
            made.until_allocatable(resource, count)
        made.until("GPUs are in ResourceSlices", lambda: len(made.by_dra(GPU)) == 4)
        yield made


def test_a_pod_gets_its_own_cards_and_no_other(node: Machine) -> None:
    node.apply(pod("cards", N150, 2))
    node.until_phase("cards")
    visible = node.variables("cards")["TT_VISIBLE_DEVICES"].split(",")
    assert len(visible) == 2 and all(len(address) == len("0000:01:00.0") for address in visible)
    nodes = node.inside("cards", "ls /dev/tenstorrent").split()
    assert len(nodes) == 2 and set(nodes) <= {"0", "1", "2", "3"}
    node.apply(pod("others", N150, 2))
    node.until_phase("others")
    assert set(nodes).isdisjoint(node.inside("others", "ls /dev/tenstorrent").split())
    node.apply(pod("late", N150))
    node.until(
        "the third waits",
        lambda: "Insufficient tenstorrent.com/n150" in str(node.status("late").get("conditions")),
    )
    node.remove("cards", "others", "late")


def test_a_card_that_dies_is_told_everywhere_and_comes_back(node: Machine) -> None:
    node.apply(pod("holder", N150, 4))
    node.until_phase("holder")
    node.has([{**CARDS[0], "fault": "detached"}, *CARDS[1:]])
    began = time.monotonic()
    node.until_allocatable(N150, 3)
    print(f"from the card's death to the node's allocatable: {time.monotonic() - began:.1f} s")

    def health() -> Counter[str]:
        containers = node.status("holder").get("containerStatuses", [])
        told = [each for container in containers for each in container.get("allocatedResourcesStatus", [])]
        return Counter(device["health"] for each in told for device in each["resources"])

    node.until("the pod's status says so", lambda: health() == {"Healthy": 3, "Unhealthy": 1})

    def ill() -> list[tuple[str, str]]:
        cards = node.get("nodedevices", NODE)["status"]["cards"]
        return [(each["id"], each["reason"]) for each in cards if each["health"] != "Healthy"]

    node.until("NodeDevices say so", lambda: [reason for _, reason in ill()] == ["Detached"])
    ((card, _),) = ill()
    events = node.stack.kubectl("get", "events", "-A", "--field-selector=reason=DeviceUnhealthy")
    assert card in events and "Detached" in events
    node.has()
    node.until_allocatable(N150, 4)
    node.until("the pod's status says that it is well", lambda: health() == {"Healthy": 4})
    node.remove("holder")


def test_gpus_come_through_dra_by_claim_and_by_the_name_that_they_had(node: Machine) -> None:
    node.apply(template("two", 2))
    node.apply(claiming("claims", "two"), pod("named", GPU))
    held: list[str] = []
    for name, count in (("claims", 2), ("named", 1)):
        node.until_phase(name)
        there = set(node.inside(name, "ls /dev").split())
        mine = {f"nvidia{index}" for index in range(8)} & there
        assert len(mine) == count and {"nvidiactl", "nvidia-uvm"} <= there
        assert node.variables(name)["NVIDIA_VISIBLE_DEVICES"] == "void"
        held += mine
    assert len(set(held)) == 3 and set(held) <= {f"nvidia{index}" for index in (4, 5, 6, 7)}, "0 to 3 are in groups"
    assert node.allocatable(GPU) == 0, "what DRA offers does not stand in allocatable"

    def holders() -> set[str]:
        devices = node.get("nodedevices", NODE)["status"]["devices"]
        return {each["heldBy"]["pod"] for each in devices if each["resource"] == GPU and "heldBy" in each}

    node.until("who has them is told", lambda: holders() == {"claims", "named"})
    node.apply(pod("late", GPU, 2))
    node.until("two more wait", lambda: "cannot allocate all claims" in str(node.status("late").get("conditions")))
    node.remove("claims", "named")
    node.until_phase("late")
    node.remove("late")


def test_nothing_is_lost_or_given_twice_when_either_side_is_killed_under_load(node: Machine) -> None:
    node.apply(template("one"))
    by_plugin = Load("card", node, lambda name, **more: pod(name, N150, **more))
    by_name = Load("gpu", node, lambda name, **more: pod(name, GPU, **more))
    by_claim = Load("claim", node, lambda name, **more: claiming(name, "one", **more))
    loads = (by_plugin, by_name, by_claim)
    for load in loads:
        load.start()
    took = []
    try:
        for number in range(2 * KILLS):
            victim = ("kubelet", "node")[number % 2]
            node.stack.wait_restarted(victim, node.stack.kill(victim), 60)
            took.append(asyncio.run(until_all_are_there(node)))
            assert took[-1] <= BACK, f"kill {number} of {victim}: all was back after {took[-1]:.1f} s"
            if number % 4 == 3:  # a kubelet that is killed every few seconds would start no pod at all
                node.until("pods come and go", by_plugin.goes_on, 120)
        # What a kubelet that had just begun could not prepare it tries again after a minute or more.
        for load in loads:
            node.until(f"pods of load {load.kind} came and went", load.goes_on, 180)
    finally:
        for load in loads:
            load.over.set()
        for load in loads:
            load.join(120)
    ended = {load.kind: load.ended for load in loads}
    print(f"{len(took)} kills; all was back after {max(took):.1f} s at most; pods ran meanwhile: {ended}")
    assert not [load.trouble for load in loads if load.trouble]
    node.stack.kubectl("delete", "pod", "-l", "load=yes", "--timeout=120s")


def test_a_seat_brings_what_cuda_needs_and_outlives_its_configuration_while_it_is_held(node: Machine) -> None:
    node.apply(*(pod(f"seat{number}", SEAT) for number in range(2)))
    told = []
    for number in range(2):
        node.until_phase(f"seat{number}")
        told.append(node.variables(f"seat{number}"))
    assert {each["KYB_GPU_GROUP"] for each in told} == {"G01", "G23"}, "seats go to the group that has fewer in use"
    for number, env in enumerate(told):
        first = {"G01": 0, "G23": 2}[env["KYB_GPU_GROUP"]]
        assert env["KYB_GPU_SEAT"].startswith(f"kyb-{env['KYB_GPU_GROUP']}-s")
        assert env["KYB_GPU_INDICES"] == f"{first},{first + 1}"
        assert [uuid[:12] for uuid in env["CUDA_VISIBLE_DEVICES"].split(",")] == [
            f"GPU-5170{index:04x}" for index in (first, first + 1)
        ]
        there = set(node.inside(f"seat{number}", "ls /dev").split())
        assert {f"nvidia{first}", f"nvidia{first + 1}", "nvidiactl", "nvidia-uvm"} <= there
        assert not {f"nvidia{index}" for index in range(8) if index not in (first, first + 1)} & there

    def told_of_seats() -> str:
        return str(node.get("nodedevices", NODE).get("status", {}).get("seats", {}))

    # One group is to have other GPUs, the other is to go: both are held, and stay as they are.
    node.apply(seats(("G01", [4, 5])))
    node.until("what waits is told", lambda: "waits" in told_of_seats())
    devices = {each["id"]: each for each in node.get("nodedevices", NODE)["status"]["devices"]}
    for env in told:
        held = devices[env["KYB_GPU_SEAT"]]
        assert held["healthy"] and sorted(held["cards"]) == sorted(env["CUDA_VISIBLE_DEVICES"].split(","))
        assert node.status(f"seat{told.index(env)}")["phase"] == "Running"
    node.remove("seat0", "seat1")
    node.until(
        "the new configuration is there once the kubelet shows that they are free",
        lambda: {
            tuple(each["cards"])
            for each in node.get("nodedevices", NODE)["status"]["devices"]
            if each["resource"] == SEAT
        } == {tuple(f"GPU-5170{index:04x}-0000-4000-8000-{index:012x}" for index in (4, 5))},
        150,
    )  # fmt: skip
    with pytest.raises(StackError, match="no profile's groupSize"):
        node.apply(seats(("G01", [0, 1, 2])))
    node.apply(seats(("G89", [8, 9])))
    node.until("GPUs that there are not are told", lambda: "G89" in told_of_seats())
    assert node.allocatable(SEAT) == 2, "what worked before stays"


class Load(Thread):
    """Pods that come one after another, each with a device, and end. `trouble`: those that berth should have saved."""

    def __init__(self, kind: str, node: Machine, make: Callable[..., dict[str, Any]]) -> None:
        super().__init__()
        self.kind = kind
        self._make = make
        self.over = Event()
        self.ended = 0
        self.trouble: list[str] = []
        self._node = node
        self._told = 0

    def goes_on(self) -> bool:
        """Whether a pod has ended since this was last true."""
        before, self._told = self._told, self.ended
        return self.ended > before or bool(self.trouble)

    def run(self) -> None:
        number = 0
        while not self.over.is_set() and not self.trouble:
            number += 1
            self._one(f"{self.kind}{number}")

    def _one(self, name: str) -> None:
        self._node.apply(self._make(name, script="sleep 1", labels={"load": "yes"}))
        deadline = time.monotonic() + 240
        while (status := self._node.status(name)).get("phase") not in ("Succeeded", "Failed"):
            if self.over.is_set():
                return
            if time.monotonic() > deadline:
                self.trouble.append(f"{name} is {status.get('phase')} after four minutes")
                return
            time.sleep(0.1)
        self.ended += 1
        # A kubelet that has just begun has no devices at all: no plugin can save who is admitted in that moment.
        if status["phase"] == "Failed" and "no healthy devices present" not in str(status.get("message")):
            self.trouble.append(f"{name}: {status.get('reason')} {status.get('message')}")


async def until_all_are_there(node: Machine) -> float:
    """Seconds until the kubelet has all devices again; no card is in two pods meanwhile."""
    asking = PodResources(kubelet_root(node.stack.layout.root) / "pod-resources" / "kubelet.sock")
    began = time.monotonic()
    while True:
        try:
            told, there = await asking.pods(), await asking.allocatable()
        except PodResourcesError:
            told, there = Listed(), {}
        assert not doubled(told), f"a card in two pods: {told}"
        slices = await asyncio.to_thread(node.by_dra, GPU)
        if len(slices) == 4 and all(len(there.get(resource, ())) == 4 for resource in (N150, SEAT)):
            return time.monotonic() - began
        assert time.monotonic() - began < 60, (there, slices)
        await asyncio.sleep(0.1)


def doubled(told: Listed) -> list[str]:
    by_plugin = {(each.device_id, each.namespace, each.pod) for each in told.devices}
    by_dra = {(each.name, each.namespace, each.pod) for each in told.claimed}
    return [device for device, count in Counter(device for device, _, _ in by_plugin | by_dra).items() if count > 1]
