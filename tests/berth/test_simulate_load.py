"""Work that comes and goes, made out of a trace: as much as was asked for, and begun as if it always had come."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.simulate.load import Load, offered
from berth.simulate.trace import Recorded
from planning.filters import Shape
from planning.model import Resources
from planning.simulation import Arrival
from planning.typical import Kind

FLEET = 100_000  # thousandths of GPUs


def recorded(name: str, gpus: int, created: float, seconds: float) -> Recorded:
    return Recorded(Arrival(name, Shape(Resources(gpus)), Kind(gpus, 1000, 0)), "t", created, seconds)


SHORT_AND_LONG = [recorded(f"{i}", 1 + i % 2, 7.0 * i, 100.0 if i % 10 else 5000.0) for i in range(60)]


def standing(load: Load) -> int:
    return sum(each.gpu_milli for each in load.submissions if each.ran)


def test_as_many_are_measured_as_the_trace_has_and_others_come_before_and_after() -> None:
    load = offered([recorded(str(i), 1, i, 10) for i in range(1200)], FLEET, 0.9, 1)
    come = [each for each in load.submissions if not each.ran]
    measured = [each for each in come if load.begin <= each.at < load.end]
    assert (len(come), len(measured)) == (3000, 1200)
    assert [each.at for each in load.submissions] == sorted(each.at for each in load.submissions)


@pytest.mark.parametrize("share", [0.3, 0.9, 1.5])
def test_what_comes_would_hold_that_share_of_the_gpus(share: float) -> None:
    shares = []
    for seed in range(20):
        load = offered(SHORT_AND_LONG, FLEET, share, seed)
        work = sum(each.gpu_milli * each.seconds for each in load.submissions if load.begin <= each.at < load.end)
        shares.append(work / FLEET / (load.end - load.begin))
    assert fmean(shares) == pytest.approx(share, rel=0.06)


@pytest.mark.parametrize(("share", "there"), [(0.3, 0.3), (0.9, 0.9), (1.5, 1.0)])
def test_it_begins_with_what_would_be_there_and_fits(share: float, there: float) -> None:
    loads = [offered(SHORT_AND_LONG, FLEET, share, seed) for seed in range(20)]
    assert fmean(standing(load) / FLEET for load in loads) == pytest.approx(there, rel=0.06)
    begun = [each for load in loads for each in load.submissions if each.ran]
    assert all(each.at == 0 and each.ran + each.seconds == pytest.approx(5000 if each.seconds + each.ran > 101 else 100)
               for each in begun)  # fmt: skip
    long = sum(each.ran + each.seconds > 101 for each in begun) / len(begun)
    assert long == pytest.approx(6 * 5000 / (6 * 5000 + 54 * 100), rel=0.05), "by how long they stay, not how often"
    assert fmean(each.ran / (each.ran + each.seconds) for each in begun) == pytest.approx(0.5, abs=0.03)
    ages = [each.ran for each in loads[0].submissions if each.ran]
    assert ages == sorted(ages, reverse=True), "the oldest took its place first"


def test_the_seed_draws_stretches_of_the_trace() -> None:
    one, same, other = (
        [each.name for each in offered(SHORT_AND_LONG, FLEET, 0.9, seed).submissions if not each.ran]
        for seed in (3, 3, 4)
    )
    assert one == same != other
    follows = sum((int(a) + 1) % 60 == int(b) for a, b in pairwise(one))
    assert follows / len(one) > 0.95


def test_a_pause_of_days_counts_as_the_next_longest() -> None:
    pods = [recorded("first", 1, 0, 10), *(recorded(str(i), 1, 1e7 + i, 10) for i in range(200))]
    come = [each for each in offered(pods, FLEET, 0.5, 1).submissions if not each.ran]
    pauses = [after.at - before.at for before, after in pairwise(come)]
    assert max(pauses) == pytest.approx(min(pauses))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1e6), st.floats(1, 1e6)), min_size=1, max_size=8),
    st.floats(0.001, 10),
    st.integers(0, 5),
)
def test_any_trace_makes_work_in_order(drawn: list[tuple[int, float, float]], share: float, seed: int) -> None:
    pods = sorted((recorded(str(i), *each) for i, each in enumerate(drawn)), key=lambda pod: pod.created)
    if not any(pod.arrival.gpu_milli for pod in pods):
        return
    load = offered(pods, 4000, share, seed)
    times = [each.at for each in load.submissions]
    assert times == sorted(times) and 0 <= load.begin < load.end <= times[-1]
    assert all(each.seconds >= 0 and each.ran >= 0 for each in load.submissions)
