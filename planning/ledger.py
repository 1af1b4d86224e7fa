"""How the placement ledger changes: after a decision, after it was carried out, and when a workload comes back.

Pure transitions that the Placement workflow applies to recorded facts; they decide nothing. A promise of GPUs enters
`in_flight` before anything is written for it and leaves only when its Job was seen, or when none is known to exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planning.model import Decision, Ledger, Turn, Verdict


def after_deciding(ledger: Ledger, decision: Decision, asked: Ledger) -> Ledger:
    """The ledger once `decision` stands: visible promises dropped, new ones taken, withdrawn ones given a next turn.

    `asked` is the ledger that the decision was made on: a turn that came back while it was being made stays. So does
    one that came back for a later Job than the promised one that was seen: it is still to be placed.
    """
    in_flight, turns = dict(ledger.in_flight), dict(ledger.turns)
    held, rejected, made = dict(ledger.held), dict(ledger.rejected), dict(ledger.made)
    for uid in decision.seen:
        made.pop(uid, None)
        promise, turn = in_flight.pop(uid, None), turns.get(uid)
        over = promise is None or turn is None or turn.attempt <= promise.turn.attempt
        if over and turn == asked.turns.get(uid):
            turns.pop(uid, None)
    for uid in decision.forget:
        for facts in (in_flight, turns, held, rejected, made):
            facts.pop(uid, None)
    for withdrawal in decision.withdrawals:
        turns[withdrawal.uid] = later(turns.get(withdrawal.uid), withdrawal.next_turn)
    for verdict in decision.verdicts:
        turns.pop(verdict.uid, None)
        held[verdict.uid] = verdict.turn
    for assignment in decision.assignments:
        in_flight[assignment.uid] = assignment
        rejected.pop(assignment.uid, None)
        made.pop(assignment.uid, None)
    return Ledger(in_flight, turns, held, rejected, made)


def after_carrying_out(
    ledger: Ledger,
    stale: Iterable[str],
    refused: Iterable[Verdict],
    rejected: Mapping[str, int],
    made: Mapping[str, int],
) -> Ledger:
    """The ledger once the decision's effects are known. A stale or refused assignment has no Job: its promise ends.

    `made`: the resourceVersions of the Jobs that were created, by workload UID.
    """
    in_flight, turns, held = dict(ledger.in_flight), dict(ledger.turns), dict(ledger.held)
    for uid in stale:
        in_flight.pop(uid, None)
    for verdict in refused:
        in_flight.pop(verdict.uid, None)
        turns.pop(verdict.uid, None)
        held[verdict.uid] = verdict.turn
    known = {uid: version for uid, version in {**ledger.made, **made}.items() if uid in in_flight}
    return Ledger(in_flight, turns, held, {**ledger.rejected, **rejected}, known)


def after_requeue(ledger: Ledger, uid: str, turn: Turn) -> Ledger:
    """The ledger once a workload came back for `turn`. A doubled or late signal never lowers its attempt number."""
    turn = later(ledger.turns.get(uid), turn)
    held = {u: attempt for u, attempt in ledger.held.items() if u != uid}
    return replace(ledger, turns={**ledger.turns, uid: turn}, held=held)


def later(known: Turn | None, turn: Turn) -> Turn:
    """The later of two turns; neither attempts nor retries ever go back."""
    if known is None:
        return turn
    return Turn(max(known.attempt, turn.attempt), max(known.retries, turn.retries))
