"""Holds the page on seats against the models, the reasons and the limits that it tells."""

from __future__ import annotations

import re

from crds.gpuseatprofile import (
    MOST_GPUS,
    MOST_GROUPS,
    MOST_NAME,
    MOST_PROFILES,
    MOST_SEATS,
    GPUGroup,
    GPUSeatProfileSpec,
    SeatProfile,
)
from tests.docs.offered import literals
from tests.docs.pages import ROOT, read, rows

PAGE = ROOT / "docs" / "seats.md"


def fields(model: type[GPUSeatProfileSpec | SeatProfile | GPUGroup]) -> set[str]:
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
