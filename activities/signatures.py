"""What workflows may ask of activities: names, arguments and results, and nothing that does the work.

Workflows import this module only, so that no history depends on how an effect is carried out. Every value here is
small (law 4): names, UIDs, versions and recorded decisions; specs and objects are read again where they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from planning.model import Decision, Lately, Ledger, Stage, Turn, Verdict

TASK_QUEUE = "control-plane"

DECIDE = "decide"
CARRY_OUT = "carry_out"
FOLLOW = "follow"
HAND_BACK = "hand_back"
LEARN = "learn"

ARRANGE = "arrange"
TAKE_BACK = "take_back"

# How long an activity may give no sign of life (activities.heartbeats) until it counts as lost: three are missed then.
SILENCE = timedelta(seconds=15)

# Statuses that one round brings up to date at most, so that placing does not wait for showing.
STATUS_LIMIT = 200

# For each watched kind (plural name), the newest resourceVersion that somebody has seen: a reader waits for it.
Versions = dict[str, int]


@dataclass(frozen=True)
class WorkloadRef:
    uid: str
    namespace: str
    name: str


@dataclass(frozen=True)
class DecideRequest:
    """`fresh` is worth a short wait (somebody saw news); `at_least` is binding (earlier decisions' `versions`)."""

    ledger: Ledger
    fresh: Versions
    at_least: Versions
    limit: int
    seed: int


@dataclass(frozen=True)
class DecideResult:
    """`versions`: what every later decision must have seen, for a promise was dropped or a place was given at it.

    `behind`: the cache had not caught up with `fresh` in time, so the round may have missed the news.
    `restored`: the API server itself is older than `at_least` or `fresh`: its data was restored, and what was seen of
    it before means nothing.
    `lagging`: how many statuses do not tell yet that their Job was made, or runs. `quotas`: those of GPUQuotas,
    `reservations`: those of GPUReservations.
    `learn_in`: seconds until workloads that ended can be learned from (0: now); None while there is nothing to learn.
    `quotas_in`: seconds until more of these two kinds' statuses may be written; None while there are none.
    """

    decision: Decision
    versions: Versions
    behind: bool = False
    restored: bool = False
    lagging: int = 0
    quotas: int = 0
    learn_in: float | None = None
    quotas_in: float | None = None
    reservations: int = 0


@dataclass(frozen=True)
class CarryOut:
    """A decision to carry out; the statuses that lag behind their Jobs are brought up to date with it.

    `lately` and `reserved`: the ledger's, where statuses are to tell of them.
    """

    decision: Decision
    lately: dict[str, Lately] = field(default_factory=dict)
    reserved: dict[str, dict[str, int]] | None = None


@dataclass
class CarriedOut:
    """What became of a decision, noted as it is carried out; in the end every assignment is in one of `made`, `stale`
    and `refused`, and every withdrawal that took no Job back in `stale`. Of preemptions only those are noted that were
    refused, in `spared`: all others the next round sees.
    """

    made: dict[str, int] = field(default_factory=dict)  # the Job's resourceVersion, by workload UID
    stale: list[str] = field(default_factory=list)  # changed, gone or out of reach, nothing was done: decide again
    refused: list[Verdict] = field(default_factory=list)  # the API server refused the Job
    accepted: dict[str, int] = field(default_factory=dict)  # template taken in a dry run, by UID -> generation
    rejected: dict[str, int] = field(default_factory=dict)  # template refused in a dry run, by UID -> generation
    lagging: int = 0  # statuses that still do not tell of their Job: it is not visible yet, or they were not written
    shown: int = 0  # statuses that were brought up to date
    spared: dict[str, float] = field(default_factory=dict)  # could not be stopped, by UID -> until when nobody tries


@dataclass(frozen=True)
class Learned:
    """How many runs were learned, in how many profiles; `next_in` as `DecideResult.learn_in`, after that."""

    runs: int = 0
    profiles: int = 0
    next_in: float | None = None


@dataclass(frozen=True)
class FollowRequest:
    """`jitter` is in [0, 1): the share of the 10 % that a retry's delay is stretched by."""

    ref: WorkloadRef
    turn: Turn
    fresh: Versions
    jitter: float
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Followed:
    """What the workload's workflow does next.

    wait: nothing until the next poke (`within`: look again after so many seconds).
    retry: after `within` seconds, or at once if 0, hand the workload back to the ledger with `turn`.
    end: the workload finished or is gone; `phase` is what to show.

    `restored`: the API server is older than what was seen of it; no look needs to wait for that again.
    """

    next: Literal["wait", "retry", "end"]
    phase: str
    message: str
    turn: Turn
    within: float | None = None
    node: str = ""
    restored: bool = False


@dataclass(frozen=True)
class ArrangeRequest:
    """`known`: this attempt's request was made. `told`: how far the ledger and the workload's status have heard."""

    ref: WorkloadRef
    generation: int
    attempt: int
    known: bool
    told: Stage
    fresh: Versions
    jitter: float


@dataclass(frozen=True)
class Arranged:
    """What the workflow of an order does next: as planning.requests.Step, which it was. `attempt`: whose request it is
    about (another's was taken over).
    """

    next: Literal["wait", "retry", "fail", "over"]
    message: str
    attempt: int
    within: float = 0.0
    stage: Stage = ""


@dataclass(frozen=True)
class TakeBack:
    """Deletes what was made for an order, and then lets the ledger know where it stands: 'over' and 'failed' end it,
    'ordered' takes a booking back, '' is no news.

    `attempt`: the last one for which something was made; what is there of others goes too.
    """

    ref: WorkloadRef
    generation: int
    attempt: int
    state: Literal["", "ordered", "failed", "over"]
    at: float = 0.0
    pool: str = "default"
    known: bool = True  # whether this attempt's request is known to have been made


@dataclass(frozen=True)
class HandBack:
    """Back to the queue: the ledger learns the turn first, then the old Jobs are deleted."""

    ref: WorkloadRef
    turn: Turn
    pool: str = "default"
