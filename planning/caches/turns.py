"""Decides whose turn it is when many caches have orders for their nodes at once: each order is an open workflow, and
some caches that are Ready everywhere soon are better than all of them late.

For the looks of one worker. Nothing rests on what is known here; after a restart it is found anew.
"""

from __future__ import annotations

from dataclasses import dataclass

PLACES = 512  # orders that are under way over all caches: a worker has more workflows than that at hand
HELD = 60.0  # seconds without a look after which others wait no longer: its nodes take their time, whatever others do


@dataclass(frozen=True, slots=True)
class _Claim:
    places: int
    since: float


class Turns:
    """Who has how many places, and who waits. Whoever waits gets all that it asked for, in the order of asking: with a
    few at a time, all would go on side by side again.
    """

    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._claims: dict[str, _Claim] = {}
        self._waiting: dict[str, int] = {}  # how many places each asked for

    def grant(self, uid: str, wanted: int, now: float) -> int:
        """How many orders may be under way for a cache that would have so many, the present ones among them; 0 wanted:
        it is done. What was granted lately stays. Whoever gets less waits. `now` in seconds, of any one clock.
        """
        wanted = min(wanted, self._places)
        held = self._held(uid, now)
        others = sum(self._held(other, now) for other in self._claims if other != uid)
        ahead = self._waiting.keys() - {uid}
        if wanted <= held or (not ahead and others + wanted <= self._places):
            granted = wanted
            self._waiting.pop(uid, None)
        else:
            granted = held
            self._waiting[uid] = wanted  # whoever waits already keeps its place in the row
        self._claim(uid, granted, now)
        return granted

    def turns(self, now: float) -> list[str]:
        """Those whose turn has come: their places are held for them, and they are to ask again."""
        taken = sum(self._held(uid, now) for uid in self._claims)
        due: list[str] = []
        for uid, wanted in list(self._waiting.items()):
            taken += wanted - self._held(uid, now)
            if taken > self._places:
                break
            del self._waiting[uid]
            self._claim(uid, wanted, now)
            due.append(uid)
        return due

    def _claim(self, uid: str, places: int, now: float) -> None:
        self._claims.pop(uid, None)
        if places > 0:
            self._claims[uid] = _Claim(places, now)

    def _held(self, uid: str, now: float) -> int:
        claim = self._claims.get(uid)
        return claim.places if claim is not None and now - claim.since < HELD else 0
