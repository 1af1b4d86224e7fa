"""Certificates from nothing to their successors' successors, as API servers and replicas live through it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial

import pytest

from controller.webhooks import keeper
from controller.webhooks.issue import as_json, made
from controller.webhooks.issue import stored as dates
from controller.webhooks.keeper import CONFIGURATIONS, IssueError, Keeper, from_json, host_of
from controller.webhooks.material import SECRET_NAME, SECRET_NAMESPACE, Material, blocks, secret
from controller.webhooks.service import Webhooks
from kube.client import KubeClient
from kube.errors import Conflict
from kube.resources import SECRETS, VALIDATING_WEBHOOKS
from planning.certificates import AUTHORITY_LEFT, AUTHORITY_LIFE, DAY, SERVING_LIFE, SETTLED, Step, Stored
from tests.controller.test_app import until
from tests.controller.webhook_rig import HOST, bundle, fresh, installed, stored, verified
from tests.kube.fake_api import FakeApi, Fault

START = 1_800_000_000.0
ISSUE = keeper.issue


class Rig:
    """A leader's keeper on a clock of its own, and a Secret that is watched as it would be."""

    def __init__(self, api: FakeApi, kube: KubeClient) -> None:
        self.api, self.now = api, START
        self.webhooks = Webhooks(kube, "127.0.0.1", 0)
        self.keeper = Keeper(kube, self.webhooks, clock=lambda: self.now)

    async def look(self) -> str:
        said = await self.keeper.look()
        version = self.api.objects(SECRETS)[SECRET_NAMESPACE, SECRET_NAME]["metadata"]["resourceVersion"]
        await until(lambda: self.watched(version))
        return said

    def watched(self, version: str) -> bool:
        return [each.version for each in self.webhooks.secret.items.values()] == [version]

    def check(self) -> None:
        verified(stored(self.api)["tls.crt"], bundle(self.api), HOST, self.now)


@asynccontextmanager
async def rig(api: FakeApi) -> AsyncIterator[Rig]:

    async with await api.client() as kube:
        mine = Rig(api, kube)
        watching = asyncio.create_task(mine.webhooks.secret.run())
        try:
            yield mine
        finally:
            watching.cancel()


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as running:
        yield running


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the keeper's program does, without a process for each time."""

    async def issue(step: Step, material: Material, hosts: Iterable[str], now: float) -> tuple[Material, Stored]:
        await asyncio.sleep(0.01)
        after = made(step, material, sorted(hosts), now)
        return after, from_json(json.loads(json.dumps(as_json(dates(after)))))

    monkeypatch.setattr(keeper, "issue", issue)


async def test_from_an_empty_secret_to_the_third_authority(api: FakeApi) -> None:
    installed(api)
    async with rig(api) as mine:
        assert await mine.look() == ""
        mine.check()
        seen = {bundle(api)}
        served = {stored(api)["tls.crt"]}
        while mine.now < START + 2 * (AUTHORITY_LIFE - AUTHORITY_LEFT) + 30 * DAY:
            mine.now += 25 * DAY
            for _ in range(4):  # looks of an hour, as its steps want to settle
                before = bundle(api), stored(api)["tls.crt"]
                assert await mine.look() == ""
                # Whoever has not heard yet still speaks to whoever has, and the other way round.
                verified(before[1], bundle(api), HOST, mine.now)
                verified(stored(api)["tls.crt"], before[0], HOST, mine.now)
                mine.check()
                seen.add(bundle(api))
                served.add(stored(api)["tls.crt"])
                mine.now += SETTLED
        newest = {blocks(each)[-1] for each in seen}
        assert len(newest) == 3
        assert max(len(blocks(each)) for each in seen) == 2
        assert len(blocks(bundle(api))) == 1
        assert len(served) >= 2 * 610 * DAY / SERVING_LIFE


async def test_a_look_at_what_is_well_writes_nothing(api: FakeApi) -> None:
    installed(api)
    async with rig(api) as mine:
        await mine.look()
        api.requests.clear()
        await mine.look()
        assert {method for method, _, _ in api.requests} == {"GET"}


async def test_a_configuration_applied_anew_is_trusted_again(api: FakeApi) -> None:
    installed(api)
    async with rig(api) as mine:
        await mine.look()
        before = stored(api)
        installed(api)
        assert "caBundle" not in str(api.objects(VALIDATING_WEBHOOKS))
        await mine.look()
        mine.check()
        assert stored(api) == before


