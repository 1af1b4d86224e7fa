"""Reads the log of simulated GPUs and says what must not have been: an independent witness, who knows nothing of slots,
workflows or the node's ledger.

`python -m nodeworkers.seats.simulated_gpu.checker FOLDER`
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOREIGN = "foreign:"
"""What the name of a process that is no seat begins with: it may be beside one, as long as both have room."""
_COMES, _GOES = frozenset({"alloc", "restore", "wake"}), frozenset({"checkpoint", "sleep", "buried"})


@dataclass(slots=True)
class Verdict:
    """`wrong`: sentences, in order. The rest is counted: moves of memory onto cards and off them, and their bytes."""

    wrong: list[str] = field(default_factory=list)
    restores: int = 0
    checkpoints: int = 0
    bytes: int = 0
    servers: set[str] = field(default_factory=set)


def check(lines: Iterable[str]) -> Verdict:
    """Whether ever two servers had memory on one card, or one came back without room or with other memory."""
    verdict = Verdict()
    sums: defaultdict[str, set[int]] = defaultdict(set)  # by process, of what it filled its memory with
    on: defaultdict[str, dict[str, tuple[str, int]]] = defaultdict(dict)  # by card and process: server and bytes
    for number, line in enumerate(lines, 1):
        try:
            event: Mapping[str, Any] = json.loads(line)
            _take(verdict, on, sums, event)
        except (ValueError, KeyError, TypeError) as error:
            verdict.wrong.append(f"line {number} makes no sense: {error!r:.100}")
    return verdict


def _take(
    verdict: Verdict,
    on: Mapping[str, dict[str, tuple[str, int]]],
    sums: Mapping[str, set[int]],
    event: Mapping[str, Any],
) -> None:
    op, server, id, at = event["op"], event["server"], event["id"], event["time"]
    if server:
        verdict.servers.add(server)
    if op in _COMES:
        card, size = event["card"], event["bytes"]
        for other, (name, there) in on[card].items():
            if name != server and not name.startswith(FOREIGN) and not server.startswith(FOREIGN):
                verdict.wrong.append(
                    f"at {at:.3f} {server} got {size} bytes of {card}, where {name} ({other}) had {there}"
                )
        on[card][id] = server, size
        verdict.restores += op != "alloc"
        verdict.bytes += size
    elif op in _GOES:
        on[event["card"]].pop(id, None)
        verdict.checkpoints += op != "buried"
    elif op == "restore-failed" and not event["fault"]:
        verdict.wrong.append(f"at {at:.3f} {server} was restored without room: {event['why']}")
    elif op == "filled":
        sums[id].add(event["sum"])
    elif op == "checked" and event["sum"] not in sums[id]:
        verdict.wrong.append(f"at {at:.3f} {server} got other memory back on {event['card']} than it had")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m nodeworkers.seats.simulated_gpu.checker FOLDER", file=sys.stderr)
        return 2
    with (Path(sys.argv[1]) / "log.jsonl").open() as log:
        verdict = check(log)
    print(
        f"{verdict.checkpoints} times memory left a card, {verdict.restores} times it came back, of "
        f"{len(verdict.servers)} servers"
    )
    for sentence in verdict.wrong:
        print(sentence)
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
