"""Whether each card is well, from one look to the next: with hysteresis, a reason, and always a way back.

For the allocation core. A card's trouble counts at once where its provider is sure, else when it is seen twice; it is
well again after it was seen well for a while, whatever it had. A provider that is silent makes its cards unknown first
(what they offered stays: most silences are short), and unhealthy when that lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from planning.devices.cards import Card, Sight, Trouble

State = Literal["Healthy", "Unhealthy", "Unknown"]

TWICE = 2  # looks in a row with a trouble of which nobody is sure
WELL_LOOKS, WELL_SECONDS = 3, 10.0  # without trouble, until a card that was ill is given out again
SILENT_SECONDS = 30.0  # of a provider, until its cards are not given out any more

VANISHED = "Vanished"
SILENT = "ProviderSilent"
UNSEEN = "NotSeen"
"""Of a card that nobody has looked at since this process began: no news, and neither is that it is well."""


@dataclass(frozen=True, slots=True)
class Health:
    """How a card is. `since` (seconds) is when it became so, `reason` and `message` say why it is not healthy.
    `troubled` and `well` count looks in a row, `well_since` is when the first of those without trouble was, and
    `silent_since` when its provider was first found silent (None: it is not).
    """

    state: State
    reason: str = ""
    message: str = ""
    since: float = 0.0
    troubled: int = 0
    well: int = 0
    well_since: float = 0.0
    silent_since: float | None = None

    @property
    def usable(self) -> bool:
        """Whether its devices are given out: an unknown card's are, for as long as the silence is short."""
        return self.state != "Unhealthy"


def judged(before: Mapping[str, Health], sight: Sight, now: float) -> dict[str, Health]:
    """How the cards of the sight's vendor are. `before` has that vendor's cards and no others; one that is not in the
    sight any more has vanished, and stays until somebody forgets it. Of a sight with a problem that is not said: there
    cards may be missing that are there.
    """
    seen = {card.id for card in sight.cards}
    found = {card.id: _seen(before.get(card.id), sight.troubles.get(card.id), now) for card in sight.cards}
    for card, health in before.items():
        if card not in seen:
            found[card] = _silent(health, sight.problem, now) if sight.problem else _vanished(health, now)
    return found


def unanswered(before: Mapping[str, Health], why: str, now: float) -> dict[str, Health]:
    """What becomes of cards whose provider says nothing: it hangs, or its process ended. `why` is a sentence."""
    return {card: _silent(health, why, now) for card, health in before.items()}


def changes(
    before: Mapping[str, Health], after: Mapping[str, Health], cards: Mapping[str, Card]
) -> list[tuple[str, str]]:
    """For Events: (card, sentence) of each card that became something else. A card that is new and well is no news, nor
    is one that is found well after a start.
    """
    told = []
    for card, health in sorted(after.items()):
        old = before.get(card)
        if health.state == "Healthy" and (old is None or (old.state, old.reason) == ("Unknown", UNSEEN)):
            continue
        if old is not None and (old.state, old.reason) == (health.state, health.reason):
            continue
        name = f"{cards[card].product} {card}" if card in cards else card
        if health.state == "Healthy":
            lasted = max(0.0, health.since - old.since) if old else 0.0  # a clock that went back tells nothing
            passed = f" after {lasted:.0f} s of {old.reason}" if old and old.reason else ""
            told.append((card, f"{name} is well again{passed}"))
        elif health.state == "Unhealthy":
            told.append((card, f"{name} is unhealthy ({health.reason}): {health.message}"))
        else:
            told.append((card, f"The health of {name} is unknown ({health.reason}): {health.message}"))
    return told


def _seen(old: Health | None, trouble: Trouble | None, now: float) -> Health:
    if trouble is None:
        return _well(old, now)
    troubled = (old.troubled if old is not None else 0) + 1
    base = old or Health("Unknown", trouble.reason, trouble.message, now)
    base = replace(base, troubled=troubled, well=0, silent_since=None)
    # A card that nobody has seen well yet is not given out on the word of a first look that saw something.
    if not (trouble.sure or troubled >= TWICE or old is None or base.state == "Unhealthy"):
        return base
    since = base.since if base.state == "Unhealthy" else now
    return replace(base, state="Unhealthy", reason=trouble.reason, message=trouble.message, since=min(since, now))


def _well(old: Health | None, now: float) -> Health:
    if old is None:
        return Health("Healthy", since=now, well=1, well_since=now)
    # A clock that went back begins the wait anew instead of making it endless.
    since = now if old.well == 0 or old.well_since > now else old.well_since
    base = replace(old, troubled=0, well=old.well + 1, well_since=since, silent_since=None)
    if old.state == "Healthy":
        return base
    lasted = base.well >= WELL_LOOKS and now - since >= WELL_SECONDS
    if old.state == "Unknown" or lasted:
        return replace(base, state="Healthy", reason="", message="", since=now)
    return base


def _vanished(old: Health, now: float) -> Health:
    base = replace(old, troubled=old.troubled + 1, well=0, silent_since=None)
    if old.state == "Unhealthy" and old.reason == VANISHED:
        return base
    message = "The kernel does not show it any more: look for its PCI address in the kernel's log; reset or reseat it."
    return replace(base, state="Unhealthy", reason=VANISHED, message=message, since=now)


def _silent(old: Health, why: str, now: float) -> Health:
    began = now if old.silent_since is None else min(old.silent_since, now)
    base = replace(old, well=0, silent_since=began)
    if old.state == "Unhealthy":
        return base
    message = why or "What looks after it does not answer."
    if now - began >= SILENT_SECONDS:
        return replace(base, state="Unhealthy", reason=SILENT, message=message, since=now)
    if old.state == "Unknown":
        return replace(base, message=message)
    return replace(base, state="Unknown", reason=SILENT, message=message, since=now)


def vendor_of(cards: Iterable[Card], health: Mapping[str, Health], vendor: str) -> dict[str, Health]:
    """The part of `health` that is about one vendor's cards; those that vanished have to be among `cards` as well."""
    return {card.id: health[card.id] for card in cards if card.vendor == vendor and card.id in health}
