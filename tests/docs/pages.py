"""The documentation as tests read it: its pages, and the links, lines of shell, tables and blocks in one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
ROOMS = (
    "crds", "planning", "kube", "images", "workflows", "activities", "controller", "nodeworkers", "berth", "stack",
)  # fmt: skip
OTHERS = ("benchmarks", "deploy", "docs", "examples", "tests")
OPERATIONS = ROOT / "docs" / "operations.md"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def every_page(function: Any) -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=named)(function)


def prose(text: str) -> str:
    return FENCE.sub("", text)


def code(text: str) -> Iterator[str]:
    """Every line of shell in a page, continued lines joined, and every piece of inline code."""
    for language, block in FENCE.findall(text):
        if language in ("sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.strip().removeprefix("$ ")
    for piece in CODE.findall(prose(text)):
        yield piece.strip()


def words(line: str) -> list[str]:
    """A line of shell as words, comments dropped; nothing where it is no shell."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The table under a heading: first cell without backticks → the other cells."""
    section = re.split(rf"^#+ {re.escape(heading)}$", read(page), flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in table[2:]]
    return {row[0].strip("`*()"): row[1:] for row in cells}
