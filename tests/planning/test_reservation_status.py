"""What a GPUReservation's status says, and that it is written seldom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crds.gpureservation import GPUReservationStatus
from planning.model import Snapshot, WorkloadView
from planning.quota_status import PAUSE
from planning.reservation_status import ReservationLag, lagging_reservations, shown_nodes, standings
from planning.windows import ReservationView
from tests.planning.builders import NOW, SETTINGS, job, node, pod, reservation, snapshot, workload

HERE = {"uid-r": {"a": 4, "b": 2}}


def seen(keeps: ReservationView, *pairs: tuple[WorkloadView, str], now: float = NOW) -> Snapshot:
    """Two nodes of four GPUs, and workloads that run where the pair says, or wait where that is ''."""
    jobs = [job(view.uid, where, gpus=view.spec.gpu_count if view.spec else 0) for view, where in pairs if where]
    pods = [pod(f"p-{each.name}", each.node, of=each) for each in jobs]
    views = [view for view, _ in pairs]
    return snapshot([node("a", 4), node("b", 4)], views, jobs=jobs, pods=pods, reservations=[keeps], now=now)


def lag(*args: Any, recorded: dict[str, dict[str, int]] | None = None, **more: Any) -> ReservationLag:
    (found,), later = lagging_reservations(seen(*args, **more), HERE if recorded is None else recorded, SETTINGS)
    GPUReservationStatus.model_validate(found.status)
    assert not later
    return found


def said(found: ReservationLag) -> tuple[str, str, str, str]:
    (condition,) = found.status["conditions"]
    assert condition["type"] == "Reserved"
    return found.status["phase"], condition["status"], condition["reason"], condition["message"]


def test_all_is_kept() -> None:
    found = lag(reservation("r", gpus=6, start=100, end=200))
    assert said(found) == (
        "Reserved", "True", "Kept", "6 GPUs are kept on nodes a, b from 1970-01-12T13:48:20Z on",
    )  # fmt: skip
    assert found.status["nodes"] == [{"name": "a", "gpus": 4}, {"name": "b", "gpus": 2}]
    assert found.news == said(found)[3]


def test_during_the_window_it_tells_who_uses_it_and_who_waits() -> None:
    there = (workload("h", 3, spec={"reservation": "r"}), "a"), (workload("w", 4, spec={"reservation": "r"}), "")
    lent = workload("l", 3, spec={"preemptible": True}), "b"
    stranger = workload("s", 1, namespace="other", spec={"reservation": "r"}), ""
    found = lag(reservation("r", gpus=6, start=-10, end=200), *there, lent, stranger)
    assert said(found)[:3] == ("Active", "True", "Kept") and said(found)[3].endswith("until 1970-01-12T13:50:00Z")
    counts = {key: found.status[key] for key in ("reserved", "used", "lent", "waiting")}
    assert counts == {"reserved": 6, "used": 3, "lent": 1, "waiting": 1}, "of the three on b one is beside it"


def test_what_others_hold_who_cannot_be_stopped_is_not_kept_yet() -> None:
    found = lag(reservation("r", gpus=6, start=100, end=200), (workload("f", 3), "b"))
    assert said(found) == (
        "Pending", "False", "Short",
        "5 of 6 GPUs are kept from 1970-01-12T13:48:20Z on; the rest is in the hands of work that may not be stopped, "
        "and is kept as it comes free",
    )  # fmt: skip
    less = lag(reservation("r", gpus=9, start=100, end=200))
    assert said(less)[3].endswith("the nodes that match its nodeSelector and can be used have no more beside other "
                                  "reservations")  # fmt: skip


@pytest.mark.parametrize(
    ("keeps", "phase", "reason", "message"),
    [
        (reservation("r", gpus=6, start=-200, end=-100), "Ended", "Ended",
         "it ended at 1970-01-12T13:45:00Z; its workloads that still run go on until others need the room"),
        (reservation("r", gpus=0, start=0, end=1), "Pending", "Invalid",
         "spec.gpus: must be at least 1, not 0; nothing is kept until that is mended"),
    ],
)  # fmt: skip
def test_one_that_keeps_nothing(keeps: ReservationView, phase: str, reason: str, message: str) -> None:
    found = lag(keeps)
    assert said(found) == (phase, "False", reason, message)
    assert found.status["reserved"] == 0 and found.status["nodes"] == []


def test_what_stands_there_is_not_written_again_and_numbers_every_few_seconds() -> None:
    keeps = reservation("r", gpus=6, start=100, end=20_000)
    told = replace(keeps, status=lag(keeps).status)
    lent = workload("l", 3, spec={"preemptible": True}), "a"
    assert lagging_reservations(seen(told, now=NOW + 99), HERE, SETTINGS) == ([], False)
    assert lagging_reservations(seen(told, lent, now=NOW + PAUSE - 1), HERE, SETTINGS) == ([], True)
    ((found,), later) = lagging_reservations(seen(told, lent, now=NOW + PAUSE), HERE, SETTINGS)
    assert (found.status["lent"], found.news, later) == (3, "", False)
    ((began,), _) = lagging_reservations(seen(told, now=NOW + 100), HERE, SETTINGS)
    assert began.status["phase"] == "Active" and began.news


def test_the_nodes_in_a_status_are_read_back_whatever_somebody_wrote_there() -> None:
    keeps = reservation("r", gpus=6, start=100, end=200)
    told = replace(keeps, status=lag(keeps).status)
    assert shown_nodes(seen(told)) == HERE
    for wrong in (None, 7, "x", [1], [{"name": 1, "gpus": 1}, {"name": "a", "gpus": "1"}, {"gpus": 2}, {"name": "a"}]):
        assert shown_nodes(seen(replace(keeps, status={"nodes": wrong}))) == {}


def test_a_node_that_is_gone_is_not_counted() -> None:
    (found,) = standings(seen(reservation("r", gpus=6, start=100, end=200)), {"uid-r": {"a": 4, "gone": 2}}, SETTINGS)
    assert found.reserved == 4
