"""When a waiting workload starts: from what runs, how long such runs took, and who is before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.accelerators import AMD
from planning.model import WHOLE, PodView, Resources, Snapshot
from planning.prediction import seconds_to_start, starts
from planning.profiles import Mark, Run, fold
from planning.typical import Kind
from tests.planning.builders import GIB, NOW, SETTINGS, job, node, pod, snapshot, workload
from tests.planning.test_durations import learned


def running(*sizes_and_ages: tuple[int, float], waiting: tuple[int, ...], took: tuple[float, ...]) -> Snapshot:
    """A node of 8 GPUs with what runs there for so long, a queue, and what such runs took so far."""
    jobs = [
        job(f"r{i}", "n", gpus=size, created=NOW - age, started=NOW - age, ready=True, counted=True)
        for i, (size, age) in enumerate(sizes_and_ages)
    ]
    pods: list[PodView] = [pod(f"p{each.name}", "n", of=each, running=True) for each in jobs]
    views = [workload(f"r{i}", size) for i, (size, _) in enumerate(sizes_and_ages)]
    queue = [workload(f"w{i}", size, created=NOW - 50 + i) for i, size in enumerate(waiting)]
    seen = snapshot([node("n", 8)], [*views, *queue], jobs=jobs, pods=pods)
    return replace(seen, profiles=(learned(*took, gpus=1, now=NOW),)) if took else seen


def start(seen: Snapshot, uid: str, share: float = 0.5) -> float | None:
    return seconds_to_start(seen, SETTINGS, uid, share)


def test_what_fits_starts_at_once() -> None:
    assert start(running(waiting=(4,), took=()), "w0") == 0.0


def test_it_starts_when_enough_of_what_runs_has_ended() -> None:
    seen = running((8, 100.0), waiting=(4,), took=(400.0,) * 5)
    assert start(seen, "w0") == pytest.approx(300, rel=0.1)


def test_what_runs_ends_as_runs_with_its_kind_of_gpus_do() -> None:
    eight, amd = Resources(8, 0, 0, 1, gpu_resource=AMD), {"gpuResource": AMD}
    there = node("n", allocatable=Resources(8, 64_000, 256 * GIB, 110, gpu_resource=AMD))
    runs = job("r0", "n", requests=eight, created=NOW - 100, started=NOW - 100, ready=True, counted=True)
    views = [workload("r0", 8, spec=amd), workload("w0", 8, spec=amd, created=NOW - 50)]
    seen = snapshot([there], views, jobs=[runs], pods=[pod("p", "n", of=runs, running=True)])
    slow = [
        Run(Mark(int(NOW) + 60 + i, "u"), "ns", "m", 8, NOW, True, "Completed", 0, 400.0, Kind(8, WHOLE, 0, (), AMD))
        for i in range(3)
    ]
    known = fold(learned(*[150.0] * 9, gpus=8, now=NOW), slow)
    assert start(replace(seen, profiles=(known,)), "w0") == pytest.approx(300, rel=0.1)


def test_nothing_can_be_told_where_nothing_was_learned_and_nothing_has_a_deadline() -> None:
    assert start(running((8, 100.0), waiting=(4,), took=()), "w0") is None


def test_a_deadline_is_the_end_at_the_latest() -> None:
    seen = running((8, 100.0), waiting=(4,), took=())
    bound = workload("r0", 8, spec={"activeDeadlineSeconds": 250})
    seen = replace(seen, workloads=(bound, *(w for w in seen.workloads if w.uid != "r0")))
    assert start(seen, "w0") == pytest.approx(150)


def test_those_before_it_run_first() -> None:
    seen = running((8, 0.0), waiting=(8, 8, 8), took=(100.0,) * 5)
    first, second, third = (start(seen, f"w{i}") for i in range(3))
    assert first == pytest.approx(100, rel=0.1)
    assert second == pytest.approx(200, rel=0.1) and third == pytest.approx(300, rel=0.1)


def test_who_can_never_run_is_told_nothing_and_holds_up_nobody() -> None:
    seen = running((8, 0.0), waiting=(2,), took=(100.0,) * 5)
    never = workload("x", 8, spec={"nodeSelector": {"no": "where"}}, created=NOW - 99)
    seen = replace(seen, workloads=(*seen.workloads, never))
    assert start(seen, "x") is None and start(seen, "w0") == pytest.approx(100, rel=0.1)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 500)), max_size=2),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.lists(st.floats(10, 1000), min_size=3, max_size=8),
)
def test_the_later_of_two_shares_is_no_earlier_for_the_first_of_the_queue(
    sizes: list[tuple[int, float]], waiting: list[int], took: list[float]
) -> None:
    seen = running(*sizes, waiting=tuple(waiting), took=tuple(took))
    early, late = start(seen, "w0", 0.5), start(seen, "w0", 0.9)
    if early is not None and late is not None:
        assert 0 <= early <= late + 1e-6


def test_so_many_that_not_all_can_be_told_why_they_wait_are_still_foreseen() -> None:
    seen = running((8, 0.0), waiting=(1,) * 700, took=(100.0,) * 5)
    assert start(seen, "w0") == pytest.approx(100, rel=0.1)
    assert len(starts(seen, SETTINGS, 0.5)) >= 8


@pytest.mark.parametrize("untold", [700, 2000])
def test_a_gang_behind_very_many_that_must_be_told_why_they_wait_is_foreseen(untold: int) -> None:
    """They wait for a node where nobody knows what will end; as many are told as a round may tell."""
    seen = running((8, 0.0), waiting=(), took=(100.0,) * 5)
    there = {"nodeSelector": {"kubernetes.io/hostname": "m"}}
    stuck = [workload(f"s{i}", 8, spec=there, created=NOW - 500) for i in range(untold)]
    gang = workload("gang", 2, spec={"replicas": 4})
    seen = replace(
        seen,
        nodes=(*seen.nodes, node("m", 8)),
        pods=(*seen.pods, pod("stranger", "m", gpus=8)),
        workloads=(*seen.workloads, *stuck, gang),
    )
    assert start(seen, "gang") == pytest.approx(100, rel=0.1)
