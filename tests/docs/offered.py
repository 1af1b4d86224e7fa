"""What the code offers, as the documentation has to tell it: commands, fields with defaults, metrics, words it says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import typer
import typer.core
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from crds.gpuworkload import EnvVar, Toleration
from tests.docs.pages import ROOMS, ROOT


@cache
def commands() -> dict[str, set[str]]:
    """berth's commands and their options; those of a group are `explain workload`."""
    from berth.cli import command_line

    found: dict[str, set[str]] = {}

    def collect(command: typer.core.TyperGroup, before: str) -> None:
        for name, each in command.commands.items():
            if isinstance(each, typer.core.TyperGroup):
                collect(each, f"{before}{name} ")
            if not isinstance(each, typer.core.TyperGroup) or each.invoke_without_command:
                options = {option for at in each.params for option in (*at.opts, *at.secondary_opts)}
                found[before + name] = options

    group = typer.main.get_command(command_line())
    assert isinstance(group, typer.core.TyperGroup)
    collect(group, "")
    return found


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All fields by the path under which a person writes them, nested models and lists of them included."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path, field
        nested = [part for part in parts(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        for inner in nested:
            listed = inner in (EnvVar, Toleration)
            yield from fields(inner, f"{path}[]." if listed else f"{path}.")


def parts(annotation: Any) -> Iterator[Any]:
    """An annotation and all that stands in it."""
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def default(field: FieldInfo) -> str:
    """A default as the table writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "–"
    if isinstance(value, BaseModel):
        return "`{}`"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value, separators=(',', ':'))}`"


def metrics() -> dict[str, str]:
    """Metrics that the code makes, by the name they are exported under → kind."""
    found = {}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                kind = node.func.attr.removeprefix("create_").removeprefix("observable_")
                if not node.func.attr.startswith("create_") or kind not in ("counter", "gauge", "histogram"):
                    continue
                name = next(iter(node.args), None) or next(k.value for k in node.keywords if k.arg == "name")
                assert isinstance(name, ast.Constant) and isinstance(name.value, str), (
                    f"{file}:{node.lineno}: not a literal"
                )
                units = [k.value for k in node.keywords if k.arg == "unit"]
                unit = next((each.value for each in units if isinstance(each, ast.Constant)), "")
                suffix = {"s": "_seconds", "By": "_bytes"}.get(str(unit), "") + ("_total" if kind == "counter" else "")
                found[f"{name.value}{suffix}"] = kind
    return found


def literals(files: Iterable[Path], pattern: str) -> set[str]:
    """The texts that stand as literals in these modules and fit the pattern as a whole."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str) and re.fullmatch(pattern, node.value)}
