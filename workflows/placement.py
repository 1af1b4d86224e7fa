"""Placement: the ledger of a pool, the only writer of assignments.

Takes pokes, decides in batches by a planner activity, remembers each promise before it is carried out and forgets it
only when the planner has seen its Job, or none is known to exist. One round costs the same few events whether it
places one workload or a hundred.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.messages import OrderNews, PlacementState, Poke, Requeue
from activities.signatures import (
    CARRY_OUT,
    DECIDE,
    LEARN,
    SILENCE,
    STATUS_LIMIT,
    CarriedOut,
    CarryOut,
    DecideRequest,
    DecideResult,
    Learned,
    Versions,
)
from planning.ledger import after_carrying_out, after_deciding, after_provisioning, after_requeue, still_due
from planning.model import Decision

# Assignments per round: large enough to share a round's events, small enough that the round is soon over, for a GPU
# that comes free meanwhile waits for the next. Jobs are made 32 at once, and statuses that lag are written after them.
ROUND_LIMIT = 100
# Promises that may wait to be seen at once. They are carried in the history (480 bytes each, and 590 where a stopped
# Job goes on), and while the planner's watch is silent none of them is seen.
PROMISES = 1000
# While somebody waits, look again this often even if no poke came: a lost poke costs a minute, not a day.
RECHECK = timedelta(seconds=60)
# After a round that could not see the latest news.
CATCH_UP = timedelta(seconds=2)
# Between two times of learning from workloads that ended: nobody waits for it, and it costs events.
LEARN_PAUSE = 60.0
# Kinds whose changes concern the ledger even when nobody waits: a workload is new, its Job runs or vanished, or a
# quota or a reservation was edited.
WORKLOAD_NEWS = frozenset({"gpuworkloads", "jobs", "gpuquotas", "gpureservations"})
RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=15))


def newest(a: Versions, b: Versions) -> Versions:
    """The newer resourceVersion of each kind."""
    return {kind: max(a.get(kind, 0), b.get(kind, 0)) for kind in sorted({*a, *b})}


def _effects(decision: Decision, lagging: int, quotas: int, reservations: int) -> dict[str, int]:
    """What there is to carry out, counted, under words for people."""
    found = {
        "placed": len(decision.assignments),
        "preempted": len(decision.preemptions),
        "withdrawn": len(decision.withdrawals),
        "ungated": len(decision.pins),
        "impossible": len(decision.verdicts),
        "ended": len(decision.completions),
        "told to wait": len(decision.waiting),
        "told when": len(decision.expected),
        "examined": len(decision.examine),
        "ordered": len(decision.orders),
        "shown": lagging,
        "quotas shown": quotas,
        "reservations shown": reservations,
    }
    return {what: count for what, count in found.items() if count}


@workflow.defn(name="Placement", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class Placement:
    @workflow.init
    def __init__(self, state: PlacementState) -> None:
        self._state = state
        self._poked = True
        self._last = Decision()
        self._behind = False
        self._stale_rounds = 0
        self._in_round = False
        self._learn_in: float | None = None
        self._learned = 0.0
        self._quotas_in: float | None = None

    @workflow.signal(description="Something changed in the cluster: look again")
    def poke(self, poke: Poke) -> None:
        self._state.fresh = newest(self._state.fresh, poke.seen)
        # Room that came free concerns only those who wait for it, and promises that wait to be seen.
        waiting = self._in_round or self._last.queued or self._state.ledger.in_flight
        if waiting or not poke.seen.keys().isdisjoint(WORKLOAD_NEWS):
            self._poked = True

    @workflow.signal(description="A workload comes back for its next turn")
    def requeue(self, back: Requeue) -> None:
        known = self._state.ledger
        self._state.ledger = after_requeue(known, back.uid, back.turn)
        self._poked |= self._state.ledger != known

    @workflow.signal(description="How far a workload's order of a node is")
    def provisioning(self, news: OrderNews) -> None:
        known = self._state.ledger
        self._state.ledger = after_provisioning(known, news.uid, news.generation, news.now)
        self._poked |= self._state.ledger != known

    @workflow.query(description="The ledger as it stands: promises in flight, turns, verdicts")
    def ledger(self) -> PlacementState:
        return self._state

    @workflow.run
    async def run(self, state: PlacementState) -> None:
        while not workflow.info().is_continue_as_new_suggested():
            wait = self._next_look()
            if not self._poked:
                with contextlib.suppress(TimeoutError):
                    await workflow.wait_condition(self._awake, timeout=wait, timeout_summary="look again")
            self._in_round = True
            await self._round()
            self._in_round = False
        # Signals that arrived during the last round are in the state already, for their handlers never wait.
        workflow.continue_as_new(self._state)

    async def _round(self) -> None:
        self._poked = False
        fresh, self._state.fresh = self._state.fresh, {}
        limit = max(0, min(ROUND_LIMIT, PROMISES - len(self._state.ledger.in_flight)))
        result = await workflow.execute_activity(
            DECIDE,
            DecideRequest(
                ledger=self._state.ledger,
                fresh=fresh,
                at_least=self._state.versions,
                limit=limit,
                seed=workflow.random().getrandbits(63),
            ),
            result_type=DecideResult,
            start_to_close_timeout=timedelta(seconds=60),
            heartbeat_timeout=SILENCE,
            retry_policy=RETRY,
            summary=f"round {self._state.rounds + 1}",
        )
        decision = still_due(self._state.ledger, result.decision)
        # After a restore the cluster's versions begin anew; those of its former life bind nobody.
        self._state.versions = result.versions if result.restored else newest(self._state.versions, result.versions)
        # The promise is in this history before anything is written for it: a crash from here on cannot forget it.
        self._state.ledger = after_deciding(self._state.ledger, decision)
        self._state.rounds += 1
        self._last = decision
        self._behind = result.behind
        if result.behind and not result.restored:
            self._state.fresh = newest(self._state.fresh, fresh)
        # As it was decided, so that what is dropped from it changes no command.
        if effects := _effects(result.decision, result.lagging, result.quotas, result.reservations):
            done = await workflow.execute_activity(
                CARRY_OUT,
                CarryOut(
                    replace(
                        decision,
                        seen=[],
                        forget=[],
                        reconsidered=[],
                        lately={},
                        reasons={},
                        rooms={},
                        provisioning={},
                        unprovisioned=[],
                        stoppable=[],
                        reserved=None,
                    ),
                    self._state.ledger.lately if result.quotas else {},
                    self._state.ledger.reserved if result.reservations else None,
                ),
                result_type=CarriedOut,
                start_to_close_timeout=timedelta(minutes=5),
                heartbeat_timeout=SILENCE,
                retry_policy=RETRY,
                summary=", ".join(f"{count} {what}" for what, count in effects.items()),
            )
            self._state.ledger = after_carrying_out(
                self._state.ledger,
                decision.withdrawals,
                done.stale,
                done.refused,
                done.accepted,
                done.rejected,
                done.made,
                done.spared,
            )
            # Whoever changed a workload pokes for it; the rest is a cache that is behind, or Jobs that nobody may stop,
            # and gets longer and longer.
            again = bool(done.stale or done.lagging or done.spared)
            self._stale_rounds = self._stale_rounds + 1 if again and not (done.made or done.shown) else 0
            self._behind |= again
            self._poked |= bool(decision.examine) or done.shown >= STATUS_LIMIT
        if decision.more and limit:  # else it goes on when promises were seen, of which pokes tell
            self._poked = True
        self._learn_in = result.learn_in
        self._quotas_in = result.quotas_in
        if result.learn_in is not None and max(result.learn_in, self._pause()) <= 0:
            await self._learn()
        self._describe()

    async def _learn(self) -> None:
        """Has profiles learn from workloads that ended. If it fails nothing is lost: the next time learns them too."""
        self._learned = workflow.time()
        try:
            learned: Learned = await workflow.execute_activity(
                LEARN,
                result_type=Learned,
                start_to_close_timeout=timedelta(seconds=30),
                retry_policy=RetryPolicy(maximum_attempts=1),
                summary="learn from workloads that ended",
            )
        except ActivityError as failed:
            if is_cancelled_exception(failed):
                raise
        else:
            self._learn_in = learned.next_in

    def _pause(self) -> float:
        """Seconds before it may learn again."""
        return self._learned + LEARN_PAUSE - workflow.time()

    def _awake(self) -> bool:
        # Signals that wake nobody still make the history longer.
        return self._poked or workflow.info().is_continue_as_new_suggested()

    def _next_look(self) -> timedelta | None:
        """How long to sleep when nobody pokes: until the next bind deadline, or a minute while somebody waits."""
        waits = [CATCH_UP * 2 ** min(self._stale_rounds, 4)] if self._behind else []
        if self._last.wake_after is not None:
            waits.append(timedelta(seconds=max(1.0, self._last.wake_after)))
        if self._last.queued or self._state.ledger.in_flight:
            waits.append(RECHECK)
        if self._learn_in is not None:
            waits.append(timedelta(seconds=max(1.0, self._learn_in, self._pause())))
        if self._quotas_in is not None:
            waits.append(timedelta(seconds=self._quotas_in))
        return min(waits, default=None)

    def _describe(self) -> None:
        ledger = self._state.ledger
        workflow.set_current_details(
            f"**Pool {self._state.pool}**, round {self._state.rounds}\n\n"
            f"- waiting for a place: {self._last.queued}\n"
            f"- promises not yet visible: {len(ledger.in_flight)}\n"
            f"- handed to their own workflow with a verdict: {len(ledger.held)}\n"
            f"- templates refused: {len(ledger.rejected)}\n"
            f"- last round: {len(self._last.assignments)} placed, {len(self._last.withdrawals)} withdrawn, "
            f"{len(self._last.verdicts)} impossible\n"
        )
