"""Shows GPUSeatGroups for people: who has the slot of each group, who is parked, who waits and for how long."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planning.seats.group import spoken
from planning.seats.host_memory import amount
from planning.times import seconds

Raw = Mapping[str, Any]
_STYLES = {
    "Active": "bold green", "Parked": "cyan", "Waiting": "yellow", "Starting": "yellow", "Waking": "yellow",
    "Draining": "yellow", "Parking": "yellow", "Lost": "red", "Quarantined": "bold red", "Absent": "dim",
}  # fmt: skip


def show_slots(groups: Sequence[Raw], console: Console) -> None:
    """A line for each group of every node, those with trouble first; nothing where there is none."""
    if not groups:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NODE", "GROUP", "SLOT", "WAITING", "PARKED", "SWITCHES"):
        table.add_column(name, justify="right" if name in ("WAITING", "PARKED", "SWITCHES") else "left")
    for raw in sorted(groups, key=lambda each: (not _ill(each), _text(each, "spec", "nodeName"), _group(each))):
        status = _part(raw, "status")
        table.add_row(
            escape(_text(raw, "spec", "nodeName")),
            escape(_group(raw)),
            _slot(raw),
            str(_number(status, "requests")),
            str(_number(status, "parked")),
            f"{_number(status, 'switches'):,}",
        )
    console.print()
    console.print(table)


def show_groups(groups: Sequence[Raw], console: Console, now: float | None = None) -> None:
    """Each group of a node with its seats, why one of them could not be parked, and what does not hold there."""
    moment = time.time() if now is None else now
    for raw in sorted(groups, key=_group):
        status = _part(raw, "status")
        since = seconds(status.get("since"))
        console.print(
            f"\n[bold]{escape(_group(raw))}[/] {_slot(raw)}"
            + (f" [dim]for {spoken(moment - since)}[/]" if since else "")
            + _last(_part(status, "lastSwitch"), moment)
        )
        if _ill(raw):
            console.print(f"[red]![/] {escape(_text(status, 'message') or _condition(status))}")
        seats = [each for each in _list(status, "seats") if _text(each, "phase") != "Absent"]
        if seats:
            console.print(_seats(seats, moment))
        for each in seats:
            if error := _text(each, "lastError"):
                console.print(f"[yellow]![/] {escape(_text(each, 'id'))}: {escape(error)}")
        free = len(_list(status, "seats")) - len(seats)
        if free:
            console.print(f"[dim]{free} {'seat is' if free == 1 else 'seats are'} free[/]")
        for check in _list(status, "preflight"):
            if check.get("ok") is False:
                console.print(f"[yellow]![/] {escape(_text(check, 'name'))}: {escape(_text(check, 'message'))}")


def _seats(seats: Sequence[Raw], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("SEAT", "PHASE", "POD", "WAITING", "PARKED", "WAKE"):
        right = name in ("WAITING", "PARKED", "WAKE")
        # A name may take a second line where the screen is narrow; it is never cut.
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "POD", overflow="fold")
    for each in seats:
        phase, since = _text(each, "phase"), seconds(each.get("since"))
        holder = _part(each, "heldBy")
        waiting, expected = _number(each, "requests"), _number(each, "expectedMillis")
        parked, wake = _number(each, "parkedBytes"), _number(each, "wakeMillis")
        table.add_row(
            escape(_text(each, "id")),
            f"[{_STYLES.get(phase, 'default')}]{escape(phase)}[/]"
            + (f" [dim]{spoken(now - since)}[/]" if since else ""),
            escape(f"{_text(holder, 'namespace')}/{_text(holder, 'pod')}") if holder else "",
            (str(waiting) if waiting else "")
            + (f" [dim]~{spoken(expected / 1000)}[/]" if waiting and expected else ""),
            amount(parked) if parked else "",
            spoken(wake / 1000) if wake else "",
        )
    return table


def _slot(raw: Raw) -> str:
    """Who has it, and what goes on."""
    status = _part(raw, "status")
    phase, active = _text(status, "phase") or "not told yet", _text(status, "active")
    style = {"Active": "bold green", "Empty": "dim", "Quarantined": "bold red"}.get(phase, "yellow")
    pods = [_part(each, "heldBy") for each in _list(status, "seats") if active and each.get("id") == active]
    pod = f" {_text(pods[0], 'namespace')}/{_text(pods[0], 'pod')}" if pods and pods[0] else ""
    simulated = " [yellow]simulated[/]" if status.get("simulated") is True else ""
    return f"[{style}]{escape(phase)}[/] {escape(active + pod)}".rstrip() + simulated


def _last(last: Raw, now: float) -> str:
    at = seconds(last.get("at"))
    if at is None:
        return ""
    how = {"Kept": "did not come off", "Failed": "failed", "Quarantined": "failed"}.get(_text(last, "outcome"), "took")
    took = f" {spoken(_number(last, 'millis') / 1000)}" if how == "took" else ""
    return f"[dim], last switch {how}{took}, {spoken(now - at)} ago[/]"


def _ill(raw: Raw) -> bool:
    return any(
        each.get("type") == "Healthy" and each.get("status") == "False"
        for each in _list(_part(raw, "status"), "conditions")
    )


def _condition(status: Raw) -> str:
    return next((_text(each, "message") for each in _list(status, "conditions")), "")


def _group(raw: Raw) -> str:
    return _text(raw, "spec", "group")


def _part(raw: Raw, key: str) -> Raw:
    found = raw.get(key)
    return found if isinstance(found, Mapping) else {}


def _text(raw: Raw, *keys: str) -> str:
    for key in keys[:-1]:
        raw = _part(raw, key)
    found = raw.get(keys[-1])
    return found if isinstance(found, str) else ""


def _number(raw: Raw, key: str) -> int:
    found = raw.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _list(raw: Raw, key: str) -> list[Raw]:
    found = raw.get(key)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
