"""Resets one Tenstorrent card that nobody holds, in a process of its own, and tells on its stdout what came of it.

A driver may hang whoever calls it; here that is nobody but this process, which `nodeworkers.hardware.resetting` starts
and, since a reset must not be ended midway, leaves alone. It outlives its parent for the same reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from nodeworkers.hardware.tenstorrent_reset import ResetError, reset
from nodeworkers.hardware.wire import card
from planning.devices.cards import Card


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a reset: the `number` that the card has after it, or, where that is None, a sentence why it was not
    reset; and whether it was `begun`, so that the card may be in the middle of it.
    """

    number: int | None
    why: str = ""
    begun: bool = False


def command(card: Card, tree: Path | None = None) -> list[str]:
    """What starts this process for a card; `tree` is that of a simulated machine's Tenstorrent cards."""
    line = [sys.executable, "-I", "-m", "nodeworkers.hardware.resetter", orjson.dumps(card).decode()]
    return line if tree is None else [*line, "--simulated-tree", str(tree.absolute())]


def outcome(printed: bytes) -> Outcome:
    """What this process printed. Raises ValueError where that is something else."""
    found = orjson.loads(printed)
    match found:
        case {"number": int(number), "why": "", "begun": True} if type(number) is int and number >= 0:
            return Outcome(number, begun=True)
        case {"number": None, "why": str(why), "begun": bool(begun)} if why:
            return Outcome(None, why, begun)
    raise ValueError("it is no outcome of a reset")


def main(arguments: Sequence[str]) -> None:
    """`resetter CARD [--simulated-tree DIR]`, the card as JSON."""
    parser = argparse.ArgumentParser(prog="nodeworkers.hardware.resetter", description=__doc__)
    parser.add_argument("card", help="as planning.devices.cards has it, in JSON")
    parser.add_argument("--simulated-tree", type=Path, metavar="DIR", help="where a simulated machine's cards lie")
    asked = parser.parse_args(arguments)
    one, tree = card(orjson.loads(asked.card), "the card"), asked.simulated_tree
    try:
        if tree is None:
            number = reset(one)
        else:
            from nodeworkers.hardware.machine_reset import SimulatedKernel

            number = reset(one, tree / "sys", tree / "dev", SimulatedKernel(tree))
        told = Outcome(number, begun=True)
    except ResetError as error:
        told = Outcome(None, str(error), error.begun)
    os.write(1, orjson.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
