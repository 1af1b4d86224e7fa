"""Holds the page on seats against the models, the reasons and the limits that it tells."""

from __future__ import annotations

import re
from typing import get_args

from crds.gpuseatgroup import GPUSeatGroupStatus
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
from nodeworkers.seats.records import PORTS
from nodeworkers.seats.reporting import REFRESH
from planning.seats import pod_settings, rules
from planning.seats.events import OFTEN, QUIET
from planning.seats.orders import GroupPhase
from planning.seats.pod_settings import PodSettings
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


def test_what_a_group_shows_is_all_told() -> None:
    table = read(PAGE).split("## What is shown")[1].split("### Events of seats")[0]
    shown = {str(field.alias) for field in GPUSeatGroupStatus.model_fields.values()} - {"reason"}
    assert {name for name in shown if f"`{name}`" not in table} == set()
    phases = {*get_args(GroupPhase)}
    assert {phase for phase in phases if f"`{phase}`" not in table} == set()
    said = literals([ROOT / "planning" / "seats" / "status.py"], r"(Quarantined|ProxyAway|Serving|Empty|Switching)")
    assert {reason for reason in said if f"`{reason}`" not in table} == set()


def test_every_event_of_seats_is_told() -> None:
    given = literals([ROOT / "planning" / "seats" / "events.py"], r"(Seat|Trial)[A-Z]\w+")
    table = read(PAGE).split("### Events of seats")[1].split("###")[0]
    assert set(re.findall(r"`((?:Seat|Trial)\w+)`", table)) == given


def test_times_of_what_is_shown_are_the_codes() -> None:
    text = read(PAGE)
    assert f"one more for each {REFRESH:.0f} s" in text and (QUIET, OFTEN) == (60.0, 300.0)


def test_what_a_quarantine_says_is_what_the_runbook_has() -> None:
    table = read(PAGE).split("### A group that is quarantined")[1].split("Metrics are in")[0]
    quoted = re.findall(r"“(.+?)”", table)
    pages = ("nodeworkers/seats/switching.py", "planning/seats/room.py")
    code = "".join((ROOT / page).read_text() for page in pages)
    assert len(quoted) >= 4 and [words for words in quoted if words not in " ".join(code.split())] == []


def test_what_a_pod_says_of_its_server() -> None:
    told = rows(PAGE, "What a pod says")
    words = {value for value in vars(pod_settings).values() if isinstance(value, str) and value.startswith("kyb.ai/")}
    assert set(told) == words
    usual = PodSettings()
    left_out = {key: cells[-1] for key, cells in told.items()}
    assert left_out[pod_settings.DEADLINE] == f"{usual.deadline:.0f}"
    assert left_out[pod_settings.QUEUE] == str(usual.queue)
    assert left_out[pod_settings.DRAIN] == f"{usual.drain:.0f}"
    assert left_out[pod_settings.HEALTH] == f"`{usual.health}`"
    assert (left_out[pod_settings.PRIORITY], left_out[pod_settings.WEIGHT]) == ("0", "1")


def test_the_ports_of_seats() -> None:
    assert f"{PORTS[0]} to {PORTS[-1]}" in PAGE.read_text()
