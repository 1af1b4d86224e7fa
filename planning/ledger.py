"""How the placement ledger changes: after a decision, after it was carried out, and when a workload comes back.

Pure transitions that the Placement workflow applies to recorded facts; they decide nothing. A promise of GPUs enters
`in_flight` before anything is written for it and leaves only when its Job was seen, or when none is known to exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planning.model import Decision, Ledger, Turn, Verdict, Withdrawal


def after_deciding(ledger: Ledger, decision: Decision) -> Ledger:
    """The ledger once `decision` stands: visible promises dropped, new ones taken. Whether a Job was withdrawn is known
    only when it was tried.

    A workload's turn stays until the workload is gone: should its Job vanish, the next one must not begin at 0 again.
    """
    in_flight, turns, held = dict(ledger.in_flight), dict(ledger.turns), dict(ledger.held)
    accepted, rejected, made = dict(ledger.accepted), dict(ledger.rejected), dict(ledger.made)
    for uid in decision.seen:
        in_flight.pop(uid, None)
        made.pop(uid, None)
    for uid in decision.forget:
        for facts in (in_flight, turns, held, accepted, rejected, made):
            facts.pop(uid, None)
    for withdrawal in decision.withdrawals:
        if not withdrawal.generation:
            turns[withdrawal.uid] = later(turns.get(withdrawal.uid), withdrawal.next_turn)
    for verdict in decision.verdicts:
        held[verdict.uid] = verdict.turn
    for assignment in decision.assignments:
        in_flight[assignment.uid] = assignment
        made.pop(assignment.uid, None)
    return Ledger(in_flight, turns, held, accepted, rejected, made)


def still_due(ledger: Ledger, decision: Decision) -> Decision:
    """The decision without assignments of turns that are over.

    A planner that was asked before a workload came back, and looked when its old Job had gone, gives the old turn
    again.
    """
    due = [a for a in decision.assignments if later(ledger.turns.get(a.uid), a.turn) == a.turn]
    return replace(decision, assignments=due)


def after_carrying_out(
    ledger: Ledger,
    withdrawals: Iterable[Withdrawal],
    stale: Iterable[str],
    refused: Iterable[Verdict],
    accepted: Mapping[str, int],
    rejected: Mapping[str, int],
    made: Mapping[str, int],
) -> Ledger:
    """The ledger once the decision's effects are known. A stale or refused assignment has no Job: its promise ends. A
    stale withdrawal took no Job back: that Job's turn goes on. All other `withdrawals` bring their next turn. A stale
    verdict reached nobody: its workload is not held.

    `made`: the resourceVersions of the Jobs that were created, by workload UID.
    """
    in_flight, turns, held, undone = dict(ledger.in_flight), dict(ledger.turns), dict(ledger.held), set(stale)
    for withdrawal in withdrawals:
        if withdrawal.generation and withdrawal.uid not in undone:
            turns[withdrawal.uid] = later(turns.get(withdrawal.uid), withdrawal.next_turn)
    for verdict in refused:
        in_flight.pop(verdict.uid, None)
        held[verdict.uid] = verdict.turn
    for uid in undone:
        in_flight.pop(uid, None)
        held.pop(uid, None)
    known = {uid: version for uid, version in {**ledger.made, **made}.items() if uid in in_flight}
    return Ledger(in_flight, turns, held, {**ledger.accepted, **accepted}, {**ledger.rejected, **rejected}, known)


def after_requeue(ledger: Ledger, uid: str, turn: Turn) -> Ledger:
    """The ledger once a workload came back for `turn`. A doubled or late signal never lowers its attempt number."""
    turn = later(ledger.turns.get(uid), turn)
    # A doubled signal about an older turn does not release a verdict about this one.
    held = {u: about for u, about in ledger.held.items() if u != uid or about.attempt >= turn.attempt}
    return replace(ledger, turns={**ledger.turns, uid: turn}, held=held)


def later(known: Turn | None, turn: Turn) -> Turn:
    """The later of two turns; neither attempts nor retries ever go back."""
    if known is None:
        return turn
    return Turn(max(known.attempt, turn.attempt), max(known.retries, turn.retries))
