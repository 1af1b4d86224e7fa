"""Holds the rooms to what is promised of every module, and README.md against the rooms and the demo."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOMS, ROOT, named, read

MODULES = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py") if file.stat().st_size)


@pytest.mark.parametrize("module", MODULES, ids=named)
def test_a_module_says_what_it_is_and_stays_readable(module: Path) -> None:
    text = module.read_text()
    assert len(text.splitlines()) <= 500, "more than 500 lines: split it"
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(docstring.split()) >= 3, "a module opens with what it decides or does, and for whom"


def test_the_readme_shows_every_room() -> None:
    shown = set(re.findall(r"^\| \[`(\w+)/`\]", read(ROOT / "README.md"), re.MULTILINE))
    rooms = {room for room in ROOMS if any((ROOT / room).glob("*.py"))}
    assert rooms <= shown


def test_the_readmes_figures_of_the_demo_are_the_cuts() -> None:
    from berth.cli.demo_command import demo
    from berth.demo.cut import FAILS_AFTER, RunTimes, make_cut
    from berth.demo.report import simulation
    from berth.demo.trace import load

    cut, text = make_cut(load()), " ".join(read(ROOT / "README.md").split())
    assert f"creates {len(cut.nodes)} simulated nodes with {cut.gpus:,} GPUs" in text
    assert f"applies {len(cut.runs):,} GPUWorkloads" in text
    assert f"They want {cut.gpus_wanted:,} GPUs" in text
    options = inspect.signature(demo).parameters
    times = RunTimes(options["shortest"].default, options["longest"].default)
    assert times == RunTimes(), "make_cut's are those of the command"
    assert f"scale of {times.shortest:g} to {times.longest:g} seconds" in text
    assert f"here {times.shortest:g} to {times.longest:g} s" in simulation(cut)
    assert f"made to fail after {FAILS_AFTER:g} seconds" in text
    assert f"{sum(run.fails != 0 for run in cut.runs) / len(cut.runs):.0%}".replace("%", " %") in text
