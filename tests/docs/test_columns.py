"""Holds what the pages show of `kubectl get` against the columns of the CRDs, for whoever compares it with a screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from crds.definitions import DEFINITIONS, Definition
from tests.docs.pages import FENCE, PAGES, ROOT, named, read, words

KINDS = {name: each for each in DEFINITIONS for name in (each.short_name, each.plural, each.kind.lower())}
GAP = "   "  # what kubectl leaves between columns, at least


def names(definition: Definition, priority: int = 0) -> list[str]:
    return [each["name"] for each in definition.columns if each.get("priority", 0) == priority]


def printed() -> Iterator[tuple[str, str, list[str]]]:
    """Where, the command, and the lines of every table of a kind of berth's."""
    for page in PAGES:
        for language, block in FENCE.findall(read(page)):
            if language != "console":
                continue
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *lines = part.rstrip().splitlines()
                called = words(command)
                table = bool(lines) and lines[0].startswith(("NAME ", "NAMESPACE "))
                if called[:2] == ["kubectl", "get"] and called[2] in KINDS and table:
                    yield f"{named(page)}: {command}", command, [line for line in lines if line]


TABLES = list(printed())


@pytest.mark.parametrize(("command", "lines"), [pytest.param(*rest, id=where) for where, *rest in TABLES])
def test_tables_are_as_kubectl_prints_them(command: str, lines: list[str]) -> None:
    called = words(command)
    definition = KINDS[called[2]]
    everywhere = {"-A", "--all-namespaces"} & set(called)
    wide = names(definition, 1) if "wide" in called else []
    expected = ["NAMESPACE"] * bool(everywhere) + ["NAME", *(name.upper() for name in (*names(definition), *wide))]
    header, *body = lines
    assert re.split(f"{GAP} *", header.rstrip()) == expected
    begins = [found.start() for found in re.finditer(rf"(?:^|(?<={GAP}))\S", header)]
    assert body, "a table without a line shows nobody anything"
    for line in body:
        for begin, end in pairwise([*begins, None]):
            cell = line[begin:end]
            assert begin == 0 or line[:begin].endswith(GAP), f"{line!r} does not stand under {header!r}"
            assert cell == cell.lstrip() or not cell.strip(), f"{line!r} does not stand under {header!r}"


def test_the_search_for_tables_is_not_blind() -> None:
    assert {KINDS[words(command)[2]].short_name for _, command, _ in TABLES} >= {"gpuw", "gpump", "tkc", "tkcn"}


def test_the_sentence_about_columns_names_them_all() -> None:
    text = " ".join(read(ROOT / "docs" / "gpuworkload.md").split())
    told = re.search(r"`kubectl get gpuw` prints (.+?); `-o wide` adds (.+?)\.", text)
    assert told is not None
    for part, priority in zip(told.groups(), (0, 1), strict=True):
        assert re.split(r", | and ", part) == names(KINDS["gpuw"], priority)
