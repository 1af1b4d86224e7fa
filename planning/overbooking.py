"""Whether a GPUReservation wants more than its nodes have, alone or with others at the same time.

For the admission webhooks: what is written nevertheless is kept as far as there are GPUs, the oldest first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from planning.filters import affine, show_gpus
from planning.model import NodeView
from planning.times import timestamp
from planning.windows import Window


def overbooked(new: Window, others: Iterable[Window], nodes: Sequence[NodeView]) -> str:
    """What is wrong, with its place; '' if there are GPUs enough. Nodes count whether they can be used now or not.

    At each moment of the window, and for each set of nodes that contains all of its own, those that are confined to
    that set must find room in it. With selectors that overlap in part that is necessary, and not always sufficient.
    """
    gpus = {node.name: node.most("") for node in nodes}

    def suited(window: Window) -> frozenset[str]:
        return frozenset(node.name for node in nodes if gpus[node.name] and not affine(window.constraints, node))

    mine = suited(new)
    have = sum(gpus[name] // new.block * new.block for name in mine)
    if new.gpus > have:
        blocks = f" in blocks of {new.block}" if new.block > 1 else ""
        return f"spec.gpus: {_that_match(mine, ' its nodeSelector')} {show_gpus(have)}{blocks}"
    rivals = [(each, suited(each)) for each in others if each.overlaps(new)]
    for moment in sorted({new.start, *(each.start for each, _ in rivals if new.during(each.start))}):
        there = [(each, among) for each, among in rivals if each.during(moment)]
        for among in {mine, *(theirs for _, theirs in there if mine <= theirs)}:
            inside = [each for each, theirs in there if theirs <= among]
            have, asked = sum(gpus[name] for name in among), new.gpus + sum(each.gpus for each in inside)
            if asked > have:
                names = ", ".join(sorted(each.name for each in inside)[:5])
                return (
                    f"spec.gpus: with GPUReservation {names} {show_gpus(asked)} would be reserved at "
                    f"{timestamp(moment)}, and {_that_match(among)} {have}"
                )
    return ""


def _that_match(nodes: Collection[str], what: str = "") -> str:
    """The beginning of a sentence about what they have."""
    if len(nodes) == 1:
        return f"the 1 node that matches{what} has"
    return f"the {len(nodes)} nodes that match{what} have"
