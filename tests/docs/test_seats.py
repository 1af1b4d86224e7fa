"""Holds the page on seats against the models, the reasons and the limits that it tells."""

from __future__ import annotations

import re

from crds.gpuseatprofile import (
    LOST_PERCENT,
    MOST_GPUS,
    MOST_GROUPS,
    MOST_NAME,
    MOST_POLICY_WINDOW,
    MOST_PROFILES,
    MOST_SEATS,
    MOST_WINDOWS,
    POLICY_WINDOW,
    GPUGroup,
    GPUSeatProfileSpec,
    SeatHours,
    SeatPolicy,
    SeatProfile,
)
from planning.seats import rules
from tests.docs.offered import literals
from tests.docs.pages import ROOT, read, rows

PAGE = ROOT / "docs" / "seats.md"


def fields(model: type[GPUSeatProfileSpec | SeatProfile | GPUGroup | SeatPolicy | SeatHours]) -> set[str]:
    return {str(field.alias) for field in model.model_fields.values()}


def test_what_a_profile_says_is_all_told() -> None:
    section = re.split(r"^## ", read(PAGE), flags=re.MULTILINE)[1]
    named = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert named == fields(GPUSeatProfileSpec) | fields(SeatProfile)
    assert all(f"`{each}`" in section for each in fields(GPUGroup))


def test_its_limits_are_the_models() -> None:
    text = read(PAGE)
    for told in (
        f"one entry for each size of groups (1–{MOST_PROFILES})",
        f"which GPUs belong together (1–{MOST_GROUPS})",
        f"serves it (1–{MOST_GPUS})",
        f"on each of these groups (1–{MOST_SEATS})",
        f"(at most {MOST_NAME})",
    ):
        assert told in text


def test_every_reason_is_told() -> None:
    given = literals([ROOT / "planning" / "devices" / "seat_status.py"], r"[A-Z][a-z]+([A-Z][a-z]+)*")
    assert set(rows(PAGE, "Looking")) == given - {"Ready", "Error", "NothingRefused"}


def test_what_a_policy_says_and_every_rule_is_told() -> None:
    section = next(
        part for part in re.split(r"^## ", read(PAGE), flags=re.MULTILINE) if part.startswith("Who is active")
    )
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == fields(SeatPolicy) | set(rules.installed())
    assert all(f"`{each}`" in section for each in fields(SeatHours))
    for told in (
        f"(1–50) | {LOST_PERCENT} |",
        f"(60–{MOST_POLICY_WINDOW}) | {POLICY_WINDOW} |",
        f"up to {MOST_WINDOWS} windows",
    ):
        assert told in section
    by_command = next(each for each in read(PAGE).splitlines() if each.startswith("onDemand "))
    assert "/" in by_command, "what the command prints is shown"
