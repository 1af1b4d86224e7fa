"""A stopped Job that is kept goes on beside a free node at once: no news of it would wake the ledger."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from activities.messages import PlacementState
from activities.signatures import DECIDE, CarriedOut, DecideRequest, DecideResult
from planning.model import Turn
from planning.naming import spec_hash
from tests.planning.builders import job, node, round_of, snapshot, workload
from workflows import placement
from workflows.placement import Placement


async def test_the_round_after_the_end_of_its_turn_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    low = workload("low")
    assert low.spec is not None
    stopped = job("low", "a", preempted=True, halted=True, spec_hash=spec_hash(low.spec))
    seen = snapshot([node("b")], [low], jobs=[stopped])

    async def execute(name: str, request: DecideRequest, **_: Any) -> DecideResult | CarriedOut:
        return DecideResult(round_of(seen, request.ledger), {}) if name == DECIDE else CarriedOut()

    stands_in = SimpleNamespace(
        execute_activity=execute, random=lambda: random.Random(7), set_current_details=lambda _: None
    )
    monkeypatch.setattr(placement, "workflow", stands_in)
    ledger = Placement(PlacementState())
    await ledger._round()
    assert ledger._poked and ledger.ledger().ledger.turns == {"low": Turn(1)}
    await ledger._round()
    (place,) = ledger.ledger().ledger.in_flight.values()
    assert not ledger._poked and place.node == "b" and place.resumes is not None
