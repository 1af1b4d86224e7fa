"""`berth devices` and `berth node inspect`: what people see of nodes' devices, and what they are told where there are
none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from berth.cli import command_line
from berth.devices.report import show_cluster, show_node
from kube.resources import NODEDEVICES
from planning.devices.cards import Card, Link
from planning.devices.offers import Device
from planning.devices.report import CardHealth, Holder, Offer, Picture, Seats, status
from tests.kube.fake_api import FakeApi

NOW = 1_800_000_000.0
SEAT, CARD = "kyb.ai/gpu-2x-seat", "tenstorrent.com/n150"
CARDS = [
    Card("GPU-0", "nvidia", "H100", "nvidia.com/gpu", 0, "0000:01:00.0", 0, 81_559),
    Card("GPU-1", "nvidia", "H100", "nvidia.com/gpu", 1, "0000:02:00.0", 0, 81_559),
    Card("tt-0a", "tenstorrent", "n150", CARD, 0, "0000:c0:00.0", 1),
]
PICTURE = Picture(
    CARDS,
    {
        "GPU-0": CardHealth("Healthy", since=NOW - 4000),
        "GPU-1": CardHealth("Healthy", since=NOW - 4000),
        "tt-0a": CardHealth("Unhealthy", "HeartbeatStalled", "Reset it [now].", NOW - 33),
    },
    {
        SEAT: [Device(f"kyb-G01-s{k}", SEAT, ("GPU-0", "GPU-1"), group="G01") for k in range(2)],
        CARD: [Device("tt-0a", CARD, ("tt-0a",), healthy=False)],
    },
    {"kyb-G01-s0": Holder("team-a", "vllm-0", "server")},
    {SEAT: Offer("device-plugin"), CARD: Offer("dra", "the API server refuses it")},
    [Link("GPU-0", "GPU-1", "nvlink", 4)],
    ["NVIDIA's driver is another than its library."],
    Seats("GPUSeatProfile/h100", 2, 1, 2, ("group G45: there is no GPU 9.",)),
    simulated=True,
)
RAW = {"metadata": {"name": "n1"}, "status": status(PICTURE, NOW)}


def lines(show: object, *arguments: object) -> list[str]:
    console = Console(width=160, record=True, file=StringIO())
    show(*arguments, console)  # type: ignore[operator]  # either function
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_node_shows_cards_holders_seats_and_links() -> None:
    text = lines(lambda raw, console: show_node(raw, console, NOW), RAW)
    assert text[0] == "n1 2 × H100, 1 × n150 simulated told 0 s ago"
    assert "! NVIDIA's driver is another than its library." in text
    (ill,) = [line for line in text if "tt-0a" in line and "0000:c0:00.0" in line]
    assert ill.split()[:6] == ["0", "tt-0a", "n150", "1", "0000:c0:00.0", "Unhealthy"]
    assert ill.endswith("33 s  HeartbeatStalled Reset it [now]."), "a driver's brackets are no markup"
    held = {line.split()[1]: line.split(None, 3)[3] for line in text if line.startswith(SEAT)}
    assert held == {"kyb-G01-s0": "team-a/vllm-0 (server)", "kyb-G01-s1": "free"}
    assert "Seats 2 on 1 group, by GPUSeatProfile/h100" in text and "! group G45: there is no GPU 9." in text
    assert [line.split() for line in text if line.strip().startswith(("0   X", "1  NV4"))] == [
        ["0", "X", "NV4"], ["1", "NV4", "X"]
    ]  # fmt: skip


def test_the_cluster_shows_trouble_first_with_its_reason() -> None:
    well = {"metadata": {"name": "a"}, "status": status(Picture(CARDS[:1], {"GPU-0": CardHealth("Healthy")}), NOW)}
    text = lines(show_cluster, [well, RAW])
    assert text[1].startswith("n1 (simulated)") and text[1].split()[2:4] == [SEAT, "device-plugin"]
    assert "1/2" in text[1] and text[1].endswith("Healthy")
    assert text[2].endswith("not offered the API server refuses it")
    assert text[3].startswith("a") and text[3].endswith("no devices are offered")
    assert text[-1] == "2 nodes, 4 cards, 1 of them not healthy."
    assert lines(show_cluster, [])[0].startswith("No node tells of its devices")


def test_anything_in_a_status_is_shown_somehow() -> None:
    for odd in ({}, {"status": None}, {"metadata": {"name": "n"}, "status": {"cards": "x", "devices": [{}]}}):
        assert lines(lambda raw, console: show_node(raw, console, NOW), odd)
        assert lines(show_cluster, [odd])


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as api:
        yield api


async def run(api: FakeApi, folder: Path, *arguments: str) -> tuple[int, str]:
    line = [*arguments, "--kubeconfig", str(api.kubeconfig(folder))]
    done = await asyncio.to_thread(CliRunner().invoke, command_line(), line)
    return done.exit_code, done.output


async def test_json_is_what_the_node_wrote(api: FakeApi, tmp_path: Path) -> None:
    api.put(NODEDEVICES, "n1", status=RAW["status"])
    code, out = await run(api, tmp_path, "node", "inspect", "n1", "--json")
    assert code == 0 and json.loads(out)["status"] == RAW["status"]
    code, out = await run(api, tmp_path, "devices", "--json")
    assert code == 0 and [each["metadata"]["name"] for each in json.loads(out)] == ["n1"]


async def test_a_node_that_tells_nothing_is_told(api: FakeApi, tmp_path: Path) -> None:
    code, out = await run(api, tmp_path, "node", "inspect", "n2")
    assert code == 1 and "Node 'n2' tells nothing of its devices." in out and "kubectl get nodedevices" in out
