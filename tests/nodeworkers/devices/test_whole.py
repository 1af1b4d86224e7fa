"""Simulated devices under a real kubelet, cards and seats by device plugin and GPUs by DRA: what pods get, what becomes
of a card that dies, and that neither the kubelet nor berth loses a device when it is killed again and again under load.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.seats.containers import Containers, ContainersError, Found
from nodeworkers.seats.following import Following
from nodeworkers.seats.limits import levels
from nodeworkers.seats.stopping import stop_container
from planning.devices.slices import UNHEALTHY
from stack import StackError, cdi_folder
from stack.realnode import unavailable
from tests.nodeworkers.csi_rig import needs_mounts
from tests.nodeworkers.devices.kills import FRONTS, kill
from tests.nodeworkers.devices.whole import (
    CARDS,
    GPU,
    GPUS,
    N150,
    SEAT,
    Machine,
    claiming,
    machine,
    pod,
    seats,
    template,
)
from tests.nodeworkers.pods import NODE

pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]

KILLS = 5  # of each; twenty take two minutes and a half
BACK = 5.0  # seconds for which devices may be missing while the kubelet and berth are up


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("devices"), *FRONTS) as made:
        for resource in (N150, SEAT):
            made.until_allocatable(resource, 4)
        made.until("4 GPUs are in ResourceSlices", lambda: len(gpus(made)) == 4)
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
    node.until("the pod's status says so", lambda: health(node, "holder") == {"Healthy": 3, "Unhealthy": 1})

    def ill() -> list[tuple[str, str]]:
        cards = node.get("nodedevices", NODE)["status"]["cards"]
        return [(each["id"], each["reason"]) for each in cards if each["health"] != "Healthy"]

    node.until("NodeDevices say so", lambda: [reason for _, reason in ill()] == ["Detached"])
    ((card, _),) = ill()
    events = node.stack.kubectl("get", "events", "-A", "--field-selector=reason=DeviceUnhealthy")
    assert card in events and "Detached" in events
    node.has()
    node.until_allocatable(N150, 4)
    node.until("the pod's status says that it is well", lambda: health(node, "holder") == {"Healthy": 4})
    node.remove("holder")


def test_pods_get_gpus_by_claim_and_by_resource_name_and_are_told_of_trouble(node: Machine) -> None:
    assert not node.allocatable(GPU), "what DRA offers does not stand in allocatable"
    node.apply(template("two", 2), claiming("claims", "two"), pod("named", GPU))
    had: dict[str, set[int]] = {}
    for name, count in (("claims", 2), ("named", 1)):
        node.until_phase(name)
        assert node.variables(name)["NVIDIA_VISIBLE_DEVICES"] == "void"
        there = set(node.inside(name, "ls /dev").split())
        had[name] = {number for number in range(8) if f"nvidia{number}" in there}
        assert len(had[name]) == count and {"nvidiactl", "nvidia-uvm"} <= there
    assert had["claims"].isdisjoint(had["named"])
    assert had["claims"] | had["named"] <= {4, 5, 6, 7}, "the others are in groups of seats"

    def holders() -> set[str]:
        devices = node.get("nodedevices", NODE)["status"]["devices"]
        return {each["heldBy"]["pod"] for each in devices if each["resource"] == GPU and "heldBy" in each}

    node.until("who has them is told", lambda: holders() == {"claims", "named"})
    ill = min(had["claims"])
    models = [{"product": "H100"} | ({"fault": "lost"} if number == ill else {}) for number in range(8)]
    node.has(gpus={**GPUS, "gpus": models})
    node.until("it is tainted", lambda: [each["tainted"] for each in gpus(node)].count(True) == 1)
    node.until("the pod is told", lambda: health(node, "claims") == {"Healthy": 1, "Unhealthy": 1})
    node.apply(pod("late", GPU, 2))
    node.until("two more wait", lambda: "cannot allocate all claims" in str(node.status("late").get("conditions")))
    node.remove("named")
    node.until_phase("late")
    assert f"nvidia{ill}" not in node.inside("late", "ls /dev").split()
    node.has()
    node.until("it is well again", lambda: not any(each["tainted"] for each in gpus(node)))
    node.until("the pod is told that it is", lambda: health(node, "claims") == {"Healthy": 2})
    node.remove("claims", "late")


def test_nothing_is_lost_or_given_twice_when_either_side_is_killed_under_load(node: Machine) -> None:
    seen = kill(node, KILLS)
    for (victim, front), seconds in seen.away.items():
        print(f"{victim} killed {len(seconds)} times; devices by {front} were missing {max(seconds):.1f} s at most")
    print(f"{seen.ended} pods ran, {seen.unsaved} of them failed as no plugin could prevent; {seen.looks} looks")
    assert not seen.trouble, seen.trouble
    assert not seen.doubled, f"a card in two pods: {seen.doubled}"
    assert not seen.moved, f"what pods held throughout did not stay theirs: {seen.moved}"
    assert len(seen.away) == 4 and all(max(each) <= BACK for each in seen.away.values()), seen.away
    assert seen.looks > 10 * KILLS


def test_cards_that_say_nothing_or_hang_cost_themselves_alone_among_200(node: Machine) -> None:
    ill = [{"type": "n150", "fault": "hang"}, {"type": "n150", "fault": "empty-attribute"}]
    node.has([{"type": "n150", "count": 2}, *ill, {"type": "n150", "count": 196}])
    node.until_allocatable(N150, 198)

    def told() -> dict[str, str]:
        cards = node.get("nodedevices", NODE)["status"]["cards"]
        return {each["reason"]: each["id"] for each in cards if each["health"] != "Healthy"}

    node.until("NodeDevices say which, and why", lambda: told().keys() == {"Hangs", "AttributeEmpty"})
    log = node.stack.log_file("node").read_text()
    assert all(any(id in line and '"warning"' in line for line in log.splitlines()) for id in told().values())
    assert node.allocatable(SEAT) == 4 and not any(each["tainted"] for each in gpus(node))
    node.has()
    node.until_allocatable(N150, 4)


def test_the_processes_of_a_container_are_found_followed_and_ended(node: Machine) -> None:
    """By the runtime's own socket, also after it was killed, and by what it told before."""
    made = pod("found", N150, script="sleep 100000 & sleep 100001 & wait", annotations={"kyb.ai/port": "8000"})
    made["spec"]["restartPolicy"] = "Always"
    made["spec"]["containers"][0]["resources"]["limits"]["memory"] = "64Mi"
    node.apply(made)
    node.until_phase("found")
    asyncio.run(found_followed_and_ended(node))
    node.remove("found")


