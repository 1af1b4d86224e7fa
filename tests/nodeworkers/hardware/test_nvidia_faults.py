"""For how long an error of an NVIDIA GPU counts: as long as evidence says that the GPU is bad, and no longer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.hardware.nvidia_faults import (
    ACTIONS,
    APPLICATION_XIDS,
    DOUBLE_BIT_ECC,
    NO_ACTION,
    QUIET_SECONDS,
    SETTLED_SECONDS,
    XIDS,
    Faults,
    affects_all,
)
from tests.nodeworkers.hardware.nvidia_rig import Clock

RESET, REBOOT = 1, 2


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults(clock: Clock) -> Faults:
    return Faults(clock)


def reason(faults: Faults, card: str = "a") -> str:
    trouble = faults.trouble(card)
    return trouble.reason if trouble else ""


def test_the_table_says_what_happened_and_what_to_do() -> None:
    for number, xid in XIDS.items():
        assert re.fullmatch(r"[a-z].*[^.]", xid.says) and xid.do.endswith("."), number
    for name, sentence in ACTIONS.values():
        assert re.fullmatch(r"[A-Z][A-Za-z]+", name) and sentence.endswith(".")
    assert not APPLICATION_XIDS & XIDS.keys()
    assert {48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140} <= XIDS.keys()


def test_an_xid_of_the_whole_gpu_is_no_matter_of_an_instance() -> None:
    assert affects_all(48) and affects_all(79) and affects_all(DOUBLE_BIT_ECC)
    assert not affects_all(94) and not affects_all(4711)


@pytest.mark.parametrize(
    ("told", "seconds"), [(None, QUIET_SECONDS), (NO_ACTION, SETTLED_SECONDS)], ids=["old driver", "driver says none"]
)
def test_an_error_ends_after_a_quiet_time(faults: Faults, clock: Clock, told: int | None, seconds: float) -> None:
    faults.answered("a", told, 0)
    faults.reported("a", 119)
    clock.now += seconds - 1
    faults.answered("a", told, 0)
    faults.reported("a", 119)
    clock.now += seconds - 1
    faults.answered("a", told, 0)
    assert reason(faults) == "Xid119", "the time counts from the last report"
    clock.now += 1
    faults.answered("a", told, 0)
    assert reason(faults) == ""


def test_a_gpu_that_does_not_answer_is_not_well_because_time_passes(faults: Faults, clock: Clock) -> None:
    faults.answered("a", NO_ACTION, 0)
    faults.reported("a", 119)
    clock.now += 100_000
    assert reason(faults) == "Xid119"


def test_a_gpu_is_unwell_while_its_driver_asks_for_something(faults: Faults, clock: Clock) -> None:
    faults.answered("a", RESET, 0)
    assert reason(faults) == "ResetRequired"
    faults.reported("a", 62)
    clock.now += 100_000
    faults.answered("a", REBOOT, 0)
    trouble = faults.trouble("a")
    assert trouble is not None and trouble.reason == "Xid62" and trouble.sure
    assert trouble.message.endswith("The driver asks for a restart of the node. Drain it and restart it.")
    faults.answered("a", None, 0)
    assert reason(faults) == "Xid62", "a word not heard is not a word taken back"
    faults.answered("a", NO_ACTION, 0)
    assert reason(faults) == "", "it was reset"


def test_a_driver_that_asks_for_nothing_any_more_saw_a_reset(faults: Faults) -> None:
    faults.answered("a", NO_ACTION, 0)
    faults.reported("a", 79)
    faults.answered("a", NO_ACTION, 0)
    assert reason(faults) == "Xid79", "it may not have asked yet"
    faults.answered("a", REBOOT, 0)
    faults.answered("a", NO_ACTION, 0)
    assert reason(faults) == "", "at once"


def test_an_action_that_nobody_knows_counts(faults: Faults) -> None:
    faults.answered("a", 4711, 0)
    assert reason(faults) == "RecoveryRequired"


@pytest.mark.parametrize("told", [None, NO_ACTION])
def test_one_that_fell_off_the_bus_is_back_only_after_a_reset(faults: Faults, clock: Clock, told: int | None) -> None:
    faults.answered("a", told, 5)
    faults.reported("a", 79)
    clock.now += 100_000
    faults.answered("a", told, 5)
    assert reason(faults) == "Xid79"
    faults.lost("a")
    assert reason(faults) == "Xid79"
    faults.answered("a", told, 5)
    assert reason(faults) == ""


def test_one_that_left_the_node_comes_back_well(faults: Faults) -> None:
    faults.answered("a", None, 0)
    faults.reported("a", 79)
    faults.reported("b", 79)
    faults.listed(["b"])
    faults.listed(["a", "b"])
    faults.answered("a", None, 0)
    assert (reason(faults, "a"), reason(faults, "b")) == ("", "Xid79")


def test_ecc_counters_tell_of_errors_and_of_resets(faults: Faults) -> None:
    faults.answered("a", None, 3)
    assert reason(faults) == "", "they may be older than this process, and reset since"
    faults.answered("a", None, 4)
    assert reason(faults) == "DoubleBitEcc"
    faults.answered("a", None, None)
    faults.answered("a", None, 4)
    assert reason(faults) == "DoubleBitEcc"
    faults.answered("a", None, 0)
    assert reason(faults) == ""


def test_the_weightiest_error_is_named(faults: Faults, clock: Clock) -> None:
    faults.reported("a", 79)
    for xid in (4711, 48, 62, 94):
        clock.now += 1
        faults.reported("a", xid)
    assert reason(faults) == "Xid79"
    faults.reported("b", 48)
    clock.now += 1
    faults.reported("b", 62)
    faults.reported("b", 4711)
    assert reason(faults, "b") == "Xid62", "the last of those that weigh the same"


def test_an_unknown_error_must_be_seen_again(faults: Faults) -> None:
    faults.reported("a", 4711)
    trouble = faults.trouble("a")
    assert trouble is not None and not trouble.sure and "NVIDIA's Xid catalog" in trouble.message


def test_what_is_only_told_ends_as_well(faults: Faults, clock: Clock) -> None:
    faults.answered("a", NO_ACTION, 0)
    faults.reported("a", 63)
    faults.reported("a", 92)
    assert faults.told("a").startswith("XID 63: ") and " XID 92: " in faults.told("a") and reason(faults) == ""
    clock.now += SETTLED_SECONDS
    faults.answered("a", NO_ACTION, 0)
    assert faults.told("a") == "" == faults.told("nobody")


STEPS = st.one_of(
    st.tuples(st.just("reported"), st.sampled_from([0, 13, 48, 63, 79, 94, 119, 4711])),
    st.tuples(st.just("answered"), st.sampled_from([None, 0, 1, 2, 99]), st.sampled_from([None, 0, 1, 7])),
    st.tuples(st.just("lost")),
    st.tuples(st.just("passes"), st.sampled_from([1.0, 59.0, 600.0])),
)


@given(st.lists(STEPS, max_size=40))
def test_whatever_happened_a_gpu_that_is_reset_and_quiet_is_well(steps: list[tuple[str, ...]]) -> None:
    clock = Clock()
    faults = Faults(clock)
    for name, *arguments in steps:
        if name == "passes":
            clock.now += float(arguments[0])
        else:
            getattr(faults, name)("a", *arguments)
        trouble = faults.trouble("a")
        assert trouble is None or (trouble.message.endswith(".") and re.fullmatch(r"[A-Z][A-Za-z0-9]+", trouble.reason))
    faults.lost("a")
    faults.answered("a", NO_ACTION, 0)
    assert faults.trouble("a") is None and faults.told("a") == ""
