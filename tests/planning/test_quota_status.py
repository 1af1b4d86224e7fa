"""What a GPUQuota's status says, and that it is written seldom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crds.gpuquota import GPUQuotaStatus
from planning.model import Lately, QuotaView
from planning.quota_status import PAUSE, lagging_quotas
from tests.planning.builders import NOW, SETTINGS, job, node, pod, quota, snapshot, workload


def written(view: QuotaView, status: dict[str, Any]) -> QuotaView:
    return replace(view, status=status)


def test_it_tells_what_is_held_borrowed_and_waits() -> None:
    mine = job("r", "n", gpus=3, namespace="a")
    seen = snapshot(
        [node("n", 8)],
        [workload("r", 3, namespace="a", spec={"preemptible": True}), workload("w", 8, namespace="a")],
        jobs=[mine],
        pods=[pod("p", "n", of=mine, namespace="a")],
        quotas=[quota("c", gpus=4), quota("q", "a", gpus=2, cohort="c")],
    )
    found = {lag.view.name: lag.status for lag in lagging_quotas(seen, {"q": Lately(0.25, 0.0, NOW)}, SETTINGS)[0]}
    assert found["q"] | {"updated": "", "conditions": []} == {
        "observedGeneration": 1,
        "used": {"gpus": 3, "cpu": "0", "memory": "0Gi"},
        "borrowed": {"gpus": 1, "cpu": "0", "memory": "0Gi"},
        "waiting": 1,
        "share": "37.5 %",
        "lately": "25.0 %",
        "updated": "",
        "conditions": [],
    }
    assert found["c"]["used"]["gpus"] == 3 and "waiting" not in found["c"]
    for status in found.values():
        GPUQuotaStatus.model_validate(status)
        assert [(each["type"], each["status"]) for each in status["conditions"]] == [("Valid", "True")]


def test_what_stands_there_is_not_written_again() -> None:
    view = quota("q", "a", gpus=2)
    (lag,), _ = lagging_quotas(snapshot([node("n")], quotas=[view]), {}, SETTINGS)
    told = snapshot([node("n")], quotas=[written(view, lag.status)], now=NOW + 999)
    assert lagging_quotas(told, {}, SETTINGS) == ([], False)
    assert lagging_quotas(told, {"q": Lately(0.5, 0.0, NOW)}, SETTINGS) == ([], False), "what fades is no news"


def test_what_changes_with_every_round_is_written_every_few_seconds() -> None:
    view = quota("q", "a", gpus=2)
    (lag,), _ = lagging_quotas(snapshot([node("n")], quotas=[view]), {}, SETTINGS)
    told, queue = written(view, lag.status), [workload("w", namespace="a")]
    assert lagging_quotas(snapshot([node("n")], queue, quotas=[told], now=NOW + PAUSE - 1), {}, SETTINGS) == ([], True)
    found, later = lagging_quotas(snapshot([node("n")], queue, quotas=[told], now=NOW + PAUSE), {}, SETTINGS)
    assert len(found) == 1 and not later


def test_what_is_wrong_is_told_at_once_and_since_when() -> None:
    view = quota("q", "a", gpus=2, cohort="nope")
    (lag,), _ = lagging_quotas(snapshot(quotas=[view]), {}, SETTINGS)
    (condition,) = lag.status["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "Misconfigured") and "no GPUQuota nope" in condition[
        "message"
    ]
    mended = quota("q", "a", gpus=2)
    (again,), _ = lagging_quotas(snapshot(quotas=[written(mended, lag.status)], now=NOW + 1), {}, SETTINGS)
    assert again.status["conditions"][0]["status"] == "True"
    assert again.status["conditions"][0]["lastTransitionTime"] != condition["lastTransitionTime"]
    (later,), _ = lagging_quotas(
        snapshot(quotas=[replace(view, generation=2, status=lag.status)], now=NOW + 99), {}, SETTINGS
    )
    assert later.status["conditions"][0]["lastTransitionTime"] == condition["lastTransitionTime"]


def test_what_the_models_refuse_still_gets_its_condition() -> None:
    (lag,), _ = lagging_quotas(snapshot(quotas=[quota("q", "a", gpus=-1)]), {}, SETTINGS)
    assert "spec.nominal.gpus: must be at least 0" in lag.status["conditions"][0]["message"]
    assert "used" not in lag.status
