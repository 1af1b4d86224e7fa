"""`berth recommend`: what a person reads, and what a program does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from berth.cli import command_line
from berth.recommend import collect
from berth.recommend.collect import Found, Row, rows
from berth.recommend.report import TOO_LITTLE, as_json, show
from kube.errors import AccessDenied, Unavailable
from planning.accelerators import NVIDIA
from planning.decay import DAY
from planning.profiles import Mark, Profile, Run, fold
from planning.recommendation import Ask, GpuType
from planning.samples import Usage
from tests.planning.builders import workload

NOW = 20_000 * DAY


def learned(model: str, gpus: int, number: int = 4) -> Profile:
    usage = Usage(9, 1, 20_000, {16: 9}, {12: 9})
    runs = [
        Run(Mark(int(NOW) + i, "u"), "ns", model, gpus, NOW, True, "Completed", 0, 60.0, usage=usage)
        for i in range(number)
    ]
    return fold(Profile("ns", model), runs)


FLEET = (GpuType(24_000, "A10", 8),)


def printed(*found: Row, width: int = 80) -> str:
    console = Console(width=width, record=True, highlight=False)
    show(list(found), console)
    return " ".join(console.export_text().split())


def test_what_is_asked_for_is_the_newest_workloads() -> None:
    old = workload("old", 2, spec={"modelName": "a", "priority": "low"}, created=NOW - 9)
    new = workload("new", 2, spec={"modelName": "a", "priority": "high"}, created=NOW)
    profiles = [learned("b", 4), learned("a", 2)]
    first, second = rows(profiles, [new, old, workload("broken", 99)], FLEET, NVIDIA, NOW)
    assert (first.model, first.asked) == ("a", Ask(2, "high"))
    assert (second.model, second.asked) == ("b", Ask(4)), "nobody asks for it now"
    assert second.recommendation is not None and second.recommendation.priority is None


def test_a_person_reads_it_also_in_a_narrow_window() -> None:
    known = rows([learned("meta-llama/Llama-3.1-8B-Instruct", 2), learned("[red]new", 1, 2)], [], FLEET, NVIDIA, NOW)
    text = printed(*known)
    assert "asked 2 GPUs proposed 1 GPU with 23,000 MiB each (type A10) confidence 0.50, after 4 runs" in text
    assert "why its runs with 2 GPUs show at most 1 in use at once" in text
    assert f"[red]new asked 1 GPU proposed {TOO_LITTLE}" in text
    assert "…" not in printed(*known, width=40)


def test_a_program_reads_numbers() -> None:
    (told,) = json.loads(json.dumps(as_json(rows([learned("a", 2)], [], FLEET, NVIDIA, NOW))))
    assert told["asked"]["gpu_count"] == 2 and told["runs"] == 4
    assert told["recommendation"]["gpu_count"] == 1 and told["recommendation"]["memory_mib"] == 23_000


@pytest.mark.parametrize(
    ("answer", "arguments", "code", "said"),
    [
        (Found([], ""), [], 0, "Nothing was learned in namespace default yet"),
        (Found([], ""), ["m"], 1, "Nothing was learned of model 'm' in namespace 'default'"),
        (Found(rows([learned("a", 2)], [], (), NVIDIA, NOW), ""), ["m"], 1, "There it is known of a."),
        (
            Found(rows([learned("a", 2)], [], (), NVIDIA, NOW), "you may not list nodes"),
            ["a"],
            0,
            "note: you may not list",
        ),
        (AccessDenied("who is not allowed", request="list"), [], 1, "Ask for the right to list GPUModelProfiles"),
        (Unavailable("nobody answers", request="list"), [], 1, "nobody answers"),
    ],
)
def test_what_there_is_to_say_of_it(
    monkeypatch: pytest.MonkeyPatch, answer: Any, arguments: list[str], code: int, said: str
) -> None:
    async def collected(*_: object) -> Found:
        if isinstance(answer, Exception):
            raise answer
        found: Found = answer
        return found

    monkeypatch.setattr(collect, "collect", collected)
    result = CliRunner().invoke(command_line(), ["recommend", *arguments])
    text = " ".join(result.output.split())
    assert result.exit_code == code and said in text, text
    assert "Traceback" not in text
