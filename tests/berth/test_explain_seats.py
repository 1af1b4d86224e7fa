"""What `berth explain seats` shows: how full groups are, what should move, and what a move would make of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from berth.cli import command_line
from berth.explain.seats import Seats, show
from kube.resources import GPUSEATGROUPS, SEATMIGRATIONS
from planning.seats.rebalancing import loads, proposals, what_if
from planning.seats.status import GroupPicture, SeatPicture, document, object_name, status
from tests.kube.fake_api import FakeApi

Run = Callable[..., Awaitable[tuple[int, str]]]


def raw(group: str, *busy: float, node: str = "n1", rebalance: Any = "Propose") -> dict[str, Any]:
    seats = [
        SeatPicture(f"kyb-{group}-s{n}", "Parked", ("team", f"{group.lower()}-{n}", "server"), busy=each)
        for n, each in enumerate(busy, 1)
    ]
    picture = GroupPicture(
        group, "Empty", seats=[*seats, SeatPicture(f"kyb-{group}-s9", "Absent")], gpus=2, window=3600.0,
        rebalance=rebalance,
    )  # fmt: skip
    return {**document(node, "u", group), "status": status(picture, 0.0)}


FULL, IDLE = raw("G01", 0.9, 0.9, 0.9), raw("G23", 0.1)


def shown(seats: Seats) -> list[str]:
    console = Console(width=120, record=True, file=StringIO(), highlight=False)
    show(seats, console)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_fullest_group_comes_first_and_what_should_move_is_a_sentence() -> None:
    found = loads([IDLE, FULL])
    said = shown(Seats(found, proposals(found), []))
    assert [line.split() for line in said[1:3]] == [
        ["n1", "G01", "270", "%", "3", "1", "g01-1", "90", "%,", "g01-2", "90", "%,", "g01-3", "90", "%", "Propose"],
        ["n1", "G23", "10", "%", "1", "1", "g23-1", "10", "%", "Propose"],
    ]
    text = " ".join(said)
    assert "! Pod team/g01-3 should move from G01 to G23 on node n1: G01 is asked for 270 %" in text
    assert "Its pod hears of it once it has been so for 5 min" in text


def test_nothing_to_move_and_nothing_known_are_said() -> None:
    assert "Nothing should move" in " ".join(shown(Seats(loads([IDLE]), [], [])))
    assert "No node says" in " ".join(shown(Seats([], [], [])))


@pytest.mark.parametrize(
    ("pod", "group", "told"),
    [
        ("g01-1", "G23", (2.7, 0.1)),
        ("nobody", "G23", "pod team/nobody holds no seat"),
        ("g01-1", "G45", "node n1 has no group G45; it has G01, G23"),
        ("g01-1", "G01", "is in G01 already"),
    ],
)
def test_what_if(pod: str, group: str, told: Any) -> None:
    found = what_if(loads([FULL, IDLE]), "team", pod, group)
    if isinstance(found, str):
        assert told in found
    else:
        assert found.before == pytest.approx(told) and found.after == pytest.approx((1.8, 1.0))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with FakeApi() as api:
        for each in (FULL, IDLE, raw("G01", 0.2, node="n2", rebalance=None)):
            api.put(
                GPUSEATGROUPS, object_name(each["spec"]["nodeName"], each["spec"]["group"]), **each | {"metadata": {}}
            )
        told = {"phase": "Starting", "message": "Pod c has no node yet."}
        api.put(SEATMIGRATIONS, "c-away", namespace="team", status=told)
        api.put(SEATMIGRATIONS, "old", namespace="team", status={"phase": "Completed"})

        async def done(*arguments: str) -> tuple[int, str]:
            line = ["explain", "seats", *arguments, "--kubeconfig", str(api.kubeconfig(tmp_path))]
            found = await asyncio.to_thread(CliRunner().invoke, command_line(), line)
            return found.exit_code, " ".join(found.output.split())

        yield done


async def test_the_command_shows_it(run: Run) -> None:
    code, said = await run()
    assert code == 0 and "n2" in said and "team/c-away: Starting. Pod c has no node yet." in said and "old" not in said
    code, said = await run("--move", "g01-2", "--to", "G23", "-n", "team")
    assert code == 0 and "If it moved: G01 270 % → 180 %, G23 10 % → 100 %." in said
    code, said = await run("--json", "--move", "g01-2", "--to", "G7", "-n", "team")
    found = json.loads(said)
    assert [each["load"] for each in found["groups"]] == pytest.approx([2.7, 0.1, 0.2])
    assert found["proposed"][0]["seat"]["pod"] == "g01-3" and "has no group G7" in found["whatIf"]
    code, said = await run("--move", "g01-2")
    assert code == 1 and "--move and --to belong together" in said
