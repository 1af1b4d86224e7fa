"""`berth simulate seats` as a person runs it: drawn requests, a trace of one's own, a profile, and broken files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from berth.cli import command_line
from berth.simulate_seats.traces import KINDS, Drawn, draw, read_trace, seats_of
from stack.errors import StackError

TRACE = "time,model,seconds\n0,chat,5\n30,code,5\n32,code,1\n31,chat,2\n900,embed,1\n"
SCHEDULED = """
apiVersion: kyb.ai/v1alpha1
kind: GPUSeatProfile
metadata: {name: pairs}
spec:
  profiles:
    - name: pair
      resource: kyb.ai/gpu-2x-seat
      groupSize: 2
      seatsPerGroup: 4
      policy:
        type: schedule
        lostPercent: 20
        schedule:
          - {seats: [embed], days: [Mon], start: "00:10", end: "01:00"}
"""


def simulate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line(), ["simulate", "seats", *arguments], terminal_width=200)
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(TRACE.encode()))
    return str(path)


def test_it_shows_tables_and_writes_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = simulate("--requests", "300", "--json", str(out))
    assert code == 0, text
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["simulated"] and list(report["policies"]) == ["onDemand", "priority", "fair"]
    for figures in report["policies"].values():
        assert figures["answered_requests"] + figures["refused_requests"] == 300
        assert sum(each["answered_requests"] for each in figures["seats"].values()) == figures["answered_requests"]
        assert sum(each["slot_percent"] for each in figures["seats"].values()) + figures["lost_percent"] <= 100.1
        assert 0 < figures["p50_seconds"] <= figures["p99_seconds"] <= 300
    assert text.startswith("simulated: 300 requests (drawn: poisson") and "who had the slot   A model-1" in text
    assert all(len(line) <= 80 for line in text.splitlines()[1:] if not line.startswith("who had")), text


def test_a_trace_of_ones_own(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--trace", trace, "--park", "3", "--wake", "2", "--policy", "onDemand", "--json", str(out))
    code, text = simulate(*arguments)
    assert code == 0, text
    (figures,) = json.loads(out.read_text())["policies"].values()
    assert figures["switches"] == 4 and figures["refused_requests"] == 0
    assert figures["seats"]["chat"]["answered_requests"] == 2 and figures["seats"]["embed"]["p50_seconds"] == 5.0


def test_a_profile_gives_hours_and_the_share_that_may_be_lost(trace: str, tmp_path: Path) -> None:
    profile, out = tmp_path / "profile.yaml", tmp_path / "out.json"
    profile.write_text(SCHEDULED)
    code, text = simulate("--trace", trace, "--profile", str(profile), "--json", str(out))
    assert code == 0 and "20 % of the time" in text, text
    found = json.loads(out.read_text())["policies"]
    assert list(found) == ["onDemand", "priority", "fair", "schedule"]
    assert found["schedule"]["seats"]["embed"]["p50_seconds"] == 0, "awake before it was asked"
    assert found["onDemand"]["seats"]["embed"]["p50_seconds"] > 0


def test_seats_are_described(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    described = ("--seat", "chat,priority=5,weight=2,park=1,wake=0.5", "--seat", "nightly,batch")
    code, text = simulate("--trace", trace, *described, "--json", str(out))
    assert code == 0, text
    seats = {each["name"]: each for each in json.loads(out.read_text())["seats"]}
    assert seats["chat"]["priority"] == 5 and seats["chat"]["wake_seconds"] == 0.5
    assert seats["nightly"]["batch"] and seats["code"] == seats["embed"] | {"name": "code"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kind", "weekly"), "is none of poisson, bursts, day"),
        (("--rate", "0"), "is not above 0"),
        (("--rate", "nan"), "is not above 0"),
        (("--deadline", "-1"), "is not above 0"),
        (("--policy", "fastest"), "'fastest' is none of onDemand, priority, fair, schedule"),
        (("--policy", "schedule"), "schedule needs --profile"),
        (("--seat", "other"), "'other' is asked for by no request"),
        (("--seat", "model-1,weight=0"), "'weight=0' of 'model-1' is none of priority=N"),
        (("--seat", "model-1,wake=soon"), "'wake=soon' of 'model-1' is none of"),
        (("--seat", "model-1", "--seat", "model-1"), "described twice"),
        (("--json", "/no/such/folder/x.json"), "cannot be written"),
        (("--profile", "/no/such/file"), "does not exist"),
    ],
)
def test_what_is_wrong_with_the_line_is_told(arguments: tuple[str, ...], told: str) -> None:
    code, text = simulate("--requests", "10", *arguments)
    assert code != 0 and told in " ".join(text.replace("│", " ").split()), text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "has no column time"),
        ("time,seconds\n", "has no column seat"),
        ("time,seat,seconds\n", "has no rows"),
        ("time,seat,seconds\n1,a,2\n1,,2\n", "line 3: seat is empty"),
        ("time,seat,seconds\nsoon,a,2\n", "line 2: time is 'soon', not a number of seconds"),
        ("time,seat,seconds\n1,a,-2\n", "line 2: seconds is -2, not from 0"),
        ("time,seat,seconds\n1,a,nan\n", "line 2: seconds is nan"),
        ("time,seat,seconds\n1,a,2,3\n", "line 2: it has more values than the 3 columns"),
        ("time,seat,seconds\n1,a\n", "line 2: seconds is '', not a number"),
        ("time,seat,seconds\n" + "".join(f"1,s{n},1\n" for n in range(65)), "line 66: seat is the 65th different one"),
    ],
)
def test_what_is_wrong_with_a_trace_is_told_with_its_place(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    code, text = simulate("--trace", str(path))
    assert code == 1 and told in " ".join(text.split()) and "Traceback" not in text, text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a: [", "is no YAML"),
        ("[]", "is no GPUSeatProfile"),
        (SCHEDULED.replace("lostPercent: 20", "lostPercent: 90"), "must be at most 50"),
        (SCHEDULED.replace("kyb.ai/v1alpha1", "v1"), "Its apiVersion must be"),
    ],
)
def test_what_is_wrong_with_a_profile_is_told(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(content)
    code, text = simulate("--requests", "10", "--profile", str(path))
    assert code == 1 and told in " ".join(text.split()) and "Traceback" not in text, text


@given(st.binary(max_size=200))
def test_no_file_makes_it_crash(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzzed") / "trace.csv"
    path.write_bytes(data)
    with pytest.raises(StackError):
        read_trace(path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_comes_as_often_as_was_said_and_the_same_for_a_seed(kind: str) -> None:
    drawn = Drawn(kind, models=3, requests=43_200, rate=0.5, seconds=4.0, seed=7)
    trace = draw(drawn)
    assert trace == draw(drawn)
    times = [at for at, _, _ in trace.requests]
    assert times == sorted(times) and len(times) == 43_200
    assert times[-1] == pytest.approx(86_400, rel=0.1)
    assert sum(seconds for _, _, seconds in trace.requests) / 43_200 == pytest.approx(4, rel=0.05)
    counts = [sum(number == each for _, number, _ in trace.requests) for each in range(3)]
    assert counts == sorted(counts, reverse=True) and min(counts) > 1000
    assert len(seats_of(trace, (), 1.0, 1.0)) == 3


def test_placement_is_still_simulated_without_a_name() -> None:
    result = CliRunner().invoke(command_line(), ["simulate", "--pods", "x"], terminal_width=200)
    assert result.exit_code == 2 and "--nodes" in result.output
