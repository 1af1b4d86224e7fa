"""What a node can park with: each thing that does not hold says what follows from it."""

from __future__ import annotations

from dataclasses import replace as with_

from hypothesis import given
from hypothesis import strategies as st

from crds.gpuseatgroup import MOST_CHECKS
from planning.seats.preflight import Found, checks, missing

GOOD = Found("580.65.06", gpus=1, huge_pages="madvise", memory=2**40, device_memory=2**36, seats=4, numa=(0,))


def ok(found: Found) -> dict[str, bool]:
    return {each.name: each.ok for each in checks(found)}


def test_a_good_node() -> None:
    assert all(ok(GOOD).values()) and not missing(GOOD)


def test_what_does_not_hold_is_told() -> None:
    assert not ok(with_(GOOD, driver="550.54.14"))["CudaCheckpoint"] and missing(with_(GOOD, driver="550.54.14"))
    assert not ok(with_(GOOD, mps=True))["CudaCheckpoint"]
    assert not ok(with_(GOOD, huge_pages="never"))["HugePages"]
    assert not ok(with_(GOOD, memory=2**37))["HostMemory"], "three parked seats of 64 GiB do not fit into 128"
    assert not ok(with_(GOOD, swap=2**30))["Swap"]
    assert not ok(with_(GOOD, numa=(0, 1)))["Numa"]


def test_a_driver_that_could_not_be_asked_disables_nothing() -> None:
    assert not missing(Found()) and ok(Found())["CudaCheckpoint"]
    away = with_(GOOD, driver="", trouble="No helper can be begun.")
    assert not ok(away)["CudaCheckpoint"] and not missing(away), "nobody is ended for it"


DRIVERS = st.sampled_from(["", "simulated", "610.1.2", "580.65.06"]) | st.text(max_size=9)


@given(st.builds(Found, driver=DRIVERS))
def test_names_are_keys_and_there_is_a_sentence_for_each(found: Found) -> None:
    told = checks(found)
    assert len({each.name for each in told}) == len(told) <= MOST_CHECKS
    assert all(each.told.endswith(".") for each in told)
