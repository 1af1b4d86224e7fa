"""The design's example under a real kubelet: A, B and C share one group of GPUs, D, E and F another; C moves over while
all of them are asked, and nobody's request is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

FIRST, SECOND, SEATS = ("a", "b", "c"), ("d", "e", "f"), 4


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seated]:
    with seated(tmp_path_factory.mktemp("moves"), per_group=SEATS) as made:
        yield made


def holders(node: Seated, group: str) -> dict[str, str]:
    """Which pod has which seat of the group, as its node tells."""
    status = node.node.get("gpuseatgroup", f"{NODE}.{group.lower()}").get("status", {})
    return {each["id"]: each["heldBy"]["pod"] for each in status.get("seats", []) if "heldBy" in each}


def told(node: Seated, pod: str) -> set[str]:
    found = node.node.listed("events.events.k8s.io")
    return {each["reason"] for each in found if each["regarding"].get("name") == pod}


def test_c_moves_to_the_other_group_and_no_request_is_lost(node: Seated) -> None:
    machine = node.node
    for group, names in (("G01", FIRST), ("G23", SECOND)):
        if group == "G23":
            machine.apply(seats(("G01", [0, 1]), ("G23", [2, 3]), per_group=SEATS))
            machine.until_allocatable(SEAT, 2 * SEATS)
        machine.apply(*(service(name) for name in names), *(server(name, node.folder) for name in names))
        with ThreadPoolExecutor(3) as clients:
            assert [each["model"] for each in clients.map(node.ask_until_answered, names)] == list(names)
    assert sorted(holders(node, "G01").values()) == list(FIRST)
    assert sorted(holders(node, "G23").values()) == list(SECOND)

    over, wrong, answered = threading.Event(), list[str](), dict.fromkeys((*FIRST, *SECOND), 0)

    def client(name: str) -> None:
        while not over.is_set():
            try:
                found = node.ask(name)["model"]
            except OSError as error:  # a refusal with a reason as well: there is none to be had here
                wrong.append(f"{name}: {error}")
            else:
                wrong.extend([f"{name} was answered by {found}"] if found != name else [])
                answered[name] += 1
            time.sleep(0.02)

    asked: tuple[str, ...] = (*FIRST, "d")
    threads = [threading.Thread(target=client, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    try:
        machine.apply(migration("c-away", "c", "G23"))
        machine.until("C has moved", lambda: phase(node, "c-away") in ("Completed", "RolledBack", "Refused"), 180)
        before = dict(answered)
        machine.until("C is asked there", lambda: answered["c"] > before["c"] + 2, 120)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    shown = machine.get("seatmigration", "c-away")["status"]
    assert shown["phase"] == "Completed", shown
    assert not wrong
    assert all(answered[name] for name in asked)
    new = shown["destination"]["pod"]
    assert new in holders(node, "G23").values() and new.startswith("c-m")
    assert sorted(holders(node, "G01").values()) == ["a", "b"]
    assert machine.status(new)["containerStatuses"][0]["restartCount"] == 0
    assert told(node, "c") >= {"SeatMigrating", "SeatMigrated"} <= told(node, new)
    verdict = node.verdict()
    assert not verdict.wrong


def migration(name: str, pod: str, group: str) -> dict[str, Any]:
    return {
        "apiVersion": "kyb.ai/v1alpha1",
        "kind": "SeatMigration",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"pod": pod, "to": {"group": group}},
    }


def phase(node: Seated, name: str) -> str:
    return str(node.node.get("seatmigration", name).get("status", {}).get("phase"))
