"""Holds every page against the code: links, files, and lines for a shell name what exists."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.docs.offered import commands
from tests.docs.pages import CODE, LINK, OTHERS, ROOMS, ROOT, code, every_page, prose, read, words


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_page
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(prose(read(page))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading; there are {sorted(anchors(target))}"


@every_page
def test_files_named_in_code_exist(page: Path) -> None:
    pattern = re.compile(rf"(?:{'|'.join((*ROOMS, *OTHERS))})(?:/[\w.-]+)+/?")
    for piece in CODE.findall(prose(read(page))):
        if pattern.fullmatch(piece) and not piece.startswith(("images/", "nodeworkers/")):
            assert (ROOT / piece).exists() or piece == "berth/default", f"{piece} does not exist"


def targets() -> set[str]:
    found = re.findall(r"^([A-Za-z0-9_./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for target in found if not target.startswith(".PHONY")}


def unknown_options(command: str, arguments: list[str]) -> list[str]:
    given = [word.split("=")[0] for word in arguments if re.match(r"--?[A-Za-z]", word)]
    return [option for option in given if option not in commands()[command]]


@every_page
def test_make_targets_exist(page: Path) -> None:
    for line in code(read(page)):
        called = words(line)
        if len(called) < 2 or called[0] != "make":
            continue
        for word in called[1:]:
            if word.startswith("ARGS=") and called[1] == "demo":
                wrong = unknown_options("demo", words(word.removeprefix("ARGS=")))
                assert not wrong, f"{line}: berth demo has no {wrong}"
            elif "=" not in word:
                assert word in targets(), f"{line}: the Makefile has no target {word}"


@every_page
def test_berths_commands_and_options_exist(page: Path) -> None:
    for line in code(read(page)):
        called = words(line.removeprefix("sudo ").removeprefix("uv run "))
        if len(called) < 2 or called[0].removeprefix(".venv/bin/") != "berth":
            continue
        name = next((each for each in (" ".join(called[1:3]), called[1]) if each in commands()), "")
        assert name, f"{line}: berth has no command {called[1]}"
        wrong = unknown_options(name, called[1 + len(name.split()) :])
        assert not wrong, f"{line}: berth {name} has no {wrong}"


@every_page
def test_options_that_stand_alone_exist_somewhere(page: Path) -> None:
    """`--data DIR` in a sentence: some command of berth's must have it, unless the page says whose it is."""
    foreign = {"--strict", "--locked", "--bump-revision", "--mark-compacted", "--check"}
    known = {option for options in commands().values() for option in options} | foreign
    for piece in CODE.findall(prose(read(page))):
        if piece.startswith("--"):
            assert piece.split()[0].split("=")[0] in known, f"`{piece}`: no command of berth's has this option"


@cache
def handlers() -> dict[str, set[str]]:
    """Names of the workflows' signals and queries, from the decorators."""
    found: dict[str, set[str]] = {"signal": set(), "query": set()}
    for file in (ROOT / "workflows").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                target = decorator.func if isinstance(decorator, ast.Call) else decorator
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if isinstance(target, ast.Attribute) and target.attr in found:
                    found[target.attr].add(node.name)
    return found


@every_page
def test_lines_for_the_temporal_cli_name_what_exists(page: Path) -> None:
    from activities.messages import placement_id, provisioning_id, workload_id
    from activities.signatures import TASK_QUEUE
    from planning.caches.orders import cache_id, node_id

    for line in code(read(page)):
        called = words(line)
        if called[:1] != ["temporal"] or len(called) < 3:
            continue
        options = dict(pairwise(called))
        kind = called[2]
        if kind in ("signal", "query"):
            name = options.get("--name") or options.get("--type")
            assert name in handlers()[kind], f"{line}: there is no {kind} {name}"
        if "--input" in options:
            json.loads(options["--input"])
        if "--workflow-id" in options:
            ids = (workload_id(""), placement_id(""), provisioning_id(""), cache_id(""), node_id(""))
            assert options["--workflow-id"].startswith(ids), line
        if "--task-queue" in options:
            assert options["--task-queue"] == TASK_QUEUE, line


@every_page
def test_search_attributes_exist(page: Path) -> None:
    from activities import messages

    known = {key.name for key in (messages.KIND, messages.NAMESPACE, messages.NAME, messages.NODE, messages.PHASE)}
    alerts = set(re.findall(r"alert: (\w+)", read(ROOT / "deploy" / "prometheus" / "berth-rules.yaml")))
    assert set(re.findall(r"\bBerth[A-Z]\w+", read(page))) <= known | alerts
