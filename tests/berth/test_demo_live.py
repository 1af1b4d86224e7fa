"""The demo's fold of news into a picture: whatever order news comes in, and what people see of it."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import pytest
from rich.console import Console

from berth.demo import view
from berth.demo.live import Fleet

NODES = [("n1", "T4", 2), ("n2", "G2", 8)]


def fleet(*workloads: tuple[str, int]) -> Fleet:
    return Fleet.of(NODES, workloads or [("a", 1), ("b", 2)])


def state(of: Fleet) -> str:
    return of.items["a"].state


def shown(target: Fleet, now: float, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, force_terminal=True)
    console.print(view.picture(target, now, title="t", width=width))
    return console.export_text()


def test_a_life() -> None:
    one = fleet()
    one.applied("a", 0.0)
    one.job("a", 0, "n1", 1.0)
    assert state(one) == "starting"
    one.pod("u1", "a", 0, "", False, 1.1)
    assert not one.used()
    one.pod("u1", "a", 0, "n1", False, 1.2)
    assert one.used() == {"T4": 1}
    one.pod("u1", "a", 0, "n1", True, 1.3)
    assert state(one) == "running"
    one.pod_gone("u1", "a", 0, 5.0)
    assert one.items["a"].state == "closing"
    assert one.used()["T4"] == 0
    one.status("a", "Succeeded", 0, "done", 5.5)
    one.job_gone("a", 0, 5.6)
    item = one.items["a"]
    assert (item.state, item.placed, item.ran, item.ended) == ("succeeded", 1.0, 1.3, 5.5)
    assert not one.all_ended


def test_a_retry_counts_its_first_placement_only() -> None:
    one = fleet(("a", 1))
    one.applied("a", 0.0)
    one.job("a", 0, "n1", 1.0)
    one.pod("u1", "a", 0, "n1", True, 1.5)
    one.pod_gone("u1", "a", 0, 3.0)
    one.status("a", "Pending", 1, "exit code 1; retry 1 of 1 in 1 s", 3.1)
    one.job_gone("a", 0, 3.2)
    assert one.items["a"].state == "waiting"
    one.job("a", 1, "n2", 4.0)
    assert (one.items["a"].placed, one.items["a"].retries, one.placements) == (1.0, 1, 2)
    assert [each.kind for each in one.news] == ["placed", "retried", "placed"]
    one.status("a", "Failed", 1, "all retries are used", 9.0)
    assert one.all_ended


def test_old_news_of_an_earlier_attempt_changes_nothing() -> None:
    one = fleet(("a", 1))
    one.job("a", 1, "n2", 4.0)
    one.job("a", 0, "n1", 4.1)
    one.job_gone("a", 0, 4.2)
    one.pod_gone("u0", "a", 0, 4.3)
    assert (one.items["a"].state, one.items["a"].node, one.items["a"].attempt) == ("starting", "n2", 1)


def test_news_of_others_is_ignored() -> None:
    one = fleet()
    one.job("stranger", 0, "n1", 1.0)
    one.pod("u", "stranger", 0, "n1", True, 1.0)
    one.status("stranger", "Running", 0, "", 1.0)
    assert not one.used()
    assert one.placements == 0


def test_a_node_with_too_much_on_it_is_counted() -> None:
    one = fleet(("a", 2), ("b", 2))
    one.pod("u1", "a", 0, "n1", True, 1.0)
    assert one.overcommitted == 0
    one.pod("u2", "b", 0, "n1", True, 1.0)
    assert one.overcommitted == 1


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_the_same_news_ends_alike(seed: int) -> None:
    """Watches of different kinds are not ordered among each other; each kind is."""
    one = fleet(("a", 2))
    jobs: list[Callable[[], None]] = [
        lambda: one.job("a", 0, "n2", 1.0),
        lambda: one.job_gone("a", 0, 6.0),
        lambda: one.job("a", 1, "n2", 7.0),
        lambda: one.job_gone("a", 1, 9.0),
    ]
    pods: list[Callable[[], None]] = [
        lambda: one.pod("u0", "a", 0, "n2", False, 2.0),
        lambda: one.pod("u0", "a", 0, "n2", True, 3.0),
        lambda: one.pod_gone("u0", "a", 0, 5.0),
        lambda: one.pod("u1", "a", 1, "n2", True, 7.5),
        lambda: one.pod_gone("u1", "a", 1, 8.0),
    ]
    statuses: list[Callable[[], None]] = [
        lambda: one.status("a", "Running", 0, "", 3.5),
        lambda: one.status("a", "Pending", 1, "failed", 5.5),
        lambda: one.status("a", "Succeeded", 1, "done", 8.5),
    ]
    queues = [jobs, pods, statuses]
    rng = random.Random(seed)
    while any(queues):
        rng.choice([queue for queue in queues if queue]).pop(0)()
    assert one.items["a"].state == "succeeded"
    assert one.used()["G2"] == 0
    assert (one.placements, one.items["a"].retries, one.overcommitted) == (2, 1, 0)


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_the_picture_keeps_its_width(width: int) -> None:
    one = fleet(*((f"w{i}", 1) for i in range(40)))
    for i in range(10):
        one.applied(f"w{i}", 0.0)
        one.job(f"w{i}", 0, "n2", i / 10)
        one.pod(f"u{i}", f"w{i}", 0, "n2", True, i / 10)
        one.sample(i / 10)
    lines = shown(one, 1.0, width).splitlines()
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    assert "running 10" in text
    assert "10/8" in text  # what cannot be is shown as it is
    assert "placed on n2" in text


def test_the_picture_before_anything_happened() -> None:
    assert "0/8" in shown(fleet(), 0.0, 80)


def test_a_bar_adds_up_and_hides_nobody() -> None:
    counts = dict.fromkeys(view.COLOURS, 0) | {"waiting": 997, "running": 1, "failed": 2}
    columns = view.shares(counts, 1000, 60)
    assert sum(columns.values()) == 60
    assert columns["running"] == 1
    assert columns["failed"] == 1
    assert columns["succeeded"] == 0
    assert sum(view.shares(dict.fromkeys(view.COLOURS, 0), 0, 60).values()) == 0


def test_sparkline() -> None:
    assert view.sparkline([0.0, 0.5, 1.0], 10) == " ▄█"
    assert len(view.sparkline([0.3] * 1000, 40)) == 40
    assert view.sparkline([0.001], 5) == "▁"
    assert view.sparkline([], 5) == ""


def test_rates_forget() -> None:
    one = fleet()
    one.job("a", 0, "n1", 1.0)
    assert one.rates(2.0) == (0.2, 0.0)
    assert one.rates(7.0) == (0.0, 0.0)
    assert "placed/s" in view.line(one, 7.0)
