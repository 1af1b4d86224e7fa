"""What a node offers under which name: the words that seats and the allocation core share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """A seat on a group of cards. `id` is `kyb-<group>-s<k>`, `cards` are ids of cards."""

    id: str
    resource: str
    group: str
    cards: tuple[str, ...]
