"""That a Job could not be stopped is taken into the ledger, and another round follows soon, then less and less soon."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from activities.messages import PlacementState
from activities.signatures import DECIDE, CarriedOut, DecideResult
from planning.model import Decision, Preemption, Turn
from workflows import placement
from workflows.placement import CATCH_UP, Placement

STOP = Preemption("low", "ns", "low", "low-0", "j", 5, Turn(1, 0), "preempted: …", "high", 1)


async def test_the_ledger_remembers_it_and_looks_for_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def execute(name: str, *_: Any, **__: Any) -> DecideResult | CarriedOut:
        return DecideResult(Decision(preemptions=[STOP]), {}) if name == DECIDE else CarriedOut(spared={"low": 7.0})

    stands_in = SimpleNamespace(
        execute_activity=execute, random=lambda: random.Random(7), set_current_details=lambda _: None
    )
    monkeypatch.setattr(placement, "workflow", stands_in)
    ledger = Placement(PlacementState())
    waits: list[timedelta | None] = []
    for _ in range(6):
        await ledger._round()
        assert not ledger._poked
        waits.append(ledger._next_look())
    assert ledger.ledger().ledger.spared == {"low": 7.0}
    assert waits == [CATCH_UP * factor for factor in (2, 4, 8, 16, 16, 16)]
