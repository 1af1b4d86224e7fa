"""What is done for an order: made once, told once, taken back whole, and refusals are failures of it, not of berth."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment

from activities import provisioning
from activities.messages import OrderNews
from activities.patience import ATTEMPTS
from activities.provisioning import Orders
from activities.signatures import Arranged, ArrangeRequest, TakeBack, WorkloadRef
from crds.settings import Settings
from kube.client import KubeClient
from kube.errors import KubeError
from kube.resources import GPUWORKLOADS, PODTEMPLATES, PROVISIONINGREQUESTS
from planning.model import Booking, Decision, Gap, Order, Provisioning, Stage, WorkloadView
from planning.naming import request_name
from planning.views import workload_view
from tests.activities.test_placements import Cache, carry_out
from tests.controller.fake_temporal import FakeTemporal
from tests.kube.fake_api import NOW, FakeApi
from tests.planning.builders import node

MOMENT = datetime.fromisoformat(NOW).timestamp()
ON = Settings.parse({"provisioning": {"className": "c", "retries": 1}})[0]


class World:
    """A pretended API server, a cache of what a test puts there, and what Temporal and people were told."""

    def __init__(self, api: FakeApi, kube: KubeClient) -> None:
        self.api, self.kube, self.temporal = api, kube, FakeTemporal()
        self.events: list[tuple[str, str]] = []
        self.cache = cast(Any, Cache())
        self.cache.settings = ON
        self.cache.jobs_of = self.cache.pods_of = lambda *_: ()
        self.cache.snapshot = lambda: SimpleNamespace(nodes=(), pods=(), jobs=(), workloads=(), now=0.0)
        events = SimpleNamespace(record=lambda **said: self.events.append((said["reason"], said["note"])))
        self.orders = Orders(self.cache, kube, cast(Any, self.temporal), cast(Any, events))

    async def apply(self, **spec: Any) -> WorkloadView:
        body = {
            "apiVersion": "gpu.warp.dev/v1alpha1", "kind": "GPUWorkload", "metadata": {"name": "w"},
            "spec": {"modelName": "m", "gpuCount": 4, **spec},
        }  # fmt: skip
        raw = await self.kube.create(GPUWORKLOADS, body, "ns")
        condition = {"type": "Scheduled", "status": "False", "reason": "Provisioning", "message": "x"}
        status = {"phase": "Scheduling", "observedGeneration": 1, "conditions": [condition]}
        raw = await self.kube.merge_patch(GPUWORKLOADS, "w", "ns", {"status": status}, subresource="status")
        view = workload_view(raw)
        self.cache.workloads.items = {view.uid: view}
        self.view = view
        return view

    @property
    def ref(self) -> WorkloadRef:
        return WorkloadRef(self.view.uid, "ns", "w")

    async def arrange(self, attempt: int = 0, *, known: bool = False, told: Stage = "") -> Arranged:
        request = ArrangeRequest(self.ref, 1, attempt, known, told, {}, 0.0)
        arranged: Arranged = await ActivityEnvironment().run(self.orders.arrange, request)
        return arranged

    async def take_back(self, attempt: int, state: Any) -> None:
        await ActivityEnvironment().run(self.orders.take_back, TakeBack(self.ref, 1, attempt, state, 7.0))

    async def there(self) -> tuple[list[str], list[str]]:
        """The names of requests and templates."""
        requests, _ = await self.kube.list(PROVISIONINGREQUESTS, "ns")
        templates, _ = await self.kube.list(PODTEMPLATES, "ns")
        return [r["metadata"]["name"] for r in requests], [t["metadata"]["name"] for t in templates]

    async def says(self, name: str, kind: str) -> None:
        condition = {"type": kind, "status": "True", "lastTransitionTime": NOW, "message": "so"}
        body = {"status": {"conditions": [condition]}}
        await self.kube.merge_patch(PROVISIONINGREQUESTS, name, "ns", body, subresource="status")

    async def message(self) -> str:
        return str((await self.kube.get(GPUWORKLOADS, "w", "ns"))["status"].get("message"))

    def name(self, attempt: int = 0) -> str:
        return request_name("w", self.view.uid, 1, attempt)

    @property
    def news(self) -> list[Any]:
        return [told for id, told in self.temporal.started if id == "placement/default"]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its clock stands a little after the pretended API server's."""
    monkeypatch.setattr(provisioning, "time", SimpleNamespace(time=lambda: MOMENT + 5))
    async with FakeApi() as api, await api.client() as kube:
        yield World(api, kube)


