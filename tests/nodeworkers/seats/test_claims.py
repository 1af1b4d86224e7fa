"""Seats by DRA under a real kubelet: nobody but the container runtime asks before a start, and berth is its plugin
(NRI). Two servers take turns as they do by device plugin, and neither is ever on the GPUs without the slot.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nodeworkers.nri.plugin import SOCKET
from tests.nodeworkers.csi_rig import needs_mounts
from tests.nodeworkers.pods import NODE
from tests.nodeworkers.seats.test_whole import missing
from tests.nodeworkers.seats.whole import Seated, seated, server, service

pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=missing() or "possible"),
]
TWO = ("a", "b")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seated]:
    with seated(tmp_path_factory.mktemp("claims"), lost_percent=50, front="--dra") as made:
        yield made


def test_two_servers_with_claimed_seats_take_turns(node: Seated) -> None:
    machine = node.node
    # Nobody asks them yet: that they want to start is all that gets them the slot.
    machine.apply(*(service(name) for name in TWO), *(server(name, node.folder) for name in TWO))
    for name in TWO:
        machine.until_phase(name, seconds=120)
    for name in TWO:
        assert node.ask_until_answered(name)["model"] == name
    for name in ("a", "b", "a"):
        assert node.ask(name)["model"] == name
    for name in TWO:
        claims = machine.get("pod", name)["status"].get("extendedResourceClaimStatus", {})
        assert claims.get("resourceClaimName"), "its seat is a claim's"
        assert machine.status(name)["containerStatuses"][0]["restartCount"] == 0
    notes = [each.get("note", "") for each in machine.listed("events.events.k8s.io") if each["reason"] == "Failed"]
    assert any("waits for the slot of G01" in note for note in notes), notes
    # A server that dies while another has the slot is not started beside it.
    for pid in node.processes("--name b"):
        os.kill(pid, signal.SIGKILL)
    machine.until("b ended", lambda: machine.status("b")["containerStatuses"][0].get("lastState", {}) != {})
    assert node.ask("a")["model"] == "a"
    assert node.ask_until_answered("b")["model"] == "b"
    assert machine.status("b")["containerStatuses"][0]["restartCount"] == 1
    checks = {each["name"]: each for each in node.group()["preflight"]}
    assert checks["nri"]["ok"] and "asks berth" in checks["nri"]["message"]
    assert machine.get("gpuseatgroup", f"{NODE}.g01")["status"]["resource"] == "kyb.ai/gpu-2x-seat"
    verdict = node.verdict()
    assert not verdict.wrong and verdict.restores >= 2 * 2
    assert SOCKET.is_socket()
