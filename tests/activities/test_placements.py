"""A promise ends as made, stale or refused, and never by giving up while the API server is away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities.placements import ATTEMPTS, Placements
from activities.signatures import CarryOut
from kube.errors import Unavailable
from planning.model import Assignment, Decision, Resources, Turn, Waiting


class Away:
    """An API server that answers nothing."""

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object, **__: object) -> None:
            raise Unavailable("connection refused", reason="ConnectionFailed", request=name)

        return call


class EmptyCache:
    class workloads:  # stands in for an attribute
        items: dict[str, Any] = {}  # noqa: RUF012

    async def wait_synced(self) -> None:
        return None


def carry_out(decision: Decision, attempt: int) -> Any:
    placements = Placements(cast(Any, EmptyCache()), cast(Any, Away()), cast(Any, None), cast(Any, None))
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=attempt)
    return environment.run(placements.carry_out, CarryOut(decision))


@pytest.mark.parametrize("attempt", [1, ATTEMPTS, 100])
async def test_an_assignment_is_never_given_up_on_while_the_api_server_is_away(attempt: int) -> None:
    promise = Assignment("u", "ns", "w", 1, 1, Turn(), "n", Resources(gpus=1), "leastLoaded", "w-u-0")
    with pytest.raises(Unavailable):
        await carry_out(Decision(assignments=[promise]), attempt)


async def test_a_status_that_cannot_be_written_holds_up_nobody() -> None:
    waiting = Waiting("u", "ns", "w", 1, "WaitingForCapacity", "m")
    done = await carry_out(Decision(waiting=[waiting]), ATTEMPTS)
    assert done.stale == []