async def test_a_request_is_made_once_and_told_of(world: World) -> None:
    await world.apply()
    made = await world.arrange()
    assert (made.next, made.stage, made.attempt) == ("wait", "ordered", 0)
    assert await world.there() == ([world.name()], [world.name()])
    assert (await world.message()).startswith(f"ordered 1 node for 4 GPUs (ProvisioningRequest {world.name()})")
    again = await world.arrange()  # the result of the first look was lost
    assert again.stage == "ordered" and await world.there() == ([world.name()], [world.name()])
    await world.arrange(known=True, told="ordered")
    assert [reason for reason, _ in world.events] == ["NodeOrdered", "NodeOrdered"]
    assert world.news == []


@pytest.mark.parametrize("known", [True, False])
async def test_a_cache_that_is_behind_the_order_ends_nothing(world: World, known: bool) -> None:
    view = await world.apply()
    world.cache.workloads.items = {view.uid: replace(view, generation=0)} if known else {}
    assert (await world.arrange()).stage == "ordered"
    world.cache.workloads.items = {}
    await world.kube.delete(GPUWORKLOADS, "w", "ns")
    assert (await world.arrange()).next == "over"


async def test_a_template_that_an_earlier_try_left_is_used(world: World) -> None:
    await world.apply()
    world.api.fail(method="POST", contains="provisioningrequests", do="reset")
    with pytest.raises(KubeError):
        await world.arrange()
    assert await world.there() == ([], [world.name()])
    assert (await world.arrange()).stage == "ordered"


async def test_a_request_that_was_made_though_the_answer_was_lost_is_not_made_again(world: World) -> None:
    await world.apply()
    world.api.fail(method="POST", contains="provisioningrequests", do="lost")
    with pytest.raises(KubeError):
        await world.arrange()
    assert (await world.arrange()).stage == "ordered"
    assert (await world.there())[0] == [world.name()]


async def test_the_ledger_hears_of_what_was_provisioned_with_its_booking(world: World) -> None:
    await world.apply()
    await world.arrange()
    await world.says(world.name(), "Provisioned")
    told = await world.arrange(known=True, told="ordered")
    assert (told.next, told.stage) == ("wait", "provisioned")
    ((news,),) = [world.news]
    assert isinstance(news, OrderNews) and news.now is not None
    assert (news.uid, news.generation, news.now.state) == (world.view.uid, 1, "provisioned")
    assert news.now.booking == Booking(world.name(), "c")
    await world.arrange(known=True, told="provisioned")
    assert len(world.news) == 1


@pytest.mark.parametrize(("attempt", "kind", "event"), [(0, "retry", "OrderFailed"), (1, "fail", "OrderGivenUp")])
async def test_a_failure_is_told_and_nothing_is_deleted_before_it_is_recorded(
    world: World, attempt: int, kind: Any, event: str
) -> None:
    await world.apply()
    await world.arrange(attempt)
    await world.says(world.name(attempt), "Failed")
    failed = await world.arrange(attempt, known=True, told="ordered")
    assert failed.next == kind and failed.message.startswith(f"ProvisioningRequest {world.name(attempt)}: so; ")
    assert world.events[-1] == (event, failed.message) and await world.message() == failed.message
    assert (await world.there())[0] == [world.name(attempt)]


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (404, "NotFound"), (422, "Invalid")])
async def test_what_the_api_server_refuses_is_an_order_that_failed(world: World, status: int, reason: str) -> None:
    await world.apply()
    world.api.fail(method="POST", contains="provisioningrequests", status=status, reason=reason)
    refused = await world.arrange()
    assert refused.next == "retry" and "ProvisioningRequest: " in refused.message


async def test_a_cluster_without_the_kind_is_told_so(world: World) -> None:
    await world.apply()
    world.api.fail(contains="provisioningrequests", status=404, reason="NotFound", count=9)
    refused = await world.arrange()
    assert refused.next == "retry" and "the cluster has no such kind" in refused.message
    world.cache.settings = Settings()
    assert (await world.arrange(known=True)).next == "over"
    await world.take_back(0, "over")
    assert [(news.uid, news.now) for news in world.news] == [(world.view.uid, None)]


