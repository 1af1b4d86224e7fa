"""The webhook for pods that prefer a group: what it makes, what it says, and that it keeps no pod from being made."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from controller.webhooks import seats
from controller.webhooks.seats import SeatPreferences
from kube.client import KubeClient
from kube.resources import PODS, RESOURCECLAIMTEMPLATES
from planning.devices.prefer_group import CLAIM, SeatClass
from tests.controller.webhook_rig import question
from tests.kube.fake_api import FakeApi
from tests.planning.devices.test_prefer_group import SEAT, pod

CLASS = SeatClass("gpu-2x-seat", SEAT)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as running:
        yield running


@pytest.fixture
async def kube(api: FakeApi) -> AsyncIterator[KubeClient]:
    async with await api.client() as client:
        yield client


def asked(raw: object, **more: Any) -> bytes:
    return question(kind={"group": "", "version": "v1", "kind": "Pod"}, object=raw, **more)


async def answered(preferences: SeatPreferences, body: bytes) -> dict[str, Any]:
    told = await preferences.answer(body)
    assert told.status == 200
    response: dict[str, Any] = orjson.loads(told.body)["response"]
    assert response["allowed"] and response["uid"] == "a-b-c"
    return response


def templates(api: FakeApi) -> list[str]:
    return sorted(name for _, name in api.objects(RESOURCECLAIMTEMPLATES))


async def test_the_template_is_made_once_and_the_pod_names_it(api: FakeApi, kube: KubeClient) -> None:
    preferences = SeatPreferences(kube, lambda: [CLASS])
    responses = [await answered(preferences, asked(pod())) for _ in range(2)]
    (name,) = templates(api)
    operations = orjson.loads(base64.b64decode(responses[1]["patch"]))
    assert operations[0]["value"] == [{"name": CLAIM, "resourceClaimTemplateName": name}]
    assert len([1 for method, _, _ in api.requests if method == "POST"]) == 1
    await answered(SeatPreferences(kube, lambda: [CLASS]), asked(pod()))
    assert templates(api) == [name], "another replica, which does not know that it is there"


async def test_where_seats_are_not_offered_through_dra_the_pod_is_taken_as_it_comes(
    api: FakeApi, kube: KubeClient
) -> None:
    assert "patch" not in await answered(SeatPreferences(kube, list), asked(pod()))
    assert templates(api) == []


async def test_a_dry_run_makes_nothing(api: FakeApi, kube: KubeClient) -> None:
    response = await answered(SeatPreferences(kube, lambda: [CLASS]), asked(pod(), dryRun=True))
    assert "patch" in response and templates(api) == []


@pytest.mark.parametrize("fault", [{"do": "status", "status": 403, "reason": "Forbidden"}, {"do": "hang"}])
async def test_what_cannot_be_made_is_said_and_costs_nobody_the_pod(
    api: FakeApi, kube: KubeClient, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(seats, "_MAKING", 0.1)
    api.fail(**fault)
    response = await answered(SeatPreferences(kube, lambda: [CLASS]), asked(pod()))
    (warning,) = response["warnings"]
    assert warning.startswith("kyb.ai/prefer-group is not honoured: ") and "patch" not in response


async def test_what_is_no_question_about_a_new_pod_is_let_through(kube: KubeClient) -> None:
    preferences = SeatPreferences(kube, lambda: [CLASS])
    for body in (asked(pod(), operation="DELETE"), asked(pod(), operation="UPDATE", oldObject=pod()), question()):
        assert "patch" not in await answered(preferences, body)
    assert (await preferences.answer(b"{")).status == 400


async def test_templates_that_no_pod_names_any_more_go_after_a_while(api: FakeApi, kube: KubeClient) -> None:
    preferences = SeatPreferences(kube, lambda: [CLASS])
    for group in ("G01", "G23"):
        await answered(preferences, asked(pod(group)))
    one, other = templates(api)
    claim = {"name": CLAIM, "resourceClaimTemplateName": other}
    api.put(PODS, "p", "team-a", spec={"resourceClaims": [claim]})
    made = datetime.fromisoformat(
        api.objects(RESOURCECLAIMTEMPLATES)["team-a", one]["metadata"]["creationTimestamp"]
    ).astimezone(UTC)
    assert await preferences.tidy(made.timestamp() + 60) == 0
    assert await preferences.tidy(made.timestamp() + 7200) == 1
    assert templates(api) == [other]
    await answered(preferences, asked(pod("G01")))
    assert templates(api) == [one, other], "it is made again for the next who asks"
