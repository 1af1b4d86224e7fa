"""docs/seats-moving.md tells of moves what the code does."""

from __future__ import annotations

import re

from crds import seatmigration
from crds.seatmigration import DEADLINE, LEAST_DEADLINE, MOST_DEADLINE, SeatMigrationSpec
from planning.seats import rebalancing
from tests.docs.offered import literals
from tests.docs.pages import ROOT, read

PAGE = ROOT / "docs" / "seats-moving.md"
CODE = ("planning/seats/migration.py", "activities/migrations.py", "workflows/seat_migration.py")
NO_REASONS = {"Starting", "Serves", "Completed", "Switching", "RolledBack", "RollingBack"}


def test_what_a_migration_says_is_all_told() -> None:
    text = read(PAGE)
    for name in {str(field.alias or name) for name, field in SeatMigrationSpec.model_fields.items()}:
        assert f"`{name}`" in text, name
    assert f"({LEAST_DEADLINE}–{MOST_DEADLINE}) | {DEADLINE} |" in text


def test_every_phase_and_every_reason_is_told_and_no_other() -> None:
    text = read(PAGE)
    phases = {"Starting", "Switching", *seatmigration.ENDED, "RollingBack"}
    assert {each for each in phases if f"`{each}`" not in text} == set()
    given = set[str]()
    for page in CODE:
        code = (ROOT / page).read_text()
        given |= set(re.findall(r"Refusal\(\s*\"(\w+)\"", code))
        given |= set(re.findall(r"Progress\(\s*\"failed\", \"(\w+)\"", code))
        given |= set(re.findall(r"(?:Ended|Started)\(.*?, \"(\w+)\"\)", code))
        given |= set(re.findall(r"\"(Cancelled|Failed)\"", code)) if "workflows" in page else set()
    table = text.split("| reason | why |")[1].split("If `berth node`")[0]
    told = set(re.findall(r"`([A-Z][A-Za-z]+)`", table)) - {"SeatMigration", "Deployment"}
    assert told == given - NO_REASONS, told ^ (given - NO_REASONS)


def test_hysteresis_is_as_told() -> None:
    text = read(PAGE)
    assert rebalancing.STANDS == 1 / 12 and "a twelfth of the window (5 minutes)" in text
    assert rebalancing.REST == 1 / 2 and "left alone for half of it" in text
    assert f"at least {100 * rebalancing.WORTH:.0f} points" in text
    assert f"above {100 * rebalancing.CROWDED:.0f} %" in text


def test_events_of_moves_are_told() -> None:
    given = literals([ROOT / "activities" / "rebalancing.py"], r"SeatMove[A-Z]\w+")
    assert {each for each in given if f"`{each}`" not in read(PAGE)} == set()
