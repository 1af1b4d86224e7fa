"""What was seen of a cluster before it was restored from a backup is forgotten, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from activities.messages import PlacementState, Poke, WorkloadState
from activities.signatures import CarriedOut, DecideRequest, DecideResult, Followed, FollowRequest, WorkloadRef
from planning.model import Decision, Turn
from workflows import gpuworkload, placement
from workflows.gpuworkload import GPUWorkload
from workflows.placement import Placement


def world(answer: Callable[[str, Any], Any]) -> Any:
    """What a workflow sees of Temporal; `answer` stands in for the activities."""

    async def execute(name: str, request: Any, **_: object) -> Any:
        return answer(name, request)

    return SimpleNamespace(
        execute_activity=execute,
        execute_local_activity=execute,
        random=lambda: random.Random(7),
        info=lambda: SimpleNamespace(typed_search_attributes={}),
        set_current_details=lambda _: None,
    )


@pytest.mark.parametrize("restored", [True, False])
async def test_a_workload_forgets_what_was_seen(monkeypatch: pytest.MonkeyPatch, restored: bool) -> None:
    asked: list[dict[str, int]] = []

    def answer(_: str, request: FollowRequest) -> Followed:
        asked.append(request.fresh)
        return Followed("wait", "Running", "m", Turn(), 2.0, restored=restored)

    monkeypatch.setattr(gpuworkload, "workflow", world(answer))
    workload = GPUWorkload(WorkloadState(WorkloadRef("u", "ns", "w")))
    workload.poke(Poke({"jobs": 900}))
    await workload._look()
    workload.poke(Poke({"jobs": 9}))
    await workload._look()
    assert asked == [{"jobs": 900}, {"jobs": 9 if restored else 900}]


@pytest.mark.parametrize("restored", [True, False])
async def test_the_ledger_forgets_what_was_seen(monkeypatch: pytest.MonkeyPatch, restored: bool) -> None:
    asked: list[tuple[dict[str, int], dict[str, int]]] = []

    def answer(_: str, request: DecideRequest) -> DecideResult | CarriedOut:
        asked.append((request.fresh, request.at_least))
        return DecideResult(Decision(), {"jobs": 8}, behind=True, restored=restored)

    monkeypatch.setattr(placement, "workflow", world(answer))
    ledger = Placement(PlacementState(versions={"jobs": 800}))
    ledger.poke(Poke({"jobs": 900}))
    await ledger._round()
    ledger.poke(Poke({"jobs": 9}))
    await ledger._round()
    first = ({"jobs": 900}, {"jobs": 800})
    assert asked == [first, ({"jobs": 9}, {"jobs": 8}) if restored else first]
