"""The design's example under a real kubelet: A, B and C share one group of GPUs, D, E and F another; C moves over while
all of them are asked, and nobody's request is lost.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.nodeworkers.csi_rig import needs_mounts
from tests.nodeworkers.devices.whole import SEAT, seats
from tests.nodeworkers.pods import NODE
from tests.nodeworkers.seats.test_whole import missing
from tests.nodeworkers.seats.whole import Seated, seated, server, service

pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or "possible"),
]

ENDED = {"Completed", "RolledBack", "Refused"}
FIRST, SECOND, SEATS = ("a", "b", "c"), ("d", "e", "f"), 4


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seated]:
    with seated(tmp_path_factory.mktemp("moves"), lost_percent=50, per_group=SEATS) as made:
        yield made


def holders(node: Seated, group: str) -> dict[str, str]:
    """Which pod has which seat of the group, as its node tells."""
    status = node.node.get("gpuseatgroup", f"{NODE}.{group.lower()}").get("status", {})
    return {each["id"]: each["heldBy"]["pod"] for each in status.get("seats", []) if "heldBy" in each}


def told(node: Seated, pod: str) -> set[str]:
    found = node.node.listed("events.events.k8s.io")
    return {each["reason"] for each in found if each["regarding"].get("name") == pod}


def profile() -> dict[str, Any]:
    """Both groups; a load is counted over the shortest time that there is, and what is worth it is done."""
    made = seats(("G01", [0, 1]), ("G23", [2, 3]), per_group=SEATS)
    made["spec"]["profiles"][0]["policy"] = {"type": "onDemand", "lostPercent": 50, "windowSeconds": 60}
    made["spec"]["rebalance"] = "Perform"
    return made


@contextmanager
def nudged(node: Seated) -> Iterator[None]:
    """The kubelet tries a container that was refused again at once where its Pod changes, and else every 15 s."""
    over = threading.Event()

    def nudge() -> None:
        for number in itertools.count():
            if over.wait(1.0):
                return
            told = ("annotate", "pods", "--all", "--overwrite", f"nudged={number}")
            node.node.stack.kubectl(*told, check=False)

    thread = threading.Thread(target=nudge)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def start(node: Seated, group: str, names: tuple[str, ...]) -> None:
    node.node.apply(*(service(name) for name in names), *(server(name, node.folder) for name in names))
    with ThreadPoolExecutor(len(names)) as clients:
        assert [each["model"] for each in clients.map(node.ask_until_answered, names)] == list(names)
    assert sorted(holders(node, group).values()) == list(names)


def test_c_moves_to_the_group_that_is_asked_for_less_and_no_request_is_lost(node: Seated) -> None:
    machine = node.node
    with nudged(node):
        start(node, "G01", FIRST)
        machine.apply(profile())
        machine.until_allocatable(SEAT, 2 * SEATS)
        start(node, "G23", SECOND)

        over, wrong, answered = threading.Event(), list[str](), dict.fromkeys((*FIRST, *SECOND), 0)

        def client(name: str, pause: float) -> None:
            while not over.wait(pause):
                try:
                    found = node.ask(name)["model"]
                except OSError as error:  # a refusal with a reason as well: there is none to be had here
                    wrong.append(f"{name}: {error}")
                else:
                    wrong.extend([f"{name} was answered by {found}"] if found != name else [])
                    answered[name] += 1

        loads = dict.fromkeys(FIRST, 0.02) | dict.fromkeys(SECOND, 10.0)
        threads = [threading.Thread(target=client, args=each) for each in loads.items()]
        for thread in threads:
            thread.start()
        try:
            machine.until("one of A, B and C has moved", lambda: bool(phases(node) & ENDED), 240)
            (shown,) = machine.listed("seatmigrations")
            moved = shown["spec"]["pod"]
            before = dict(answered)
            machine.until(f"{moved} is asked there", lambda: answered[moved] > before[moved] + 5, 60)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    status = shown["status"]
    assert status["phase"] == "Completed", status
    assert not wrong
    assert all(answered.values())
    new = status["destination"]["pod"]
    assert moved in FIRST and new.startswith(f"{moved}-m")
    assert sorted(holders(node, "G23").values()) == sorted([*SECOND, new])
    left = sorted({*FIRST} - {moved})
    machine.until("its seat is free", lambda: sorted(holders(node, "G01").values()) == left)
    assert machine.status(new)["containerStatuses"][0]["restartCount"] == 0
    assert told(node, moved) >= {"SeatMoveOrdered", "SeatMigrating", "SeatMigrated"}
    assert told(node, new) >= {"SeatMigrating", "SeatMigrated"}
    assert not node.verdict().wrong


def phases(node: Seated) -> set[str]:
    return {each.get("status", {}).get("phase", "") for each in node.node.listed("seatmigrations")}
