"""Decides when the certificates of the admission webhooks are renewed, so that no call ever meets one that is not
trusted. For the controller that leads, which keeps them in a Secret.

An authority is trusted (it stands in the webhook configurations) before anything is served that it signed, and until
nothing is served any more that it signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DAY = 86400.0
# An authority outlives whatever it signs: its successor comes earlier than the last certificate could be made.
AUTHORITY_LIFE, AUTHORITY_LEFT = 730 * DAY, 120 * DAY
SERVING_LIFE, SERVING_LEFT = 90 * DAY, 30 * DAY
# API servers hear of a changed configuration, and replicas of a changed Secret, within seconds.
SETTLED = 3600.0


@dataclass(frozen=True, slots=True)
class Authority:
    """`begins` and `ends` in seconds since 1970; `name` tells authorities apart."""

    name: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class Serving:
    """The certificate that is served; `issuer` is an authority's name, '' if none of those that are known signed it."""

    issuer: str
    begins: float
    ends: float
    hosts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Stored:
    """What the Secret holds, the newest authority last; only that one's key is kept."""

    authorities: tuple[Authority, ...] = ()
    serving: Serving | None = None


class Step(Enum):
    """What to write into the Secret next."""

    KEEP = "keep"
    BEGIN = "a new authority and a certificate of it, in place of all there was"
    SUCCEED = "one more authority"
    ISSUE = "a new certificate, of the newest authority"
    RETIRE = "only the newest authority"


def next_step(stored: Stored, hosts: frozenset[str], announced: frozenset[str], now: float) -> Step:
    """`hosts` are the names by which webhooks are called; `announced` the authorities that all configurations trust."""
    serving = stored.serving
    newest = stored.authorities[-1] if stored.authorities else None
    if serving is None or newest is None or not newest.begins <= now < newest.ends:
        return Step.BEGIN
    if serving.issuer not in {each.name for each in stored.authorities} or not serving.begins <= now < serving.ends:
        return Step.BEGIN
    if newest.ends - now < AUTHORITY_LEFT:
        return Step.SUCCEED
    settled = newest.name in announced and now - newest.begins >= SETTLED
    own = serving.issuer == newest.name
    wanted = not own or serving.ends - now < SERVING_LEFT or not hosts <= serving.hosts
    if wanted and (own or settled):
        return Step.ISSUE
    if own and len(stored.authorities) > 1 and now - serving.begins >= SETTLED:
        return Step.RETIRE
    return Step.KEEP
