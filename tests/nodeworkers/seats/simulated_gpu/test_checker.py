"""The witness sees what must not be, whatever else stands in the log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.seats.simulated_gpu.checker import check


def line(op: str, server: str, **facts: object) -> str:
    return json.dumps({"time": 1.0, "op": op, "server": server, "id": f"id-{server}", "pid": 1, **facts})


def on(op: str, server: str, card: str = "a") -> str:
    return line(op, server, card=card, bytes=5)


GOOD = [
    line("began", "one", started=3),
    on("alloc", "one"),
    line("filled", "one", card="a", sum=9),
    line("lock", "one"),
    on("checkpoint", "one"),
    on("alloc", "two"),
    on("sleep", "two"),
    on("restore", "one", "b"),
    line("checked", "one", card="b", sum=9),
    on("wake", "two"),
    line("buried", "", id="id-two", card="a", bytes=5),
    on("alloc", "three"),
    on("alloc", "foreign:four"),
    line("restore-failed", "one", why="by a fault", fault=True),
]


def test_turns_are_taken() -> None:
    verdict = check(GOOD)
    assert verdict.wrong == []
    assert (verdict.checkpoints, verdict.restores, verdict.bytes) == (2, 2, 30)
    assert verdict.servers == {"one", "two", "three", "foreign:four"}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([on("alloc", "one"), on("alloc", "two")], "two got 5 bytes of a, where one (id-one) had 5"),
        ([on("alloc", "one"), on("restore", "two")], "two got 5 bytes of a, where one"),
        ([on("alloc", "one"), on("sleep", "one", "b"), on("wake", "two")], "two got 5 bytes of a"),
        ([line("restore-failed", "one", why="no room", fault=False)], "one was restored without room: no room"),
        ([line("filled", "one", card="a", sum=9), line("checked", "one", card="a", sum=8)], "other memory back on a"),
        ([line("checked", "one", card="a", sum=8)], "other memory back on a"),
        (["no json"], "line 1 makes no sense"),
        (["7"], "line 1 makes no sense"),
        ([line("alloc", "one")], "line 1 makes no sense"),
    ],
)
def test_what_is_wrong_is_told(lines: list[str], why: str) -> None:
    verdict = check(lines)
    assert [why in each for each in verdict.wrong] == [True]


@given(st.integers(0, len(GOOD)), st.text() | st.sampled_from(["null", "[]", '{"op": []}', '{"op": "alloc"}']))
def test_lines_that_make_no_sense_hide_nothing(at: int, junk: str) -> None:
    bad = [on("alloc", "five", "c"), on("alloc", "six", "c")]
    verdict = check([*GOOD[:at], junk, *GOOD[at:], *bad])
    assert len(verdict.wrong) == 2 and "six got" in verdict.wrong[-1]


def test_by_itself(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("\n".join([on("alloc", "one"), on("alloc", "two")]))
    command = [sys.executable, "-m", "nodeworkers.seats.simulated_gpu.checker"]
    found = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "two got 5 bytes" in found.stdout
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
