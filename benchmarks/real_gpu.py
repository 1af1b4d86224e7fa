"""What berth sees of a machine's real NVIDIA GPUs, beside what nvidia-smi says of them, for whoever changes the
provider.

Discovery, health, topology and how long a look takes. It ends with 2 where there is no NVIDIA GPU, and with 1 if the
two disagree.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.report import Report, arguments
from nodeworkers.hardware.nvidia import Nvidia
from nodeworkers.hardware.provider import HardwareError
from planning.devices.cards import Card, Sight

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# What the matrix of `nvidia-smi topo -m` calls them; NV4 is 4 NVLinks.
_CONNECTIONS = {
    "PSB": "same-board",
    "PIX": "single-switch",
    "PXB": "multi-switch",
    "PHB": "host-bridge",
    "NODE": "same-cpu",
    "SYS": "cross-cpu",
}


def smi(*options: str) -> str:
    """What nvidia-smi prints; '' where it is not there or fails."""
    try:
        ran = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def described(printed: str) -> dict[str, dict[str, Any]]:
    """What `nvidia-smi -q -x` says of each GPU, by UUID, in the words of a Card."""
    log = ElementTree.fromstring(printed)
    found = {}
    for gpu in log.findall("gpu"):
        domain, _, rest = gpu.findtext("pci/pci_bus_id", "").lower().partition(":")
        found[gpu.findtext("uuid", "")] = {
            "product": gpu.findtext("product_name", ""),
            "index": int(gpu.findtext("minor_number", "-1")),
            "address": f"{int(domain, 16):04x}:{rest}",
            "memory_mib": int(gpu.findtext("fb_memory_usage/total", "0").split()[0]),
            "driver": log.findtext("driver_version", ""),
        }
    return found


def matrix(printed: str) -> dict[tuple[int, int], tuple[str, int]]:
    """What `nvidia-smi topo -m` says of each pair of GPUs, by their numbers: connection and NVLinks."""
    rows = [_COLOURS.sub("", line).split() for line in printed.splitlines()]
    header = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU[0-9]+", name)]
    found: dict[tuple[int, int], tuple[str, int]] = {}
    for row in rows:
        if row is header or not row or not re.fullmatch(r"GPU[0-9]+", row[0]):
            continue
        one = int(row[0][3:])
        for other, cell in zip(columns, row[1:], strict=False):
            if one < other:
                lanes = int(cell[2:]) if re.fullmatch(r"NV[0-9]+", cell) else 0
                found[one, other] = ("nvlink", lanes) if lanes else (_CONNECTIONS.get(cell, cell), 0)
    return found


def whole(sight: Sight) -> list[Card]:
    """The GPUs without their instances, in the driver's order: nvidia-smi's numbers."""
    return [card for card in sight.cards if not card.parent]


def disagreements(
    sight: Sight, theirs: Mapping[str, Mapping[str, Any]], pairs: Mapping[tuple[int, int], tuple[str, int]]
) -> list[str]:
    """In what nvidia-smi says otherwise, a sentence each."""
    cards = {card.id: card for card in whole(sight)}
    found = [f"{name} is listed by nvidia-smi alone." for name in theirs.keys() - cards.keys()]
    found += [f"{name} is listed by berth alone." for name in cards.keys() - theirs.keys()]
    for name in cards.keys() & theirs.keys():
        ours = asdict(cards[name])
        found += [
            f"{name}: {key} is {ours[key]!r} to berth and {value!r} to nvidia-smi."
            for key, value in theirs[name].items()
            if ours[key] != value
        ]
    number = {card.id: each for each, card in enumerate(whole(sight))}
    links = {
        tuple(sorted((number[link.a], number[link.b]))): (link.connection, link.lanes)
        for link in sight.links
        if link.a in number and link.b in number
    }
    for (one, other), said in pairs.items():
        seen = links.get((one, other), ("nothing", 0))
        if seen != said:
            found.append(f"GPU {one} and {other} are connected by {seen} to berth and by {said} to nvidia-smi.")
    return found


def looks(source: Nvidia, count: int) -> list[float]:
    """Seconds of each of so many looks."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        source.look()
        took.append(time.perf_counter() - began)
    return took


def show(report: Report, sight: Sight, first: float, took: Sequence[float]) -> None:
    """Rows and values."""
    for number, card in enumerate(sight.cards):
        reading, trouble = sight.readings.get(card.id), sight.troubles.get(card.id)
        report.row(
            f"card {number}", card.id,
            f"{card.product}, {card.resource or 'not offered: in MIG mode'}, {card.address}, NUMA {card.numa}, "
            f"{card.memory_mib} MiB, sm_{card.arch}, driver {card.driver}, nodes {' '.join(card.nodes) or 'none'}",
        )  # fmt: skip
        if reading is not None:
            report.row("", "", f"{reading.temperature} °C, {reading.power} W, {reading.memory_used_mib} MiB in use, "
                       f"processes {reading.pids or 'none'}")  # fmt: skip
        report.row("", trouble.reason if trouble else "well", trouble.message if trouble else "")
    for link in sight.links:
        report.row("link", link.connection, f"{link.a} {link.b}" + (f", {link.lanes} NVLinks" if link.lanes else ""))
    for key, value in sight.host.items():
        report.row(key, value)
    report.row("problem", sight.problem or "none")
    report.row("first look", f"{first * 1000:.1f} ms", "with nvmlInit")
    report.row(
        "a look", f"{statistics.median(took) * 1000:.1f} ms", f"median of {len(took)}, most {max(took) * 1000:.1f} ms"
    )
    report.note(
        {
            "sight": asdict(sight),
            "first_look_seconds": round(first, 5),
            "look_seconds": [round(each, 5) for each in took],
        }
    )


def main() -> int:
    """Entry point."""
    parser = arguments("real_gpu", "what berth sees of real NVIDIA GPUs, beside nvidia-smi")
    parser.add_argument("--looks", type=int, default=50, help="how often it looks (50)")
    options = parser.parse_args()
    report = Report("real NVIDIA GPUs: berth beside nvidia-smi")
    source = Nvidia()
    try:
        began = time.perf_counter()
        sight = source.look()
        first = time.perf_counter() - began
        if not sight.cards:
            print(f"This machine has no NVIDIA GPU with a driver, so nothing was measured. {sight.problem}".strip())
            return 2
        source.wait(0.1)
        took = looks(source, options.looks)
        sight = source.look()
    except HardwareError as error:
        print(f"NVIDIA's driver does not answer, so nothing was measured: {error}")
        return 2
    finally:
        source.close()
    show(report, sight, first, took)
    query, topology = smi("-q", "-x"), smi("topo", "-m")
    if query:
        wrong = disagreements(sight, described(query), matrix(topology))
        report.note({"disagreements": wrong, "nvidia_smi_topo": topology})
        report.row("nvidia-smi", "agrees" if not wrong else "disagrees", " ".join(wrong))
    else:
        wrong = []
        report.row("nvidia-smi", "not compared", "it is not there, or fails")
    report.finish(options.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
