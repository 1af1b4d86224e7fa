"""Holds the section on the seat proxy against the program's sources."""

from __future__ import annotations

import re

from nodeworkers.seats.proxy_words import Route, State
from tests.docs.pages import ROOT, read, rows

PAGE = ROOT / "docs" / "seats.md"
SOURCES = ROOT / "native" / "seat-proxy" / "src"
STATUS = {
    "BAD_GATEWAY": "502",
    "GATEWAY_TIMEOUT": "504",
    "FORBIDDEN": "403",
    "METHOD_NOT_ALLOWED": "405",
    "SERVICE_UNAVAILABLE": "503",
    "*status": "in a stream",
}


def test_every_refusal_is_told_with_its_status() -> None:
    source = (SOURCES / "refusals.rs").read_text()
    codes = dict(re.findall(r'Reason::(\w+)(?:\(.*?\))? => "(\w+)"', source))
    statuses = dict(re.findall(r"Reason::(\w+)(?:\(.*?\))? => (?:StatusCode::)?([A-Z_]+|\*status),", source))
    expected = {code: STATUS[statuses.get(reason, "SERVICE_UNAVAILABLE")] for reason, code in codes.items()}
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", read(PAGE).partition("### What clients")[2], re.MULTILINE))
    assert {code: told.get(code) for code in expected} == expected
    assert set(told) - set(expected) == {"seat_connections_full"}, "it is written without the others"
    assert "seat_connections_full" in source


def test_every_state_is_told() -> None:
    assert set(rows(PAGE, "The seat proxy")) >= {state.value for state in State}


def test_its_limits_are_the_programs() -> None:
    text = " ".join(read(PAGE).split())
    for file, constant, told in (
        ("listen.rs", "HEAD: usize = 64 * 1024;", "at most 64 KiB"),
        ("listen.rs", "IDLE: Duration = Duration::from_secs(75);", "within 75 s"),
        ("forward.rs", "HELD_BODY: usize = 256 * 1024;", "256 KiB of the body"),
        ("forward.rs", "QUIET: Duration = Duration::from_secs(5);", "which has 5 s for it"),
        ("main.rs", "GRACE: f64 = 25.0;", "`seat-proxy --grace` (25 s)"),
    ):
        assert constant in (SOURCES / file).read_text() and told in text, told
    for quiet in Route("s", 1, "", None, State.AWAY, 0, 0).quiet:
        assert f"`{quiet.path}`" in text
