"""What each driver can do, as it was published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.seats.checkpoint_capability import SIMULATED, Capability, capability


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ("535.183.01", "Driver 535.183.01 cannot checkpoint processes at all: parking needs 570 or later."),
        ("550.54.14", "can only toggle a process"),
        ("555.42.02", "locks without a limit of time"),
        ("565.57.01", "locks without a limit of time"),
        ("", "calls itself '', which is no version"),
        ("580", "no version"),
        ("580.65.06; rm -rf /", "no version"),
        ("5" * 5000, "no version"),
    ],
)
def test_what_cannot_park_says_why(driver: str, why: str) -> None:
    found = capability(driver)
    assert not found.parks and not found.moves
    assert [why in each for each in found.missing] == [True]
    assert len(found.missing[0]) < 200


@pytest.mark.parametrize(
    ("driver", "moves"),
    [("570.86.15", False), ("575.51.03", False), ("580.65.06", True), ("590.44.01", True), ("610.57.04", True),
     ("700.01", True), (SIMULATED, True)],
)  # fmt: skip
def test_what_parks(driver: str, moves: bool) -> None:
    found = capability(driver)
    assert found.parks and found.moves == moves
    assert bool(found.warnings) == (not moves)


def test_what_is_warned_of() -> None:
    assert "on the GPUs that it left" in capability("570.86.15").warnings[0]
    assert ["NCCL" in each for each in capability("610.57.04", gpus=2).warnings] == [True]
    assert len(capability("580.65.06", gpus=2).warnings) == 2
    assert capability(SIMULATED, gpus=2) == Capability(moves=True)


def test_mig_mps_and_arm() -> None:
    found = capability("580.65.06", "aarch64", mig=True, mps=True)
    assert not found.parks
    assert [word in each for word, each in zip(("ARM", "MIG", "MPS"), found.missing, strict=True)] == [True] * 3
    assert capability("595.10.01", "aarch64").parks


@given(st.text(max_size=60), st.text(max_size=10), st.integers(0, 16), st.booleans(), st.booleans())
def test_no_version_breaks_it(driver: str, machine: str, gpus: int, mig: bool, mps: bool) -> None:
    found = capability(driver, machine, gpus, mig, mps)
    assert found.parks == (not found.missing)
    assert all(each.endswith(".") for each in (*found.missing, *found.warnings))
