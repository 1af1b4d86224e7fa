"""The phases over a driver that fails at any call: all ranks or none, and no word that the driver's state belies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.seats.backend import Process
from nodeworkers.seats.helper import phases
from nodeworkers.seats.helper.driver import CHECKPOINTED, FAILED, LOCKED, RUNNING, DriverError
from nodeworkers.seats.helper.phases import Phases, Result, held
from tests.nodeworkers.seats.helper.scripted_driver import CARDS, ScriptedDriver

ONE, TWO, THREE = (Process(pid, 1) for pid in (1, 2, 3))
ALL = [ONE, TWO, THREE]
TIME_OVER = DriverError("CUDA_ERROR_NOT_READY", timed_out=True)
BAD = DriverError("CUDA_ERROR_UNKNOWN")


@pytest.fixture(autouse=True, scope="module")
def living() -> Iterator[set[int]]:
    """Pids of processes that are there."""
    found = {1, 2, 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "there", lambda process: process.pid in found and process.started == 1)
        yield found


def park(driver: ScriptedDriver) -> Result:
    return Phases(driver).park(ALL)


def wake(driver: ScriptedDriver, devices: Mapping[str, str] | None = None) -> Result:
    return Phases(driver).wake(ALL, [], devices or {})


def order(driver: ScriptedDriver) -> list[str]:
    """The kinds of calls, without repetitions."""
    kinds = [call.split()[0] for call in driver.calls]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]


def test_all_are_locked_before_one_is_checkpointed_and_restored_before_one_is_unlocked() -> None:
    driver = ScriptedDriver({1: RUNNING, 2: RUNNING, 3: RUNNING})
    parked = park(driver)
    assert (parked.outcome, list(parked.processes)) == ("done", ALL)
    assert parked.seconds.keys() == {"lock", "checkpoint"}
    assert order(driver) == ["lock", "checkpoint"] and len(driver.calls) == 6
    woken = wake(driver)
    assert (woken.outcome, order(driver)) == ("done", ["lock", "checkpoint", "restore", "unlock"])
    assert set(driver.states.values()) == {RUNNING}
    assert driver.maps == [{}, {}, {}]


def test_what_is_done_already_is_not_done_again() -> None:
    driver = ScriptedDriver({1: CHECKPOINTED})
    assert park(driver).outcome == "done" and not driver.calls
    driver = ScriptedDriver({1: RUNNING})
    assert wake(driver).outcome == "done" and not driver.calls


def test_what_was_begun_goes_on() -> None:
    driver = ScriptedDriver({1: LOCKED, 2: CHECKPOINTED, 3: RUNNING})
    assert park(driver).outcome == "done"
    assert driver.calls[0] == "lock 3" and set(driver.calls[1:]) == {"checkpoint 1", "checkpoint 3"}
    driver = ScriptedDriver({1: LOCKED, 2: CHECKPOINTED, 3: RUNNING})
    assert wake(driver).outcome == "done"
    assert driver.calls[0] == "restore 2" and set(driver.calls[1:]) == {"unlock 1", "unlock 2"}


def test_processes_that_have_nothing_to_do_with_gpus_are_left_alone() -> None:
    driver = ScriptedDriver({2: RUNNING})
    assert park(driver).processes == (TWO,)
    assert driver.calls == ["lock 2", "checkpoint 2"]
    nothing = Phases(driver).park([ONE])
    assert (nothing.outcome, nothing.told) == ("untouched", "no process of it has anything on a GPU")


def test_a_lock_whose_time_is_over_unlocks_the_others() -> None:
    driver = ScriptedDriver({1: RUNNING, 2: RUNNING, 3: RUNNING})
    driver.fails["lock 2"] = (RUNNING, TIME_OVER)
    result = park(driver)
    assert (result.outcome, result.told) == ("untouched", "process 2 had work on its GPUs for 10 s")
    assert set(driver.states.values()) == {RUNNING}
    assert order(driver) == ["lock", "unlock"]


def test_a_checkpoint_that_leaves_it_locked_takes_all_back() -> None:
    driver = ScriptedDriver({1: RUNNING, 2: RUNNING, 3: RUNNING})
    driver.fails["checkpoint 3"] = (LOCKED, BAD)
    result = park(driver)
    assert (result.outcome, result.told) == ("untouched", "process 3 could not be checkpointed: CUDA_ERROR_UNKNOWN")
    assert set(driver.states.values()) == {RUNNING}
    assert order(driver) == ["lock", "checkpoint", "restore", "unlock"]


def test_one_that_failed_is_lost() -> None:
    driver = ScriptedDriver({1: RUNNING, 2: RUNNING})
    driver.fails["checkpoint 1"] = (FAILED, BAD)
    assert park(driver).outcome == "lost"
    calls = len(driver.calls)
    assert (park(driver).outcome, wake(driver).outcome) == ("lost", "lost") and len(driver.calls) == calls


def test_one_that_could_not_be_restored_is_lost_and_nobody_is_unlocked() -> None:
    driver = ScriptedDriver({1: CHECKPOINTED, 2: CHECKPOINTED})
    driver.fails["restore 1"] = (CHECKPOINTED, DriverError("CUDA_ERROR_OUT_OF_MEMORY"))
    result = wake(driver)
    assert (result.outcome, result.told) == ("lost", "process 1 could not be restored: CUDA_ERROR_OUT_OF_MEMORY")
    assert order(driver) == ["restore"]


def test_one_that_dies_of_it_is_lost(living: set[int]) -> None:
    class Deadly(ScriptedDriver):
        def lock(self, pid: int, seconds: float) -> None:
            living.discard(2)
            raise BAD

    try:
        result = park(Deadly({1: RUNNING, 2: RUNNING}))
    finally:
        living.add(2)
    assert (result.outcome, result.told) == ("lost", "process 2 died while locking")


def test_one_that_died_while_parked_is_lost() -> None:
    driver = ScriptedDriver({1: CHECKPOINTED})
    gone = Phases(driver).wake(ALL, [ONE, Process(9, 1)], {})
    assert (gone.outcome, gone.told) == ("lost", "process 9 ended while it was parked")
    other = Phases(driver).wake(ALL, [Process(1, 2)], {})
    assert other.outcome == "lost", "another process has the pid by now"
    forgotten = Phases(driver).wake(ALL, [ONE, TWO], {})
    assert (forgotten.outcome, forgotten.told) == ("lost", "process 2 was parked, and the driver knows it no more")
    assert not driver.calls


def test_another_process_with_the_pid_is_not_touched() -> None:
    driver = ScriptedDriver({1: RUNNING})
    assert Phases(driver).park([Process(1, 2)]).outcome == "untouched"
    assert not driver.calls


def test_a_pid_that_changes_hands_amid_a_phase_is_not_touched(living: set[int]) -> None:
    class Swift(ScriptedDriver):
        def lock(self, pid: int, seconds: float) -> None:
            super().lock(pid, seconds)
            living.discard(pid)

    driver = Swift({1: RUNNING})
    try:
        assert Phases(driver).park([ONE]).outcome == "lost"
    finally:
        living.add(1)
    assert driver.calls == ["lock 1"]


def test_a_pid_that_changes_hands_right_before_a_call_is_not_touched(living: set[int]) -> None:
    class Swift(ScriptedDriver):
        def state(self, pid: int) -> str | None:
            living.discard(pid)
            return super().state(pid)

    driver = Swift({1: RUNNING})
    try:
        result = Phases(driver).park([ONE])
    finally:
        living.add(1)
    assert (result.outcome, result.told) == ("lost", "process 1 died while locking")
    assert not driver.calls


@pytest.mark.parametrize("state", ["state 4", "state 5", "RESTORING"])
def test_states_that_nobody_knows_are_on_their_way(state: str) -> None:
    assert held([state, RUNNING]) == "Changing"
    driver = ScriptedDriver({1: state})
    assert (park(driver).outcome, wake(driver).outcome) == ("unsettled", "unsettled")
    assert not driver.calls


def test_a_driver_that_cannot_tell_how_it_ended_leaves_it_unsettled() -> None:
    driver = ScriptedDriver({1: RUNNING})
    driver.mute_after = 1
    result = park(driver)
    assert (result.outcome, result.told) == ("unsettled", "the driver says CUDA_ERROR_UNKNOWN")
    driver = ScriptedDriver({1: RUNNING})
    driver.mute_after = 0
    assert park(driver).outcome == "untouched" and not driver.calls


@pytest.mark.parametrize(
    ("devices", "whole"),
    [
        ({}, {}),
        ({"GPU-a": "GPU-a"}, {}),
        ({"GPU-a": "GPU-b", "GPU-b": "GPU-a"}, {"GPU-a": "GPU-b", "GPU-b": "GPU-a", "GPU-c": "GPU-c"}),
        ({"GPU-a": "GPU-b"}, {"GPU-a": "GPU-b", "GPU-b": "GPU-a", "GPU-c": "GPU-c"}),
        ({"GPU-a": "GPU-b", "GPU-b": "GPU-c"}, {"GPU-a": "GPU-b", "GPU-b": "GPU-c", "GPU-c": "GPU-a"}),
    ],
)
def test_a_map_names_every_gpu_once(devices: dict[str, str], whole: dict[str, str]) -> None:
    driver = ScriptedDriver({1: CHECKPOINTED})
    assert wake(driver, devices).outcome == "done"
    assert driver.maps == [whole]


@pytest.mark.parametrize("devices", [{"GPU-a": "GPU-z"}, {"GPU-z": "GPU-a"}, {"GPU-a": "GPU-c", "GPU-b": "GPU-c"}])
def test_a_map_that_the_driver_would_refuse_changes_nothing(devices: dict[str, str]) -> None:
    driver = ScriptedDriver({1: CHECKPOINTED})
    assert wake(driver, devices).outcome == "untouched"
    assert not driver.calls


@given(
    states=st.lists(st.sampled_from([RUNNING, LOCKED, CHECKPOINTED, FAILED, "state 4"]), min_size=1, max_size=3),
    fails=st.dictionaries(
        st.builds("{} {}".format, st.sampled_from(["lock", "checkpoint", "restore", "unlock"]), st.integers(1, 3)),
        st.tuples(
            st.sampled_from([RUNNING, LOCKED, CHECKPOINTED, FAILED, "state 4"]), st.sampled_from([BAD, TIME_OVER])
        ),
        max_size=3,
    ),
    cards=st.permutations(CARDS),
    parks=st.booleans(),
)
def test_however_a_driver_fails_what_is_told_is_so(
    states: list[str], fails: dict[str, tuple[str, DriverError]], cards: list[str], parks: bool
) -> None:
    driver = ScriptedDriver(dict(enumerate(states, 1)))
    driver.fails = fails
    result = park(driver) if parks else wake(driver, dict(zip(CARDS, cards, strict=True)))
    now = set(driver.states.values())
    match result.outcome:
        case "done":
            assert now == {CHECKPOINTED if parks else RUNNING}
        case "untouched":
            assert now == {RUNNING} or not driver.calls
        case "unsettled":
            assert FAILED not in now
        case "lost":
            assert result.told
    if parks:
        kinds = order(driver)
        assert kinds == [kind for kind in ("lock", "checkpoint", "restore", "unlock") if kind in kinds]
