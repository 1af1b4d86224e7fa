"""Holds the pages on reservations, profiles, autoscaling and architecture against what they list."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

from crds.gpumodelprofile import GPUModelProfileStatus
from crds.gpureservation import GPUReservationSpec
from crds.gpureservation import Phase as ReservationPhase
from crds.gpuworkload_status import Recommendation
from planning.model import Ledger
from tests.docs.offered import literals
from tests.docs.pages import OPERATIONS, ROOT, read, rows


def test_what_a_reservation_says_is_all_told() -> None:
    page = ROOT / "docs" / "reservations.md"
    told = {name for cell in rows(page, "The spec") for name in re.split(r"`, `", cell)}
    assert told == {field.alias for field in GPUReservationSpec.model_fields.values()}
    assert set(rows(page, "Looking")) == set(get_args(ReservationPhase))


PROFILES = ROOT / "docs" / "profiles.md"


def test_what_a_profile_and_a_recommendation_say_is_all_told() -> None:
    told = {name for cell in rows(PROFILES, "GPUModelProfile") for name in re.split(r"`, `", cell)}
    assert told == {field.alias for field in GPUModelProfileStatus.model_fields.values()}
    recommended = {field.alias for field in Recommendation.model_fields.values()}
    assert set(rows(PROFILES, "What is recommended")) == recommended


AUTOSCALING = ROOT / "docs" / "autoscaling.md"


def said(module: str) -> set[str]:
    """The CamelCase words of two or more parts, and `Failed` and `Refused`, that a module has as literals."""
    return literals([ROOT / module], r"[A-Z][a-z]+([A-Z][a-z]+)+|Failed|Refused")


def test_every_end_of_an_order_and_every_event_of_it_is_told() -> None:
    text = read(AUTOSCALING)
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    told = next(part for part in section if part.startswith("What happens then"))
    tables = re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE)
    kinds = {"ProvisioningRequest", "PodTemplate", "GPUWorkload"}
    given = (said("planning/requests.py") | said("activities/provisioning.py")) - kinds
    assert given == set(tables)
    events = next(part for part in re.split(r"^## ", read(OPERATIONS), flags=re.MULTILINE) if part.startswith("Events"))
    for event in said("activities/provisioning.py") - kinds - said("planning/requests.py") - {"Refused"}:
        assert f"`{event}`" in events, event


def test_the_ledgers_parts_are_all_there() -> None:
    table = rows(ROOT / "docs" / "architecture.md", "What the ledger remembers")
    assert set(table) == {field.name for field in dataclasses.fields(Ledger)}
