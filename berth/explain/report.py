"""Shows why a workload waits: one sentence, its place in the queue, the nodes, and what would help."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from berth.explain.collect import happened
from berth.explain.recorded import Recorded
from planning.explanation import Explanation
from planning.filters import show_amount, show_gpus
from planning.model import Resources
from planning.places import on_nodes
from planning.times import timestamp

_NODES = 12
_AHEAD = 3
_DOMAINS = 6


def show(told: Explanation, events: list[dict[str, Any]], console: Console) -> None:
    """Prints the explanation and what happened so far."""
    phase = f" is {told.phase}" if told.phase else ""
    console.print(f"[bold]{escape(told.namespace)}/{escape(told.name)}[/]{phase}: {escape(_sentence(told))}")
    if told.state == "queued":
        _queue(told, console)
        _nodes(told, console)
    if told.decisions:
        table = _table(console, "what was decided")
        for each in told.decisions:
            cells = (str(each.get(key, "")) for key in ("time", "reason", "node", "message"))
            table.add_row(*(escape(cell) for cell in cells))
        console.print(table)
    if events:
        table = _table(console, "what happened")
        for event in events:
            table.add_row(happened(event)[:19], str(event.get("reason", "")), escape(str(event.get("note", ""))))
        console.print(table)


def show_history(found: Recorded, console: Console) -> None:
    """Prints what Temporal recorded, the oldest first, and what is missing of it."""
    if found.entries:
        table = _table(console, "its history")
        for whole in (True, True, True, False, False):
            table.add_column(no_wrap=whole, overflow="fold")
        for each in found.entries:
            why = each.why + (f" (said {each.times} times in a row)" if each.times > 1 else "")
            table.add_row(*(escape(cell) for cell in (timestamp(each.at)[:19], each.by, each.what, each.where, why)))
        console.print(table)
    elif not found.notes:
        console.print("\nTemporal has recorded nothing about it yet.")
    for note in found.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")


def _span(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _sentence(told: Explanation) -> str:
    match told.state:
        case "placed":
            where = on_nodes(node for node, _ in told.places or ((told.node or "(none yet)", 1),))
            return f"its Job {told.job} is on {where}. {told.message}".strip()
        case "queued":
            return told.message or "waits for a place"
        case _:
            return told.message or told.state


def _queue(told: Explanation, console: Console) -> None:
    source = f"{told.strategy} (from {told.strategy_from})"
    least = f", at least {told.least}" if told.least < told.pods else ""
    each = f"{told.pods} pods{least}, each " if told.pods > 1 else ""
    console.print(f"asks for   {each}{_amounts(told.asks)}; strategy {escape(source)}")
    if told.caches:
        shown = (f"{name} (Ready on {on or 'no'} node{'s' * (on > 1)})" for name, on in told.caches)
        console.print(f"caches     {escape(', '.join(shown))}")
    order = "by share of the fleet, then priority and age" if told.quota else "by priority, then age"
    before = ", ".join(told.ahead[-_AHEAD:])
    more = f" and {len(told.ahead) - _AHEAD} more" if len(told.ahead) > _AHEAD else ""
    console.print(
        f"queue      {told.position} of {told.queued} {order}"
        + (f"; just before it: {escape(before)}{more}" if before else "; nobody is before it")
    )
    for number, line in enumerate(told.quota):
        console.print(f"{'           ' if number else 'quota      '}{escape(line)}")
    if told.next_node:
        where = on_nodes(node for node, _ in told.next_places or ((told.next_node, 1),))
        warm = f"; {told.next_warmth}" if told.next_warmth else ""
        console.print(f"[green]the next round places it on {escape(where)}, as things are{escape(warm)}[/]")
    elif told.start is not None:
        early, late = told.start
        at = datetime.now().astimezone() + timedelta(seconds=early)
        console.print(
            f"start      expected {at:%H:%M}, in {_span(early)}; nine times in ten within {_span(late)} "
            "[dim](by what such runs took so far, if nothing is added)[/]"
        )
    for number, domain in enumerate(told.domains[:_DOMAINS]):
        name = f"{domain.name or 'nodes without the label'}: " if len(told.domains) > 1 or domain.name else ""
        fits = f"{escape(name)}{domain.fits} of its pods; {domain.empty} if empty"
        console.print(f"{'          ' if number else 'fits now  '} {fits}")
    for number, help_ in enumerate(told.helps):
        console.print(f"{'would help' if not number else '          '} {escape(help_)}")


def _nodes(told: Explanation, console: Console) -> None:
    table = _table(console, f"{sum(count for _, count in told.reasons)} nodes")
    for reason, count in told.reasons:
        table.add_row(f"{count:>6,}", escape(reason) if reason else "[green]hold it now[/]")
    console.print(table)
    if not told.nodes:
        return
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading, right in (("node", 0), ("model", 0), ("free GPUs", 1), ("free CPU", 1), ("free memory", 1), ("", 0)):
        table.add_column(heading, justify="right" if right else "left", no_wrap=bool(heading))
    for node in told.nodes[:_NODES]:
        warm = f"; {node.warm} of its {len(told.caches)} caches" if told.caches else ""
        rank = f"rank {', '.join(f'{part:g}' for part in node.rank)}" if node.rank else "holds it"
        table.add_row(
            escape(node.name),
            escape(node.model),
            f"{node.free.gpus} of {node.gpus}",
            f"{node.free.cpu_milli / 1000:g}",
            show_amount("memory", node.free),
            (escape(node.why) if node.why else f"[green]{rank}{f'; {node.fits} of its pods' if node.fits else ''}[/]")
            + warm,
        )
    console.print(table)
    if len(told.nodes) > _NODES:
        console.print(f"… and {len(told.nodes) - _NODES:,} more (all with --json)")


def _table(console: Console, title: str) -> Table:
    console.print(f"\n[bold]{escape(title)}[/]")
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0))


def _amounts(need: Resources) -> str:
    others = [show_amount(what, need) for what, asked in (("CPU", need.cpu_milli), ("memory", need.memory)) if asked]
    return ", ".join([show_gpus(need.gpus, need.gpu_resource), *others])
