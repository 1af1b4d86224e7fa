"""What the container runtime is told of containers with seats: whose turn it is, and never on a pod's own word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeworkers.devices.holdings import Holder
from nodeworkers.ledger import Ledger
from nodeworkers.nri.values import Adjustment, Container, Pod, Refused
from nodeworkers.seats.creation import Creation
from nodeworkers.seats.gate import Gate
from nodeworkers.seats.slots import Slot, Slots
from planning.seats.preflight import asked_by_runtime

A, B = "kyb-G01-s1", "kyb-G01-s2"
CONTAINER = Container("c", "sandbox", "server")


def pod(name: str) -> Pod:
    return Pod("sandbox", f"{name}-uid", "team", name)


class Holdings:
    def __init__(self, **held: str) -> None:
        self.held = {A: Holder("r", "team", "a", ("server",), "claim-a")}
        self.next: dict[str, Holder] = {}
        self.looks = 0

    async def look(self) -> None:
        self.looks += 1
        self.held |= self.next


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    ledger = Ledger(tmp_path / "berth")
    yield Slots(ledger)
    ledger.close()


@pytest.fixture
def holdings() -> Holdings:
    return Holdings()


@pytest.fixture
def poked() -> list[str]:
    return []


@pytest.fixture
def creation(slots: Slots, holdings: Holdings, poked: list[str]) -> Creation:
    gate = Gate(slots, poked.append)
    return Creation(gate, holdings, lambda seat: "G01" if seat in (A, B) else "", lambda: poked.append("news"))


async def test_whoever_has_the_slot_is_created_and_others_wait(
    slots: Slots, creation: Creation, poked: list[str]
) -> None:
    with pytest.raises(Refused, match=f"{A} waits for the slot of G01: nobody has it yet"):
        await creation.decide(A, pod("a"), CONTAINER)
    assert poked == ["G01"]
    slots.put(Slot("G01", "Starting", B), slots.enter("G01", "run"), 1.0)
    with pytest.raises(Refused, match=f"{B} has it"):
        await creation.decide(A, pod("a"), CONTAINER)
    slots.put(Slot("G01", "Starting", A), slots.enter("G01", "run"), 2.0)
    assert await creation.decide(A, pod("a"), CONTAINER) == Adjustment()


async def test_a_pod_that_names_anothers_seat_is_a_pod_without_one(creation: Creation, poked: list[str]) -> None:
    assert await creation.decide(A, pod("b"), CONTAINER) == Adjustment()
    assert await creation.decide("kyb-G99-s1", pod("b"), CONTAINER) == Adjustment()
    assert await creation.decide(B, pod("b"), CONTAINER) == Adjustment(), "nobody holds it"
    assert poked == [], "and nobody is parked for it"


async def test_whose_a_seat_is_the_kubelet_is_asked(creation: Creation, holdings: Holdings, poked: list[str]) -> None:
    holdings.held[B] = Holder("r", claim="claim-b")
    with pytest.raises(Refused, match="has not said yet by whom"):
        await creation.decide(B, pod("b"), CONTAINER)
    assert holdings.looks == 1 and poked == []
    holdings.next = {B: Holder("r", "team", "b", ("server",), "claim-b")}
    with pytest.raises(Refused, match="waits for the slot"):
        await creation.decide(B, pod("b"), CONTAINER)
    assert holdings.looks == 2


def test_preflight_says_whether_it_matters_that_nobody_asks() -> None:
    assert asked_by_runtime("", claimed=True).ok
    without = asked_by_runtime("No container runtime listens on /var/run/nri/nri.sock", claimed=True)
    assert not without.ok and "starts anew without the slot" in without.told
    assert asked_by_runtime("It is away", claimed=False).ok
