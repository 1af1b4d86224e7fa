"""A Job that may not be stopped goes on: that is told once, remembered, and holds up nobody."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities.patience import ATTEMPTS
from activities.placements import Placements
from activities.signatures import CarriedOut, CarryOut
from kube.errors import AccessDenied, Conflict, Forbidden, Invalid, KubeError, Unavailable
from kube.resources import JOBS
from planning.model import Decision, Defaults, Preemption, Turn, Waiting
from planning.preemption import SPARED
from tests.activities.test_placements import Cache
from tests.planning.builders import workload

STOP = Preemption("low", "ns", "low", "low-0", "j", 5, Turn(1, 0), "preempted: …", "high", 1)
TOLD = Waiting("high", "ns", "high", 1, "Preempting", "ns/low must stop")


class Known(Cache):
    defaults = Defaults("leastLoaded")


class Cluster:
    """Takes every write but those to Jobs, to which `refusal` is the answer; notes the Events, and who was written."""

    def __init__(self, refusal: KubeError | None) -> None:
        self.refusal = refusal
        self.events: list[dict[str, Any]] = []
        self.written: list[str] = []

    async def merge_patch(self, kind: Any, name: str, _: str, body: dict[str, Any], **__: Any) -> dict[str, Any]:
        if kind == JOBS and self.refusal is not None:
            raise self.refusal
        self.written.append(name)
        meta = {"uid": name, "name": name, "namespace": "ns", "resourceVersion": "9", "generation": 1}
        return {"metadata": meta, "spec": {"modelName": "m", "gpuCount": 1}, "status": body.get("status", {})}

    def record(self, **event: Any) -> None:
        self.events.append(event)


async def stop(cluster: Cluster, attempt: int = 1) -> CarriedOut:
    cache = Known(workload("low", status={"phase": "Running"}), workload("high"))
    placements = Placements(cast(Any, cache), cast(Any, cluster), cast(Any, None), cast(Any, cluster))
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=attempt)
    decision = Decision(preemptions=[STOP], waiting=[TOLD])
    done: CarriedOut = await environment.run(placements.carry_out, CarryOut(decision))
    return done


def reasons(cluster: Cluster) -> list[tuple[str, str]]:
    return [(event["regarding"].name, event["reason"]) for event in cluster.events]


async def test_who_is_stopped_and_for_whom_is_told_to_both() -> None:
    cluster = Cluster(None)
    assert (await stop(cluster)).spared == {}
    assert cluster.written == ["low-0", "low", "high"]
    assert reasons(cluster) == [("low", "Preempted"), ("high", "Preempting")]


REFUSALS = [
    (Forbidden("admission webhook denied the request: keep", status=403), 1),
    (Invalid("ValidatingAdmissionPolicy 'keep' denied request", status=422), 1),
    (AccessDenied('User "w" cannot patch resource "jobs"', status=403), ATTEMPTS),
    (Unavailable("a webhook does not answer", status=500, reason="InternalError"), ATTEMPTS),
]


@pytest.mark.parametrize(("refusal", "attempt"), REFUSALS)
async def test_who_cannot_be_stopped_is_spared_for_a_while_and_told_why(refusal: KubeError, attempt: int) -> None:
    cluster = Cluster(refusal)
    until = (await stop(cluster, attempt)).spared["low"]
    assert time.time() + SPARED - 30 < until <= time.time() + SPARED
    assert reasons(cluster) == [("low", "NotStopped")], "nobody is told that room is being made"
    note = cluster.events[0]["note"]
    assert note.startswith("Job low-0 could not be stopped, so its place goes to nobody else: ")
    assert refusal.message in note and cluster.written == []


@pytest.mark.parametrize("refusal", [each for each, attempt in REFUSALS if attempt > 1])
async def test_what_may_pass_is_tried_again_first(refusal: KubeError) -> None:
    cluster = Cluster(refusal)
    with pytest.raises(type(refusal)):
        await stop(cluster, ATTEMPTS - 1)
    assert cluster.events == []


async def test_while_the_api_server_is_away_nobody_counts_as_unstoppable() -> None:
    with pytest.raises(Unavailable):
        await stop(Cluster(Unavailable("refused", reason="ConnectionFailed")), 100)


async def test_a_job_that_changed_is_decided_upon_again_and_not_spared() -> None:
    cluster = Cluster(Conflict("it changed", status=409))
    assert (await stop(cluster)).spared == {} and reasons(cluster) == [("high", "Preempting")]
