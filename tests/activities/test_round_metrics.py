"""What Prometheus reads of a round, and that it goes with the tenant or the reason it was about."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.testing import ActivityEnvironment

from activities import round_metrics
from activities.forecasts import Forecasts
from activities.planner import Planner
from activities.signatures import DecideRequest
from planning.model import Ledger, Snapshot, WorkloadView
from tests.activities.test_planner import Cache
from tests.planning.builders import NOW, job, node, pod, quota, reservation, snapshot, workload
from tests.scraping import Read, scraping


@pytest.fixture
def read() -> Iterator[Read]:
    with scraping(round_metrics) as scraped:
        yield scraped


async def round_(seen: Snapshot, limit: int = 10) -> None:
    planner = Planner(cast(Any, Cache(seen)), cast(Any, SimpleNamespace()), Forecasts(cast(Any, None)))
    await ActivityEnvironment().run(planner.decide, DecideRequest(Ledger(), {}, {}, limit, 7))


async def test_tenants_and_reasons_are_read_as_the_last_round_found_them(read: Read) -> None:
    assert read() == {}, "nothing is said before the first round"
    running = job("r", "n", gpus=3, namespace="a", ready=True, counted=True)
    queue = [workload("r", 3, namespace="a"), workload("x", 1, namespace="a"), workload("y", 4, namespace="b")]
    quotas = [quota("c", gpus=1), quota("p", "a", gpus=2, cohort="c"), quota("q", "b", gpus=8), quota("free", "f")]
    pods = [pod("p", "n", of=running, namespace="a")]
    await round_(snapshot([node("n", 4)], queue, jobs=[running], pods=pods, quotas=quotas))
    found = read()
    assert found.pop("berth_last_round_timestamp_seconds") > 0
    tenants = {name: value for name, value in found.items() if "tenant=" in name}
    assert tenants == {
        'berth_tenant_gpus_used{tenant="p"}': 3, 'berth_tenant_gpus_nominal{tenant="p"}': 2,
        'berth_tenant_gpus_borrowed{tenant="p"}': 1, 'berth_tenant_waiting{tenant="p"}': 1,
        'berth_tenant_share{tenant="p"}': 0.75,
        'berth_tenant_gpus_used{tenant="q"}': 0, 'berth_tenant_gpus_nominal{tenant="q"}': 8,
        'berth_tenant_gpus_borrowed{tenant="q"}': 0, 'berth_tenant_waiting{tenant="q"}': 1,
        'berth_tenant_share{tenant="q"}': 0,
        'berth_tenant_gpus_used{tenant="free"}': 0, 'berth_tenant_gpus_borrowed{tenant="free"}': 0,
        'berth_tenant_waiting{tenant="free"}': 0, 'berth_tenant_share{tenant="free"}': 0,
    }  # fmt: skip
    gangs = {name: value for name, value in found.items() if name.startswith("berth_gangs")}
    assert {name: value for name, value in found.items() if name not in tenants | gangs} == {
        "berth_queue_depth": 2,
        "berth_promises_in_flight": 0,
        'berth_waiting_workloads{reason="WaitingForCapacity"}': 1,
        'berth_waiting_workloads{reason="WaitingForQuota"}': 1,
    }
    await round_(snapshot([node("n", 4)]))
    assert {name for name in read() if "{" in name} == gangs.keys(), "they went with the GPUQuotas and the workloads"


async def test_who_was_left_to_the_next_round_is_counted_as_such(read: Read) -> None:
    await round_(snapshot([node("n", 8)], [workload(f"w{i}") for i in range(5)]), limit=2)
    assert (read()["berth_queue_depth"], read()['berth_waiting_workloads{reason="NextRound"}']) == (3, 3)
    assert read()["berth_promises_in_flight"] == 2


async def test_reservations_are_read_until_they_end(read: Read) -> None:
    keeps = reservation("r", gpus=3, start=-10, end=100)
    running = job("h", "n", gpus=2, ready=True, counted=True)
    views, pods = [workload("h", 2, spec={"reservation": "r"})], [pod("p", "n", of=running)]
    await round_(snapshot([node("n", 4)], views, jobs=[running], pods=pods, reservations=[keeps]))
    assert {name: value for name, value in read().items() if "reservation=" in name} == {
        'berth_reservation_gpus_reserved{reservation="r"}': 3,
        'berth_reservation_gpus_used{reservation="r"}': 2,
        'berth_reservation_gpus_lent{reservation="r"}': 0,
        'berth_reservation_gpus_missing{reservation="r"}': 0,
    }
    await round_(snapshot([node("n", 4)], reservations=[keeps], now=NOW + 100))
    assert not [name for name in read() if "reservation=" in name]


async def test_a_reservation_lacks_gpus_only_when_it_needs_them(read: Read) -> None:
    later = [reservation(name, gpus=6, start=at, end=at + 900) for name, at in (("soon", 30), ("later", 5000))]
    await round_(snapshot([node("n", 4)], reservations=later))
    missing = {name: value for name, value in read().items() if "missing" in name}
    assert missing == {
        'berth_reservation_gpus_missing{reservation="soon"}': 2,
        'berth_reservation_gpus_missing{reservation="later"}': 0,
    }


async def test_gangs_are_told_by_how_far_they_are(read: Read) -> None:
    def gang(uid: str, **changes: Any) -> WorkloadView:
        return workload(uid, 1, spec={"replicas": 2}, **changes)

    jobs = [job("runs", "n", places=(("n", 2),), ready=True), job("starts", "n", places=(("n", 2),)),
            job("ended", "n", places=(("n", 2),), finished="Failed")]  # fmt: skip
    views = [gang("runs"), gang("starts"), gang("ended"), gang("new"), gang("refused", status={"phase": "Pending"}),
             gang("gone", deleting=True), workload("single", 8)]  # fmt: skip
    await round_(snapshot([node("n", 4)], views, jobs=jobs))
    told = {name: value for name, value in read().items() if name.startswith("berth_gangs")}
    assert told == {
        'berth_gangs{state="waiting"}': 2, 'berth_gangs{state="starting"}': 1, 'berth_gangs{state="running"}': 1,
    }  # fmt: skip
