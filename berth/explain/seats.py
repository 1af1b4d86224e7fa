"""Shows for how much of their time groups of seats are asked, and which server should move: `berth explain seats`.

The decisions are those of `planning.seats.rebalancing`, over what nodes say now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crds.seatmigration import ENDED
from kube.client import KubeClient
from kube.resources import GPUSEATGROUPS, SEATMIGRATIONS
from planning.podspecs import mapping, text
from planning.seats.group import spoken
from planning.seats.rebalancing import CROWDED, STANDS, GroupLoad, Proposal, loads, proposals, what_if

MOST_NAMED = 4  # seats in a line


@dataclass(frozen=True, slots=True)
class Seats:
    """`proposed`: the best move of each node, whether or not its profile asks for any; `under_way`: SeatMigrations."""

    groups: Sequence[GroupLoad]
    proposed: Sequence[Proposal]
    under_way: Sequence[Mapping[str, Any]]
    asked: Proposal | str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "groups": [{**asdict(each), "load": each.load} for each in self.groups],
            "proposed": [asdict(each) for each in self.proposed],
            "underWay": [_migration(each) for each in self.under_way],
            "whatIf": asdict(self.asked) if isinstance(self.asked, Proposal) else self.asked,
        }


async def collect(kubeconfig: Path | None, context: str | None, node: str, move: tuple[str, str, str] | None) -> Seats:
    """`node`: '' for all; `move`: namespace, pod and group of a move that is only asked about. Raises KubeError."""
    async with await KubeClient.connect(kubeconfig, context, user_agent="berth-explain") as kube:
        fields = f"spec.nodeName={node}" if node else ""
        raw, moves = await asyncio.gather(kube.list(GPUSEATGROUPS, field_selector=fields), kube.list(SEATMIGRATIONS))
    found = loads(raw[0])
    under_way = [each for each in moves[0] if mapping(each.get("status")).get("phase") not in ENDED]
    # What would be worth it is shown where nobody asks for it as well.
    wanted = [each if each.mode is not None else _proposing(each) for each in found]
    return Seats(found, proposals(wanted), under_way, what_if(found, *move) if move is not None else None)


def _proposing(group: GroupLoad) -> GroupLoad:
    return GroupLoad(
        group.node, group.group, group.resource, "Propose", group.seats, group.free, group.window, group.well
    )


def show(seats: Seats, console: Console) -> None:
    """A line for each group, the fullest of each node first; then what should move, and what moves."""
    if not seats.groups:
        console.print("No node says of groups of seats for how much of the time they are asked (kubectl get gpusg).")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("NODE", "GROUP", "LOAD", "HELD", "FREE", "ASKED MOST", "REBALANCE"):
        table.add_column(name, justify="right" if name in ("LOAD", "HELD", "FREE") else "left")
    for each in sorted(seats.groups, key=lambda one: (one.node, -one.load, one.group)):
        style = "red" if each.load > CROWDED else "green"
        table.add_row(
            escape(each.node), escape(each.group), f"[{style}]{_percent(each.load)}[/]", str(len(each.seats)),
            str(each.free), escape(_busiest(each)), each.mode or "-",
        )  # fmt: skip
    console.print(table)
    window = max(each.window for each in seats.groups)
    console.print(
        f"[dim]LOAD is the share of time in which requests waited or were in flight, of all seats of a group, over "
        f"{spoken(window)}; above 100 % somebody waits for somebody else.[/]"
    )
    for proposal in seats.proposed:
        console.print(f"\n[yellow]![/] {escape(_sentence(proposal))}")
        console.print(f"  [dim]{escape(_then(proposal, seats.groups))}[/]")
    if not seats.proposed:
        console.print("\nNothing should move: no group is so full that a move to another of its node were worth it.")
    for raw in seats.under_way:
        told = _migration(raw)
        console.print(
            f"\n[cyan]>[/] SeatMigration {escape(told['name'])}: {escape(told['phase'])}. {escape(told['message'])}"
        )
    if seats.asked is not None:
        said = seats.asked if isinstance(seats.asked, str) else _whatever(seats.asked)
        console.print(f"\nIf it moved: {escape(said)}.")


def _then(proposal: Proposal, groups: Sequence[GroupLoad]) -> str:
    """What comes of a proposal."""
    mode = next(each.mode for each in groups if (each.node, each.group) == (proposal.node, proposal.source))
    stands = spoken(STANDS * proposal.window)
    match mode:
        case "Perform":
            return f"It is ordered once it has been so for {stands}, if the pod can be moved."
        case "Propose":
            return f"Its pod hears of it once it has been so for {stands}; a SeatMigration does it."
        case _:
            return "Its GPUSeatProfile says nothing of rebalancing; a SeatMigration does it."


def _whatever(proposal: Proposal) -> str:
    return (
        f"{proposal.source} {_percent(proposal.before[0])} → {_percent(proposal.after[0])}, "
        f"{proposal.target} {_percent(proposal.before[1])} → {_percent(proposal.after[1])}"
    )


def _busiest(group: GroupLoad) -> str:
    most = sorted((each for each in group.seats if each.load > 0), key=lambda each: -each.load)
    named = ", ".join(f"{each.pod} {_percent(each.load)}" for each in most[:MOST_NAMED])
    return named + (f" and {len(most) - MOST_NAMED} more" if len(most) > MOST_NAMED else "")


def _migration(raw: Mapping[str, Any]) -> dict[str, str]:
    meta, status = mapping(raw.get("metadata")), mapping(raw.get("status"))
    return {
        "name": f"{text(meta.get('namespace'))}/{text(meta.get('name'))}",
        "phase": text(status.get("phase")) or "Pending",
        "message": text(status.get("message")),
    }


def _sentence(proposal: Proposal) -> str:
    return f"{proposal.told[0].upper()}{proposal.told[1:]}."


def _percent(load: float) -> str:
    return f"{100 * load:.0f} %"
