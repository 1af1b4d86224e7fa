"""Shows NodeDevices for people: a line for each node, or one node with its cards, who holds what, and how its cards are
connected.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planning.times import seconds

Raw = Mapping[str, Any]
_STYLES = {"Healthy": "green", "Unhealthy": "bold red", "Unknown": "yellow"}
# From best to worst, as the eye should find them: NVLink, one switch, one socket, the other socket.
_LINK_STYLES = (("NV", "bold green"), ("P", "cyan"), ("NODE", "yellow"), ("SYS", "dim"))
_BAR = 20  # characters


def show_cluster(nodes: Sequence[Raw], console: Console) -> None:
    """A line for each resource of each node, the nodes with trouble first."""
    if not nodes:
        console.print("No node tells of its devices: `berth node` does, on every node where it runs.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("NODE", "left"), ("RESOURCE", "left"), ("BY", "left"), ("IN USE", "left"), ("", "right"),
                       ("HEALTH", "left")):  # fmt: skip
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=name != "HEALTH")
    for raw in sorted(nodes, key=lambda each: (not _troubles(each), _name(each))):
        name = escape(_name(raw)) + (" [dim](simulated)[/]" if _status(raw).get("simulated") else "")
        resources = _list(raw, "resources")
        for number, each in enumerate(resources or [{}]):
            table.add_row(
                name if number == 0 else "",
                escape(str(each.get("name", "-"))),
                str(each.get("frontEnd", "")),
                _bar(each),
                f"{each.get('held', 0)}/{each.get('devices', 0)}" if each else "",
                _health(raw, each) if each else _node_trouble(raw),
            )
    console.print(table)
    cards = [card for raw in nodes for card in _list(raw, "cards")]
    ill = sum(card.get("health") != "Healthy" for card in cards)
    console.print(f"\n{len(nodes)} nodes, {len(cards)} cards, {ill} of them not healthy.".replace("1 nodes", "1 node"))


def show_node(raw: Raw, console: Console, now: float | None = None) -> None:
    """One node: cards with health and reason, devices and their holders, seats, topology, and what is wrong."""
    moment = time.time() if now is None else now
    status = _status(raw)
    simulated = " [yellow]simulated[/]" if status.get("simulated") else ""
    told = seconds(status.get("updated"))
    console.print(
        f"[bold]{escape(_name(raw))}[/] {escape(str(status.get('summary', 'none')))}{simulated}"
        + (f" [dim]told {_ago(moment - told)} ago[/]" if told else "")
    )
    for problem in _list(status, "problems", inside=False):
        console.print(f"[yellow]![/] {escape(str(problem))}")
    _cards(raw, console, moment)
    _held(raw, console)
    _seats(raw, console)
    _topology(raw, console)


def _cards(raw: Raw, console: Console, now: float) -> None:
    cards = _list(raw, "cards")
    if not cards:
        console.print("It has no accelerators that berth knows of.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in ("#", "CARD", "PRODUCT", "MEMORY", "NUMA", "PCI", "HEALTH"):
        table.add_column(name, justify="right" if name in ("#", "MEMORY", "NUMA") else "left", no_wrap=True)
    for card in cards:
        health = str(card.get("health", "Unknown"))
        since = seconds(card.get("since"))
        reason = f" {escape(str(card['reason']))}" if card.get("reason") else ""
        table.add_row(
            str(card.get("index", "")),
            escape(str(card.get("id", ""))),
            escape(str(card.get("product", ""))),
            f"{card['memoryMiB'] / 1024:.0f} GiB" if isinstance(card.get("memoryMiB"), int) else "",
            str(card.get("numa", "-")),
            escape(str(card.get("address", ""))),
            f"[{_STYLES.get(health, '')}]{health}{reason}[/]" + (f" [dim]{_ago(now - since)}[/]" if since else ""),
        )
    console.print()
    console.print(table)
    for card in cards:
        if card.get("message"):
            console.print(f"[red]![/] {escape(str(card['message']))}")


def _held(raw: Raw, console: Console) -> None:
    devices = _list(raw, "devices")
    if not devices:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("RESOURCE", "DEVICE", "GROUP", "HELD BY"):
        table.add_column(name, no_wrap=True)
    grouped = any(device.get("group") for device in devices)
    if not grouped:
        table.columns[2].width = 0
    for device in devices:
        holder = device.get("heldBy")
        who = f"{holder.get('namespace')}/{holder.get('pod')} ({holder.get('container')})" if holder else ""
        free = "[dim]free[/]" if device.get("healthy") else "[red]not to be had[/]"
        table.add_row(
            escape(str(device.get("resource", ""))),
            escape(str(device.get("id", ""))),
            escape(str(device.get("group", ""))),
            escape(who) if who else free,
        )
    console.print()
    console.print(table)


def _seats(raw: Raw, console: Console) -> None:
    seats = _status(raw).get("seats")
    if not isinstance(seats, Mapping):
        return
    groups = seats.get("groups", 0)
    count = f"{seats.get('seats', 0)} on {groups} group{'' if groups == 1 else 's'}"
    console.print(f"\n[bold]Seats[/] {count}, by {escape(str(seats.get('source')))}")
    for problem in (*_list(seats, "problems", inside=False), *_list(seats, "waiting", inside=False)):
        console.print(f"[red]![/] {escape(str(problem))}")


def _topology(raw: Raw, console: Console) -> None:
    rows = _list(raw, "topology")
    if not rows:
        return
    indices = {card.get("id"): card.get("index") for card in _list(raw, "cards")}
    names = [str(indices.get(row.get("card"), "?")) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("LINKS", style="bold", justify="right")
    for name in names:
        table.add_column(name, justify="center")
    for name, row in zip(names, rows, strict=True):
        table.add_row(name, *(_link(str(link)) for link in row.get("links", ())))
    console.print()
    console.print(table)
    console.print("[dim]NVn: n NVLinks; PIX, PXB, PHB: PCIe switches and bridges; NODE: one socket; SYS: two[/]")


def _link(text: str) -> str:
    style = next((style for start, style in _LINK_STYLES if text.startswith(start)), "dim")
    return f"[{style}]{escape(text)}[/]"


def _bar(resource: Raw) -> str:
    """How much of it is in use, and how much cannot be had."""
    count = int(resource.get("devices", 0))
    if not count:
        return ""
    held = round(_BAR * int(resource.get("held", 0)) / count)
    ill = min(_BAR - held, -(-_BAR * (count - int(resource.get("healthy", 0))) // count))
    return f"[green]{'█' * held}[/][dim]{'░' * (_BAR - held - ill)}[/][red]{'▒' * ill}[/]"


def _health(raw: Raw, resource: Raw) -> str:
    if not resource.get("offered"):
        return f"[bold red]not offered[/] {escape(str(resource.get('message', '')))}"
    missing = int(resource.get("devices", 0)) - int(resource.get("healthy", 0))
    if not missing:
        return "[green]Healthy[/]"
    own = {card for each in _list(raw, "devices") if each.get("resource") == resource.get("name")
           for card in each.get("cards", ())}  # fmt: skip
    ill = [card for card in _list(raw, "cards") if card.get("health") != "Healthy" and card.get("id") in own]
    reasons = sorted({str(card.get("reason", "")) for card in ill if card.get("reason")})
    return f"[bold red]{missing} not healthy[/] {escape(', '.join(reasons))}"


def _node_trouble(raw: Raw) -> str:
    problems = _list(_status(raw), "problems", inside=False)
    return escape(str(problems[0])) if problems else "[dim]no devices are offered[/]"


def _troubles(raw: Raw) -> bool:
    ill = any(card.get("health") != "Healthy" for card in _list(raw, "cards"))
    return ill or any(not each.get("offered") for each in _list(raw, "resources"))


def _status(raw: Raw) -> Raw:
    status = raw.get("status")
    return status if isinstance(status, Mapping) else {}


def _name(raw: Raw) -> str:
    return str(raw.get("metadata", {}).get("name", ""))


def _list(raw: Raw, key: str, *, inside: bool = True) -> list[Any]:
    """A list of the status (`inside`), or of the value itself."""
    found = (_status(raw) if inside else raw).get(key)
    return found if isinstance(found, list) else []


def _ago(passed: float) -> str:
    if passed < 120:
        return f"{max(0, int(passed))} s"
    return f"{int(passed // 60)} min" if passed < 7200 else f"{int(passed // 3600)} h"
