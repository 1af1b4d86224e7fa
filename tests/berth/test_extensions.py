"""Strategies of other packages: found by their entry points, and nobody else's problem where they are broken."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from berth import extensions
from berth.extensions import Candidate, Rank, Request, load_strategies
from planning import strategies
from planning.capacity import Room
from planning.filters import Shape
from planning.fleet import Fleet
from planning.model import Resources
from tests.planning.builders import GIB, node, placed, round_of, snapshot, workload


class Broken:
    """Ranks as its class attribute says."""

    name = "broken"
    steady = True
    answer: Any = None

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]  # what is no rank is what is tried


class Nameless:
    name = "Has Blanks"

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        return (0,)


class Rankless:
    name = "rankless"


class Taken(Broken):
    name = "fgd"


class Exploding:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points that are found; what they install is gone after the test."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(extensions, "entry_points", lambda group: EntryPoints(points).select(group=group))
    monkeypatch.setattr(strategies, "_INSTALLED", dict(strategies._INSTALLED))
    return points


def point(name: str) -> EntryPoint:
    return EntryPoint(name.lower(), f"{__name__}:{name}", "berth.strategies")


def test_the_one_of_the_docs_is_installed_and_places(
    offered: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "example_strategies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    offered.append(EntryPoint("quietest", "example_strategies:Quietest", "berth.strategies"))
    assert load_strategies() == []
    nodes = [
        node(name, labels={"example.com/noise-db": noise}) for name, noise in (("a", "70"), ("b", "35"), ("c", ""))
    ]
    decision = round_of(snapshot(nodes, [workload("w", spec={"schedulingStrategy": "quietest"})]))
    assert placed(decision) == {"w": "b"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Nameless", "its name is 'Has Blanks'"),
        ("Rankless", "it has no method rank"),
        ("Taken", "the name 'fgd' is taken"),
        ("Exploding", "cannot be loaded: RuntimeError: no licence"),
        ("Missing", "cannot be loaded: AttributeError"),
    ],
)
def test_what_cannot_be_had_is_told_and_left_out(
    offered: list[EntryPoint], name: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    offered += [point(name), point("Broken")]
    before = strategies.installed()
    (wrong,) = load_strategies()
    assert f"placement strategy '{name.lower()}'" in wrong and told in wrong and wrong in caplog.text
    assert set(strategies.installed()) == {*before, "broken"}


@pytest.mark.parametrize(
    "answer", [ValueError("x" * 5000), None, (), [1], ("a",), (float("nan"),), (1, None)], ids=lambda a: repr(a)[:20]
)
def test_one_that_fails_holds_up_nobody_and_says_what_it_did(
    offered: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    offered.append(point("Broken"))
    load_strategies()
    monkeypatch.setattr(Broken, "answer", answer)
    wishes = [workload("bad", spec={"schedulingStrategy": "broken"}), workload("good")]
    decision = round_of(snapshot([node("n")], wishes))
    assert placed(decision) == {"good": "n"}
    (waits,) = decision.waiting
    assert (waits.uid, waits.reason) == ("bad", "StrategyFailed")
    assert "'broken'" in waits.message and "node n" in waits.message and len(waits.message) < 500
    monkeypatch.setattr(Broken, "answer", (0,))
    assert placed(round_of(snapshot([node("n")], wishes))) == {"good": "n", "bad": "n"}


def test_ranks_of_another_length_are_refused_and_the_fleet_still_answers(
    offered: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered.append(point("Broken"))
    load_strategies()
    found = strategies.informed("broken", tuple)
    fleet, need = Fleet((node(name), Room(8, 64_000, 256 * GIB, 110)) for name in "ab"), Resources(1)
    monkeypatch.setattr(Broken, "answer", (1.5, True))
    asked = Request("u", "ns", "w", need)
    place = fleet.find(asked, Shape(need), found)
    assert place is not None
    fleet.take(place, need)
    monkeypatch.setattr(Broken, "answer", (1,))
    with pytest.raises(strategies.StrategyError, match="always as many"):
        fleet.find(asked, Shape(need), found)
    monkeypatch.setattr(Broken, "answer", (1.5, False))
    assert fleet.find(asked, Shape(need), found) is not None