async def test_garbage_in_the_secret_is_replaced(api: FakeApi) -> None:
    installed(api)
    async with rig(api) as mine:
        await mine.look()
        other = fresh(now=START)
        good = stored(api)
        for data in (
            {},
            {"tls.crt": "!", "tls.key": 7},
            Material(good["ca.crt"], good["ca.key"], good["tls.crt"], other.key).data(),
            Material(good["ca.crt"], other.authority_key, good["tls.crt"], good["tls.key"]).data(),
            Material(other.authorities, other.authority_key, good["tls.crt"], good["tls.key"]).data(),
        ):
            raw = api.put(SECRETS, SECRET_NAME, SECRET_NAMESPACE, data=data)
            version = raw["metadata"]["resourceVersion"]
            await until(partial(mine.watched, version))
            await mine.look()
            mine.check()


async def test_what_is_missing_is_told(api: FakeApi) -> None:
    async with rig(api) as mine:
        assert "are not installed (deploy/webhooks)" in await mine.keeper.look()
        installed(api)
        api.remove(SECRETS, SECRET_NAME, SECRET_NAMESPACE)
        assert "Secret berth-system/berth-webhook-certificates is not there" in await mine.keeper.look()


async def test_a_missing_right_is_told_once_and_waited_for(
    api: FakeApi, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr("controller.webhooks.keeper.LOOK", 0.05)
    installed(api)
    denied = Fault(status=403, reason="Forbidden", method="GET", contains=CONFIGURATIONS, count=5)
    api.faults.append(denied)
    async with rig(api) as mine:
        keeping = asyncio.create_task(mine.keeper.run())
        await until(lambda: mine.keeper.trouble != "")
        assert "validatingwebhookconfigurations" in mine.keeper.trouble and "403" in mine.keeper.trouble
        await until(lambda: mine.keeper.trouble == "" and "tls.crt" in stored(api), 10)
        keeping.cancel()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


async def test_of_two_that_believe_to_lead_one_writes_and_the_other_takes_it_over(api: FakeApi) -> None:
    installed(api)
    async with rig(api) as first, rig(api) as second:
        results = await asyncio.gather(first.keeper.look(), second.keeper.look(), return_exceptions=True)
        assert [type(result) for result in results if result != ""] == [Conflict]
        for mine in (first, second):
            await mine.look()
            mine.check()
    written = [entry for entry in api.history if entry.plural == "secrets" and "tls.crt" in entry.new["data"]]
    assert len(written) == 1


async def test_keys_are_in_no_log_and_no_message(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    installed(api)
    async with rig(api) as mine:
        await mine.look()
        api.put(SECRETS, SECRET_NAME, SECRET_NAMESPACE, data={"tls.key": "garbage"})
        await mine.look()
        kept = secret(api.objects(SECRETS)[SECRET_NAMESPACE, SECRET_NAME])
    assert "PRIVATE KEY" in str(asdict(kept.material)), "or the test looks for the wrong words"
    assert "PRIVATE" not in f"{kept!r} {caplog.text}"


async def test_the_program_makes_the_same_and_tells_why_it_cannot() -> None:
    material, known = await ISSUE(Step.BEGIN, Material(), [HOST], START)
    assert known == dates(material)
    verified(material.certificate, material.authorities, HOST, START)
    assert await ISSUE(Step.KEEP, material, (), 0.0) == (material, known)
    with pytest.raises(IssueError, match="exit status 1") as failed:
        await ISSUE(Step.ISSUE, material, ["no\u00e4scii"], START)
    assert "PRIVATE" not in str(failed.value)


def test_the_certificate_is_for_the_names_that_are_called() -> None:
    service = {"service": {"name": "berth-webhooks", "namespace": "berth-system", "path": "/validate"}}
    assert host_of(service) == "berth-webhooks.berth-system.svc"
    assert host_of({"url": "https://127.0.0.1:9443/validate"}) == "127.0.0.1"
    assert host_of({}) == ""
    both = made(Step.BEGIN, Material(), ["127.0.0.1", "berth-webhooks.berth-system.svc"], START)
    serving = dates(both).serving
    assert serving is not None and serving.hosts == {"127.0.0.1", "berth-webhooks.berth-system.svc"}


def test_nothing_outlives_its_authority() -> None:
    old = fresh(now=START)
    late = dates(made(Step.ISSUE, old, [HOST], START + AUTHORITY_LIFE - 5 * DAY))
    assert late.serving is not None and late.serving.ends == late.authorities[0].ends


def test_what_cannot_be_read_counts_as_nothing() -> None:
    good = fresh()
    assert dates(good).serving is not None
    for bad in (
        Material(),
        Material("x", "x", "x", "x"),
        Material(good.authorities, good.key, good.certificate, good.key),
    ):
        assert dates(bad) == Stored()
