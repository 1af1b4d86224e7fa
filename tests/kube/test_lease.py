"""Leader election: one leads, the next takes over, and a leader that stalls or is cut off knows that it is none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kube.client import KubeClient
from kube.lease import LeaderElector, LeadershipLost
from kube.resources import LEASES
from tests.kube.fake_api import FakeApi

TIMES: dict[str, Any] = {"lease_seconds": 1.0, "renew_deadline": 0.6, "retry": 0.05}


@pytest_asyncio.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


class Candidate:
    """An elector with a connection of its own, and what became of it."""

    def __init__(self, api: FakeApi, client: KubeClient, name: str, **knows: Any) -> None:
        self.api = api
        self.client = client
        self.elector = LeaderElector(client, "berth", "controller", name, **TIMES, **knows)
        self.leading = asyncio.Event()
        self.ended_at = 0.0
        self.finish = asyncio.Event()
        self.cleanup = 0.0
        self.task = asyncio.create_task(self.elector.run(self.lead))

    async def lead(self) -> None:
        assert self.elector.is_leader
        self.leading.set()
        try:
            await self.finish.wait()
        finally:
            await asyncio.sleep(self.cleanup)
            self.ended_at = time.monotonic()

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.api.objects(LEASES)["berth", "controller"]["spec"]
        return spec

    async def leads(self) -> float:
        await asyncio.wait_for(self.leading.wait(), 5)
        return time.monotonic()

    async def cancel(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, LeadershipLost):
            await self.task


@contextlib.asynccontextmanager
async def candidate(api: FakeApi, name: str, **knows: Any) -> AsyncIterator[Candidate]:
    async with await api.client(user_agent=name) as client:
        made = Candidate(api, client, name, **knows)
        try:
            yield made
        finally:
            await made.cancel()


async def test_one_leads_and_hands_over_at_once(api: FakeApi) -> None:
    async with candidate(api, "one") as one, candidate(api, "two") as two:
        await one.leads()
        await asyncio.sleep(0.3)
        assert not two.leading.is_set() and not two.elector.is_leader and two.elector.holder == "one"
        assert one.spec["leaseTransitions"] == 0
        released = time.monotonic()
        await one.cancel()
        assert not one.elector.is_leader
        assert await two.leads() - released < 0.5  # not the lease's duration
        assert one.ended_at < time.monotonic()
        assert two.spec["holderIdentity"] == "two" and two.spec["leaseTransitions"] == 1


async def test_work_that_ends_releases_the_lease(api: FakeApi) -> None:
    async with candidate(api, "one") as one:
        await one.leads()
        await asyncio.sleep(0.3)
        assert [method for method, _, _ in api.requests].count("GET") == 1  # to renew is to write, no more
        one.finish.set()
        await one.task
        assert "holderIdentity" not in one.spec


async def test_the_works_failure_is_passed_on(api: FakeApi) -> None:
    async def fails() -> None:
        raise RuntimeError("broken")

    async with await api.client() as client:
        elector = LeaderElector(client, "berth", "controller", "one", **TIMES)
        with pytest.raises(RuntimeError, match="broken"):
            await elector.run(fails)
    assert "holderIdentity" not in api.objects(LEASES)["berth", "controller"]["spec"]


async def test_renewing_is_one_request_and_goes_on_during_cleanup(api: FakeApi) -> None:
    async with candidate(api, "one") as one, candidate(api, "two") as two:
        await one.leads()
        one.cleanup = 1.5  # longer than the lease
        one.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await one.task
        assert await two.leads() >= one.ended_at
    patches = [
        body for method, _, body in api.requests if method == "PATCH" and body["spec"]["holderIdentity"] == "one"
    ]
    assert len(patches) >= 10


async def test_a_stalled_leader_stops_before_it_does_anything_else(api: FakeApi) -> None:
    """`one` gets no turn for longer than the lease (a stopped process); its requests cannot bring the lease back."""
    async with candidate(api, "one") as one, candidate(api, "two") as two:
        await one.leads()
        real, stalled = one.elector._try, asyncio.Event()

        async def stall() -> bool:
            await stalled.wait()  # before the request, which then goes out late
            return await real()

        one.elector._try = stall  # type: ignore[method-assign]
        began = time.monotonic()
        took_over = await two.leads()
        assert one.ended_at and one.ended_at < took_over  # stopped before the other began
        assert took_over - began > 0.8
        stalled.set()
        with pytest.raises(LeadershipLost, match="was not renewed"):
            await one.task
        assert two.elector.is_leader and two.spec["holderIdentity"] == "two"


async def test_a_stalled_event_loop_shows_in_is_leader_at_once(api: FakeApi) -> None:
    async with candidate(api, "one") as one:
        await one.leads()
        assert one.elector.is_leader
        time.sleep(0.7)  # noqa: ASYNC251  (the stall itself)
        assert not one.elector.is_leader
        with pytest.raises(LeadershipLost):
            await one.task
        assert one.ended_at


async def test_a_leader_cut_off_gives_up_in_time(api: FakeApi) -> None:
    async with candidate(api, "one") as one:
        await one.leads()
        api.fail(status=503, count=10_000)
        began = time.monotonic()
        with pytest.raises(LeadershipLost, match="injected 503"):
            await one.task
        assert 0.4 < time.monotonic() - began < 1.0


async def test_who_lost_the_lease_to_nobody_waits_for_no_lease_of_its_own(api: FakeApi) -> None:
    async with candidate(api, "one") as one:
        await one.leads()
        fault = api.fail(status=503, count=10_000)
        with pytest.raises(LeadershipLost):
            await one.task
        fault.count = 0
        api.put(LEASES, "controller", "berth", spec={**one.spec, "leaseDurationSeconds": 600})
        async with candidate(api, "another") as another, candidate(api, "one") as again:
            await again.leads()
            assert not another.leading.is_set()


async def test_a_hanging_server_is_no_renewal(api: FakeApi) -> None:
    async with candidate(api, "one") as one:
        await one.leads()
        api.fail("hang", count=10_000)
        with pytest.raises(LeadershipLost, match="no answer"):
            await asyncio.wait_for(one.task, 1.5)


async def test_a_standby_that_cannot_see_who_leads_says_why(api: FakeApi) -> None:
    async with candidate(api, "one") as one, candidate(api, "two") as two:
        await one.leads()
        assert two.elector.trouble == ""
        fault = api.fail(status=503, count=10_000)
        async with asyncio.timeout(5):
            while "injected 503" not in two.elector.trouble:
                await asyncio.sleep(0.01)
            fault.count = 0
            while two.elector.trouble:
                await asyncio.sleep(0.01)


async def test_short_trouble_is_survived(api: FakeApi) -> None:
    async with candidate(api, "one") as one:
        await one.leads()
        api.fail(status=500, count=2)
        api.fail("reset", skip=2)
        api.put(LEASES, "controller", "berth", spec=one.spec, metadata={"annotations": {"by": "kubectl"}})
        await asyncio.sleep(0.8)
        assert one.elector.is_leader and not one.task.done()


async def test_a_usurper_ends_the_term_and_keeps_the_lease(api: FakeApi) -> None:
    async with candidate(api, "one") as one:
        await one.leads()
        api.put(LEASES, "controller", "berth", spec={**one.spec, "holderIdentity": "other"})
        with pytest.raises(LeadershipLost, match="other's"):
            await asyncio.wait_for(one.task, 0.5)
        assert one.spec["holderIdentity"] == "other"
        assert not one.elector.is_leader


@pytest.mark.parametrize("renew_time", ["1999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"])
async def test_other_machines_clocks_do_not_count(api: FakeApi, renew_time: str) -> None:
    """A holder whose clock is far off is waited for as long as any other: until its lease has not changed."""
    spec = {"holderIdentity": "skewed", "leaseDurationSeconds": 1, "renewTime": renew_time, "leaseTransitions": 4}
    api.put(LEASES, "controller", "berth", spec=spec)
    began = time.monotonic()
    async with candidate(api, "one") as one:
        await asyncio.sleep(0.5)
        api.put(LEASES, "controller", "berth", spec={**spec, "renewTime": "2000-01-01T00:00:00.000000Z"})
        assert 1.4 < await one.leads() - began < 2.5
        assert one.spec["leaseTransitions"] == 5


async def test_nobody_waits_for_a_holder_that_has_ended(api: FakeApi) -> None:
    spec = {"holderIdentity": "crashed", "leaseDurationSeconds": 600, "leaseTransitions": 4}
    api.put(LEASES, "controller", "berth", spec=spec)
    async with candidate(api, "one") as one, candidate(api, "two", has_ended=lambda holder: holder == "crashed") as two:
        await two.leads()
        assert two.spec["holderIdentity"] == "two" and two.spec["leaseTransitions"] == 5
        api.put(LEASES, "controller", "berth", spec={**spec, "holderIdentity": "another"})
        with pytest.raises(LeadershipLost, match="another's"):
            await asyncio.wait_for(two.task, 5)
        assert not one.leading.is_set(), "it cannot know, and waits"


async def test_two_that_write_at_once_are_told_apart_by_the_version(api: FakeApi) -> None:
    async with await api.client() as client:
        electors = [LeaderElector(client, "berth", "controller", str(n), **TIMES) for n in range(8)]
        assert sum(await asyncio.gather(*(e._try() for e in electors))) == 1  # creation
        api.put(LEASES, "controller", "berth", spec={"leaseTransitions": 1})
        electors = [LeaderElector(client, "berth", "controller", str(n), **TIMES) for n in range(8)]
        assert sum(await asyncio.gather(*(e._try() for e in electors))) == 1  # taking over


async def test_nonsense_is_refused() -> None:
    async with FakeApi() as api, await api.client() as client:
        with pytest.raises(ValueError, match="renew_deadline"):
            LeaderElector(client, "a", "b", "c", lease_seconds=5, renew_deadline=10)
        with pytest.raises(ValueError, match="identity"):
            LeaderElector(client, "a", "b", "")
