"""The Event of a placement tells what became of the workload's kernel caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from temporalio.testing import ActivityEnvironment

from activities.placements import Placements
from activities.signatures import CarryOut
from planning.model import Assignment, Decision, Resources, Turn, Warmth
from planning.views import workload_view
from tests.activities.test_placements import Cache, stored


class Makes:
    """Has the workload, and takes its Job."""

    async def get(self, *_: Any) -> dict[str, Any]:
        return stored()

    async def create(self, _: Any, body: dict[str, Any], *__: Any) -> dict[str, Any]:
        return {**body, "metadata": {**body["metadata"], "uid": "j", "resourceVersion": "9"}}


async def test_the_event_of_a_placement_tells_what_became_of_its_kernel_caches() -> None:
    notes: list[str] = []
    events = SimpleNamespace(record=lambda **event: notes.append(event["note"]))
    for warmth in (None, Warmth(1, 1, 1)):
        promise = Assignment(
            "u", "ns", "w", 1, 7, Turn(), "n", Resources(gpus=1), "leastLoaded", "w-u-0", warmth=warmth
        )  # fmt: skip
        cache = Cache(workload_view(stored()))
        placements = Placements(cast(Any, cache), cast(Any, Makes()), cast(Any, None), cast(Any, events))
        done = await ActivityEnvironment().run(placements.carry_out, CarryOut(Decision(assignments=[promise])))
        assert done.made == {"u": 9}
    plain = "Job w-u-0 was created on node n (leastLoaded)"
    assert notes == [plain, f"{plain}; its kernel cache is ready there"]
