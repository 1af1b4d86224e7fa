"""What `berth devices` and `berth node inspect` show of groups of seats: who has the slot, who is parked, who waits."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from berth.cli import command_line
from berth.devices.seats import show_groups, show_slots
from kube.resources import GPUSEATGROUPS, NODEDEVICES
from planning.seats.preflight import Check
from planning.seats.status import GroupPicture, SeatPicture, SwitchPicture, document, object_name, status
from tests.kube.fake_api import FakeApi

NOW = 1_800_000_000.0
A, B, C = "kyb-G01-s1", "kyb-G01-s2", "kyb-G01-s3"


def held(seat: str, phase: str, pod: str, **more: Any) -> SeatPicture:
    return SeatPicture(seat, phase, ("team-a", pod, "server"), since=NOW - 720.0, **more)


WELL = GroupPicture(
    "G01", "Active", A, f"{A} serves", NOW - 720.0, 1234,
    [
        held(A, "Active", "llama-3-70b-7d9f5c6b8-x2x7k", wake=2.1),
        held(B, "Parked", "qwen-[1]", requests=3, expected=12.5, parked_bytes=40 << 30, wake=0.4),
        held(C, "Waiting", "mistral-0", error="it was not parked: 40 GiB do not fit"),
        SeatPicture("kyb-G01-s4", "Absent"),
    ],
    SwitchPicture(NOW - 720.0, B, A, "it waited longest", {"park": 1.5, "wake": 2.1}),
    [Check("driver", True, "580 can park"), Check("hugepages", False, "THP is off: parks are slower.")],
)  # fmt: skip
ILL = GroupPicture("G23", "Quarantined", "", "process 7 holds 3 GiB of GPU 2", NOW - 400.0, simulated=True)


def raw(picture: GroupPicture, node: str = "n1") -> dict[str, Any]:
    return {**document(node, "u", picture.group), "status": status(picture, NOW)}


def lines(width: int, show: Any, *arguments: Any) -> list[str]:
    console = Console(width=width, record=True, file=StringIO(), highlight=False)
    show(arguments[0], console, *arguments[1:])
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_cluster_shows_whose_slots_are_whose_and_trouble_first() -> None:
    shown = lines(120, show_slots, [raw(WELL), raw(ILL, "n2")])
    assert [line.split() for line in shown[2:]] == [
        ["n2", "G23", "Quarantined", "simulated", "0", "0", "0"],
        ["n1", "G01", "Active", A, "team-a/llama-3-70b-7d9f5c6b8-x2x7k", "3", "1", "1,234"],
    ]
    assert lines(120, show_slots, []) == []


def test_a_node_shows_each_group_with_its_seats() -> None:
    text = lines(120, show_groups, [raw(ILL), raw(WELL)], NOW)
    at = next(n for n, line in enumerate(text) if line.startswith("G01"))
    assert text[at] == (
        f"G01 Active {A} team-a/llama-3-70b-7d9f5c6b8-x2x7k for 12 min, last switch took 3.6 s, 12 min ago"
    )
    rows = {line.split()[0]: line.split()[1:] for line in text if line.startswith("kyb-")}
    assert rows[A] == ["Active", "12", "min", "team-a/llama-3-70b-7d9f5c6b8-x2x7k", "2.1", "s"]
    assert rows[B] == ["Parked", "12", "min", "team-a/qwen-[1]", "3", "~12", "s", "40", "GiB", "0.4", "s"]
    assert f"! {C}: it was not parked: 40 GiB do not fit" in text
    assert "1 seat is free" in text and "! hugepages: THP is off: parks are slower." in text
    assert text[-2:] == ["G23 Quarantined simulated for 6.7 min", "! process 7 holds 3 GiB of GPU 2"]


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_screen_and_cuts_no_name(width: int) -> None:
    text = lines(width, show_groups, [raw(WELL)], NOW)
    assert all(len(line) <= width for line in text) and not any("…" in line for line in text)
    at = next(n for n, line in enumerate(text) if line.startswith("SEAT"))
    column = slice(text[at].index("POD"), text[at].index("WAITING"))
    pods = "".join(line[column].strip() for line in text[at + 1 :])
    assert pods.startswith("team-a/llama-3-70b-7d9f5c6b8-x2x7kteam-a/qwen-[1]")


KEYS = (
    "status", "spec", "group", "seats", "phase", "active", "id", "heldBy", "lastSwitch", "preflight", "conditions",
    "since", "requests",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
)


@example([{"status": {"seats": [{}, {"phase": "Odd [/]"}], "phase": "[/]", "message": "[/x]"}}])
@given(st.lists(st.dictionaries(st.sampled_from(["status", "spec"]), JSON), max_size=3))
def test_anything_in_a_status_is_shown_somehow(groups: list[dict[str, Any]]) -> None:
    lines(80, show_slots, groups)
    lines(80, show_groups, groups, NOW)


async def test_the_commands_show_them(tmp_path: Path) -> None:
    async with FakeApi() as api:
        api.put(NODEDEVICES, "n1", status={})
        for node, picture in (("n1", WELL), ("n2", ILL)):
            api.put(GPUSEATGROUPS, object_name(node, picture.group), **raw(picture, node) | {"metadata": {}})

        async def run(*arguments: str) -> str:
            line = [*arguments, "--kubeconfig", str(api.kubeconfig(tmp_path))]
            done = await asyncio.to_thread(CliRunner().invoke, command_line(), line)
            assert done.exit_code == 0, done.output
            return done.output

        everywhere, one = await run("devices"), await run("node", "inspect", "n1")
        assert A in everywhere and "Quarantined" in everywhere
        assert A in one and "Quarantined" not in one, "another node's"
        denied = 'User "u" cannot list resource "gpuseatgroups"'
        api.fail(status=403, message=denied, contains=GPUSEATGROUPS.plural)
        assert A not in await run("node", "inspect", "n1"), "who may not see them sees the rest"
