"""A planner that has not seen what was seen before waits for it, unless the API server itself went back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities.cache import StaleCacheError
from activities.planner import Planner
from activities.signatures import DecideRequest, DecideResult, Versions
from planning.model import Ledger, Snapshot
from tests.planning.builders import SETTINGS, node, promise, snapshot, workload


class Cache:
    """A picture of the Jobs at one version."""

    def __init__(self, seen: Snapshot) -> None:
        self.settings, self.jobs = SETTINGS, SimpleNamespace(items={})
        self._seen = seen

    async def reach(self, versions: Versions, _: float) -> Versions:
        return {kind: version for kind, version in versions.items() if version > self._seen.jobs_version}

    def snapshot(self) -> Snapshot:
        return self._seen


async def decide(server: int, *, ledger: Ledger | None = None, **asked: Versions) -> DecideResult:
    """A round whose cache has seen version 5, of a server that is at `server`."""

    async def list_(*_: object, **__: object) -> tuple[list[dict[str, Any]], int]:
        return [], server

    cache = Cache(replace(snapshot([node("n", 8)], [workload("a")]), jobs_version=5))
    planner = Planner(cast(Any, cache), cast(Any, SimpleNamespace(list=list_)))
    request = DecideRequest(ledger or Ledger(), asked.get("fresh", {}), asked.get("at_least", {}), 10, 7)
    result: DecideResult = await ActivityEnvironment().run(planner.decide, request)
    return result


async def test_a_binding_version_is_waited_for_unless_the_server_went_back() -> None:
    with pytest.raises(StaleCacheError):
        await decide(9, at_least={"jobs": 9})
    result = await decide(8, at_least={"jobs": 9})
    assert (result.restored, result.behind) == (True, False)


@pytest.mark.parametrize(("server", "restored"), [(8, True), (9, False)])
async def test_news_of_a_former_life_tell_that_the_server_went_back(server: int, restored: bool) -> None:
    result = await decide(server, fresh={"jobs": 9})
    assert (result.restored, result.behind) == (restored, True)


async def test_a_promise_whose_job_the_backup_does_not_have_is_given_anew() -> None:
    ledger = Ledger(in_flight={"a": promise("a", "n")}, made={"a": 9})
    waits = await decide(9, ledger=ledger, fresh={"jobs": 9})
    assert (waits.decision.seen, waits.decision.assignments) == ([], [])
    result = await decide(8, ledger=ledger, fresh={"jobs": 9})
    assert (result.decision.seen, [a.uid for a in result.decision.assignments]) == (["a"], ["a"])
    assert max(result.versions.values()) <= 5, "nothing that no cache will ever have binds later rounds"