def argument(pid: int) -> str:
    """The first that it was started with."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1]


async def found_followed_and_ended(node: Machine) -> None:
    socket = cdi_folder(node.stack.layout.root).with_name("containerd.sock")
    asking, following = Containers(socket), Following(socket)
    running = asyncio.ensure_future(following.run())

    async def look(holds: Callable[[Found], bool], what: str) -> Found:
        began, seen = time.monotonic(), following.news
        while True:
            try:
                found = await asking.look("default", "found", "c")
                if holds(found):
                    return found
                told = str(found)
            except ContainersError as error:
                told = str(error)
            assert time.monotonic() - began < 60, f"{what}: {told}"
            seen = await following.changed(seen, 0.5)

    try:
        first = await look(lambda found: found.running is not None and len(found.running.processes) == 3, "it runs")
        container, there = first.running, first.pod
        assert container is not None and there is not None
        assert container.attempt == 0 and container.root in container.processes
        assert sorted(argument(each.pid) for each in container.processes) == ["-ec", "100000", "100001"]
        status = await asyncio.to_thread(node.get, "pod", "found")
        assert (there.uid, there.address) == (status["metadata"]["uid"], status["status"]["podIP"])
        assert there.annotations["kyb.ai/port"] == "8000" and there.ready
        (own, *_) = levels(container.cgroup, there.uid)
        assert (own.name, own.limit) == ("container", 64 * 2**20) and 0 < own.used < 64 * 2**20
        took = []
        for _ in range(50):
            began = time.perf_counter()
            await asking.look("default", "found", "c", there.uid)
            took.append(1000 * (time.perf_counter() - began))
        print(f"a look: p50 {sorted(took)[25]:.1f} ms, longest {max(took):.1f} ms")

        # A runtime that is killed is told, and comes back with the same container.
        killed = await asyncio.to_thread(node.stack.kill, "containerd")
        while not following.trouble:
            await following.changed(following.news, 60)
        await asyncio.to_thread(node.stack.wait_restarted, "containerd", killed, timeout=60)
        same = await look(lambda found: not following.trouble, "it answers again")
        assert same.running == container

        # All of it ends, nothing else does, and what the kubelet starts in its place is heard of.
        assert await stop_container(container.cgroup, grace=5) == ()
        again = await look(lambda found: found.running is not None and found.running.id != container.id, "it runs anew")
        assert again.running is not None and again.ended is not None
        assert (again.running.attempt, again.ended.attempt, again.ended.id) == (1, 0, container.id)
        assert set(again.running.processes).isdisjoint(container.processes)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


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
    with pytest.raises(StackError, match="groups overlap"):
        node.apply(seats(("G45", [4, 5]), ("G56", [5, 6])))
    node.apply(seats(("G45", [4, 5]), ("G56", ["GPU-51700005-0000-4000-8000-000000000005", 6])))
    node.until("groups that overlap by other names are told", lambda: "G56" in told_of_seats())
    node.apply(seats(("G89", [8, 9])))
    node.until("GPUs that there are not are told", lambda: "G89" in told_of_seats())
    assert node.allocatable(SEAT) == 2, "what worked before stays"


def gpus(node: Machine) -> list[dict[str, Any]]:
    """Those in the node's ResourceSlices, and whether each is tainted as unhealthy."""
    slices = node.listed("resourceslices", f"--field-selector=spec.nodeName={NODE}")
    return [
        {"name": each["name"], "tainted": any(taint["key"] == UNHEALTHY for taint in each.get("taints", ()))}
        for body in slices
        for each in body["spec"]["devices"]
        if each["attributes"]["resource"]["string"] == GPU
    ]


def health(node: Machine, name: str) -> Counter[str]:
    """What a pod's status tells of its devices."""
    containers = node.status(name).get("containerStatuses", [])
    told = [each for container in containers for each in container.get("allocatedResourcesStatus", [])]
    return Counter(device["health"] for each in told for device in each.get("resources", ()))
