"""Decides which caches leave a node's disk when another needs room: those that were unused longest, and never one that
is in use. For the node's store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """A cache on disk: `size` in bytes, `used` the time of its last use in seconds."""

    digest: str
    size: int
    used: float


def to_remove(stored: Iterable[Stored], needed: int, quota: int, in_use: Collection[str]) -> tuple[str, ...] | None:
    """Digests to remove, in this order, so that `needed` more bytes fit into `quota`; None if even all would not do.

    Nothing is removed for what cannot fit anyway.
    """
    caches = sorted(stored, key=lambda each: (each.used, each.digest))
    excess = sum(each.size for each in caches) + needed - quota
    chosen: list[str] = []
    for each in caches:
        if excess <= 0:
            break
        if each.digest not in in_use and each.size > 0:
            chosen.append(each.digest)
            excess -= each.size
    return tuple(chosen) if excess <= 0 else None
