"""Three model servers share a group of simulated GPUs under a real kubelet: each is asked by its Service, whoever is
asked is woken, whoever is not is parked, and nobody's memory is ever beside another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stack import StackError
from stack.native import cargo, find
from stack.realnode import unavailable
from tests.nodeworkers.csi_rig import needs_mounts
from tests.nodeworkers.seats.soak import soak
from tests.nodeworkers.seats.whole import NAMES, Seated, seated, server, service

KILLS = 120.0  # seconds of them


def missing() -> str:
    if why := unavailable():
        return why
    try:
        if find("seat-proxy") is None:
            cargo()
    except StackError as error:
        return str(error)
    return ""


pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "possible"),
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seated]:
    with seated(tmp_path_factory.mktemp("seats")) as made:
        yield made


def test_three_servers_share_two_gpus(node: Seated) -> None:
    machine = node.node
    machine.apply(*(service(name) for name in NAMES), *(server(name, node.folder) for name in NAMES))
    with ThreadPoolExecutor(3) as clients:
        # A first request to each also starts it: nobody else asks for the slot.
        first = [clients.submit(node.ask_until_answered, name) for name in NAMES]
        assert [each.result()["model"] for each in first] == list(NAMES)
    for name in ("a", "c", "b", "a"):
        assert node.ask(name) == {"model": name, "id": name, "choices": [{"index": 0, "text": "0"}]}
    statuses = [machine.status(name)["containerStatuses"][0] for name in NAMES]
    assert [each["restartCount"] for each in statuses] == [0, 0, 0]
    verdict = node.verdict()
    assert not verdict.wrong
    assert verdict.restores >= 2 * 3


def test_whoever_is_killed_no_answer_is_anothers_and_no_two_are_on_the_gpus(node: Seated) -> None:
    seen = soak(node, KILLS, kills=True)
    assert not seen.wrong
    assert seen.answered > 100 and all(seen.victims.values())
    for name in NAMES:
        assert node.ask_until_answered(name)["model"] == name
    assert not node.verdict().wrong