async def test_an_api_server_that_is_away_is_no_failure_of_the_order(world: World) -> None:
    await world.apply()
    for method in ("GET", "POST"):
        world.api.fail(method=method, contains="provisioningrequests", status=503, reason="ServiceUnavailable")
        with pytest.raises(KubeError):
            await world.arrange()
    assert (await world.arrange()).stage == "ordered"


async def test_a_request_that_cannot_be_read_for_a_moment_is_not_taken_for_deleted(world: World) -> None:
    await world.apply()
    await world.arrange()
    world.api.fail(method="GET", contains="provisioningrequests", status=403, reason="Forbidden")
    with pytest.raises(KubeError):
        await world.arrange(known=True, told="ordered")
    assert (await world.arrange(known=True, told="ordered")).next == "wait"


async def test_all_that_was_made_is_taken_back_before_the_ledger_hears_of_it(world: World) -> None:
    await world.apply()
    await world.arrange(0)
    await world.arrange(1)
    left: list[int] = []
    made = (PROVISIONINGREQUESTS, PODTEMPLATES)
    world.temporal.before = lambda _: left.append(sum(len(world.api.objects(kind)) for kind in made))
    await world.take_back(1, "failed")
    assert left == [0]
    (news,) = world.news
    assert news == OrderNews(world.view.uid, 1, Provisioning(1, "failed", 7.0))
    await world.take_back(1, "over")  # once more, after a crash
    assert world.news[-1] == OrderNews(world.view.uid, 1, None)


async def test_between_two_tries_only_a_booking_is_news(world: World) -> None:
    await world.apply()
    await world.arrange()
    await world.take_back(0, "")
    assert await world.there() == ([], []) and world.news == []
    await world.take_back(0, "ordered")
    assert world.news == [OrderNews(world.view.uid, 1, Provisioning(1, "ordered", 7.0))]


async def test_a_status_that_tells_something_else_by_now_stays(world: World) -> None:
    view = await world.apply()
    placed = {**view.status, "phase": "Scheduled"}
    world.cache.workloads.items = {view.uid: replace(view, status=placed)}
    before = await world.message()
    await world.arrange()
    assert await world.message() == before


async def test_what_is_added_to_a_status_that_tells_it_already_stays(world: World) -> None:
    view = await world.apply()
    told = await world.arrange()
    more = {"message": f"{told.message}; expected to start soon"}
    raw = await world.kube.merge_patch(GPUWORKLOADS, "w", "ns", {"status": more}, subresource="status")
    world.cache.workloads.items = {view.uid: workload_view(raw)}
    await world.arrange(known=True, told="ordered")
    assert await world.message() == more["message"]


async def test_before_another_try_it_is_looked_whether_a_node_is_coming(world: World) -> None:
    await world.apply()
    now = MOMENT
    coming = node("new", 0, gaps=(Gap(4, "none registered"),), created=now)
    world.cache.snapshot = lambda: SimpleNamespace(nodes=(coming,), pods=(), jobs=(), workloads=(), now=now)
    assert (await world.arrange(1)).stage == "" and await world.there() == ([], [])
    assert (await world.arrange(0)).stage == "ordered", "the round has just counted it for somebody else"


# --- how an order gets to its workflow -----------------------------------------------------------------------------

ORDER = Order("u", "ns", "w", 1)


async def test_an_order_begins_its_workflow() -> None:
    temporal = FakeTemporal()
    done = await carry_out(Decision(orders=[ORDER]), temporal=temporal)
    assert temporal.started == [("provisioning/u", ORDER)] and not done.stale


@pytest.mark.parametrize("attempt", [1, ATTEMPTS])
async def test_an_order_that_temporal_refuses_is_tried_again_and_then_decided_anew(attempt: int) -> None:
    temporal = FakeTemporal()
    temporal.away = RPCError("no", RPCStatusCode.INVALID_ARGUMENT, b"")
    if attempt < ATTEMPTS:
        with pytest.raises(RPCError):
            await carry_out(Decision(orders=[ORDER]), attempt, temporal=temporal)
    else:
        assert (await carry_out(Decision(orders=[ORDER]), attempt, temporal=temporal)).stale == ["u"]
