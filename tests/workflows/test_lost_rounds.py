"""A round that was lost with the process that had it is missed soon: nobody is placed meanwhile."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from activities.messages import PlacementState
from activities.signatures import CARRY_OUT, DECIDE, CarriedOut, DecideResult
from tests.planning.builders import node, round_of, snapshot, workload
from workflows import placement
from workflows.placement import Placement


async def test_both_halves_of_a_round_are_missed_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: dict[str, timedelta] = {}

    async def execute(name: str, request: Any, *, heartbeat_timeout: timedelta, **_: Any) -> DecideResult | CarriedOut:
        allowed[name] = heartbeat_timeout
        return DecideResult(round_of(seen, request.ledger), {}) if name == DECIDE else CarriedOut()

    seen = snapshot([node("b")], [workload("w")])
    stands_in = SimpleNamespace(
        execute_activity=execute, random=lambda: random.Random(7), set_current_details=lambda _: None
    )
    monkeypatch.setattr(placement, "workflow", stands_in)
    await Placement(PlacementState())._round()
    assert allowed.keys() == {DECIDE, CARRY_OUT}
    assert max(allowed.values()) <= timedelta(seconds=15)
