"""Decides how a seat's server is parked: by what its pod says, by what its node can do, and by what was tried.

For the node, which asks before it parks. Whoever says nothing is parked by the driver, which needs nothing of the
server; the last resort is to end the server and start it anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Way = Literal["cuda-checkpoint", "engine-sleep", "engine-sleep+cuda-checkpoint", "cold"]
"""The backends by name, the third being the first two together: the engine lets go of what it can do without, and the
driver moves the rest."""
Engine = Literal["vllm", "sglang"]

WAYS: tuple[Way, ...] = get_args(Way)
ENGINES: tuple[Engine, ...] = get_args(Engine)
TRIES = 3
"""Parks that may fail in a row before a way counts as tried in vain: a lock whose time is over is no more than that."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a pod says: `way`, None for whatever fits; `engine`: what serves, None where it does not say; `port`:
    whether it answers HTTP.
    """

    way: Way | None = None
    engine: Engine | None = None
    port: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """`ways` by which the server can be parked, the best first, never none; `why_not`: of each other, a sentence."""

    ways: tuple[Way, ...]
    why_not: Mapping[Way, str]


def choose(asked: Asked, missing: Sequence[str] = (), failed: Mapping[Way, str] | None = None) -> Choice:
    """`missing`: what the node's driver lacks for a checkpoint, as sentences; `failed`: ways that were tried with this
    server, and in vain, with what they said.
    """
    why_not: dict[Way, str] = {}
    for way in WAYS:
        if reason := _why_not(way, asked, missing):
            why_not[way] = reason
        elif failed is not None and way in failed and way != "cold":
            why_not[way] = f"It was tried {TRIES} times: {failed[way]}"
    able = [way for way in WAYS if way not in why_not]
    # What was asked for comes first, and what was not only where that cannot be had.
    able.sort(key=lambda way: (way != asked.way, way == "engine-sleep+cuda-checkpoint", WAYS.index(way)))
    return Choice(tuple(able), why_not)


def host_bytes(way: Way, held: int, kept: int | None) -> int:
    """What parking takes of the host, of a server that has so many bytes on its GPUs. `kept`: what its engine kept when
    it slept before, None where it never did: until then all counts.
    """
    if way == "cold":
        return 0
    return kept if "engine-sleep" in way and kept is not None else held


def _why_not(way: Way, asked: Asked, missing: Sequence[str]) -> str:
    if "engine-sleep" in way:
        if asked.engine is None:
            return "Its pod does not say which engine serves (kyb.ai/engine)."
        if not asked.port:
            return "Its pod says no port (kyb.ai/port) on which its engine could be asked."
    if "cuda-checkpoint" in way and missing:
        return " ".join(missing)
    return ""
