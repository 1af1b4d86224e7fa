"""The benchmark of the seat proxy: its arithmetic, and all of it in miniature."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import seat_proxy
from benchmarks.report import Report
from stack import StackError
from stack.native import cargo, find


def test_what_a_way_adds_is_told_against_the_direct_one() -> None:
    report = Report("")
    times = {"direct": [n / 1e6 for n in range(1, 101)], "seat proxy": [(n + 40) / 1e6 for n in range(1, 101)]}
    seat_proxy.tell_latency(report, times)
    assert report.values["direct"]["p50_us"] == pytest.approx(51)
    assert report.values["seat_proxy"]["p99_us"] == pytest.approx(140)
    assert report.values["seat_proxy_adds"] == {"p50_us": pytest.approx(40), "p99_us": pytest.approx(40)}


def test_ways_have_turns() -> None:
    order: list[str] = []

    def way(name: str) -> Callable[[], float]:
        def ask() -> float:
            order.append(name)
            return 0.0

        return ask

    times = seat_proxy.in_turns({"a": way("a"), "b": way("b")}, 3 * seat_proxy.TURN)
    assert {name: len(each) for name, each in times.items()} == {"a": 3 * seat_proxy.TURN, "b": 3 * seat_proxy.TURN}
    assert order[:: seat_proxy.TURN] == ["a", "b"] * 4


async def test_it_runs_in_miniature() -> None:
    try:
        if find("seat-proxy") is None:
            cargo()
    except StackError as error:
        pytest.skip(f"the seat proxy cannot be had here: {error}")
    report = Report("")
    await seat_proxy.measure(report, 200, 0.1)
    for way in ("direct", "seat_proxy", "aiohttp_proxy"):
        assert report.values[way]["requests"] == 200
        assert report.values[f"requests_per_second_{way}"] > 0
    assert report.values["held_16_answered_p50_us"] > 0
