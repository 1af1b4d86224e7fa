"""How the placement ledger changes: after a decision, after it was carried out, and when a workload comes back.

Pure transitions that the Placement workflow applies to recorded facts; they decide nothing. A promise of GPUs enters
`in_flight` before anything is written for it and leaves only when its Job was seen, or when none is known to exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planning.model import AVOIDED_NODES, Avoided, Decision, Ledger, Provisioning, Turn, Verdict, Withdrawal

# Workloads whose avoided nodes are remembered, and of those that could not be stopped: the latest, for the ledger goes
# into every round's history.
_AVOIDING = _SPARED = 256


def after_deciding(ledger: Ledger, decision: Decision) -> Ledger:
    """The ledger once `decision` stands: visible promises dropped, new ones taken. Whether a Job was withdrawn is known
    only when it was tried.

    A workload's turn stays until the workload is gone: should its Job vanish, the next one must not begin at 0 again.
    """
    in_flight, turns, held = dict(ledger.in_flight), dict(ledger.turns), dict(ledger.held)
    accepted, rejected, made = dict(ledger.accepted), dict(ledger.rejected), dict(ledger.made)
    avoided, spared = dict(ledger.avoided), dict(ledger.spared)
    clearing = {uid: jobs for uid, jobs in ledger.clearing.items() if uid not in decision.cleared}
    provisioning = {uid: known for uid, known in ledger.provisioning.items() if uid not in decision.unprovisioned}
    provisioning |= decision.provisioning
    for uid in decision.seen:
        in_flight.pop(uid, None)
        made.pop(uid, None)
    rooms = {**ledger.rooms, **decision.rooms}
    for uid in decision.forget:
        for facts in (in_flight, turns, held, accepted, rejected, made, avoided, clearing, rooms, provisioning, spared):
            facts.pop(uid, None)
    for uid in decision.reconsidered:
        avoided.pop(uid, None)
    for uid in decision.stoppable:
        spared.pop(uid, None)
    for withdrawal in decision.withdrawals:
        if not withdrawal.generation:
            turns[withdrawal.uid] = later(turns.get(withdrawal.uid), withdrawal.next_turn)
    for verdict in decision.verdicts:
        held[verdict.uid] = verdict.turn
    for assignment in decision.assignments:
        in_flight[assignment.uid] = assignment
        made.pop(assignment.uid, None)
    for stop in decision.preemptions:
        clearing[stop.winner] = stop.winner_generation
    return Ledger(
        in_flight=in_flight,
        turns=turns,
        held=held,
        accepted=accepted,
        rejected=rejected,
        made=made,
        avoided=avoided,
        lately=decision.lately or ledger.lately,
        clearing=clearing,
        rooms={uid: places for uid, places in rooms.items() if uid in clearing},
        provisioning=provisioning,
        spared=spared,
        reserved=ledger.reserved if decision.reserved is None else decision.reserved,
    )


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
    spared: Mapping[str, float],
) -> Ledger:
    """The ledger once the decision's effects are known. A stale or refused assignment has no Job: its promise ends. A
    stale withdrawal took no Job back: that Job's turn goes on. All other `withdrawals` bring their next turn. A stale
    verdict reached nobody: its workload is not held.

    `made`: the resourceVersions of the Jobs that were created, by workload UID. `spared`: whose Job could not be
    stopped, and until when nobody tries again.
    """
    in_flight, turns, held, undone = dict(ledger.in_flight), dict(ledger.turns), dict(ledger.held), set(stale)
    taken_back = [w for w in withdrawals if w.generation and w.uid not in undone]
    for withdrawal in taken_back:
        turns[withdrawal.uid] = later(turns.get(withdrawal.uid), withdrawal.next_turn)
    for verdict in refused:
        in_flight.pop(verdict.uid, None)
        # Its workflow was told already, and may have come back for the next turn before this was known.
        if later(turns.get(verdict.uid), verdict.turn) == verdict.turn:
            held[verdict.uid] = verdict.turn
    for uid in undone:
        in_flight.pop(uid, None)
        held.pop(uid, None)
    known = {uid: version for uid, version in {**ledger.made, **made}.items() if uid in in_flight}
    return Ledger(
        in_flight,
        turns,
        held,
        {**ledger.accepted, **accepted},
        {**ledger.rejected, **rejected},
        known,
        _avoiding(ledger.avoided, taken_back),
        ledger.lately,
        ledger.clearing,
        ledger.rooms,
        {u: p for u, p in ledger.provisioning.items() if not (u in undone and p.state == "ordered")},
        dict(list({**ledger.spared, **spared}.items())[-_SPARED:]),
        ledger.reserved,
    )


def after_requeue(ledger: Ledger, uid: str, turn: Turn) -> Ledger:
    """The ledger once a workload came back for `turn`. A doubled or late signal never lowers its attempt number."""
    turn = later(ledger.turns.get(uid), turn)
    # A doubled signal about an older turn does not release a verdict about this one.
    held = {u: about for u, about in ledger.held.items() if u != uid or about.attempt >= turn.attempt}
    return replace(ledger, turns={**ledger.turns, uid: turn}, held=held)


def after_provisioning(ledger: Ledger, uid: str, generation: int, now: Provisioning | None) -> Ledger:
    """The ledger once a workload's order of that generation stands at `now` (None: nobody follows it any more). News of
    an order that the ledger has not, or of another spec's, changes nothing.
    """
    known = ledger.provisioning.get(uid)
    if known is None or known.generation != generation or not known.open:
        return ledger
    others = {u: each for u, each in ledger.provisioning.items() if u != uid}
    return replace(ledger, provisioning=others if now is None else {**others, uid: now})


def _avoiding(avoided: Mapping[str, Avoided], taken_back: Iterable[Withdrawal]) -> dict[str, Avoided]:
    """What is avoided once these Jobs were taken back: of nodes and of workloads the latest, and no more than fit."""
    found = dict(avoided)
    for withdrawal in taken_back:
        if withdrawal.avoid:
            known = found.pop(withdrawal.uid, None)
            before = known.nodes if known is not None and known.generation == withdrawal.generation else ()
            nodes = (*(name for name in before if name != withdrawal.avoid), withdrawal.avoid)
            found[withdrawal.uid] = Avoided(withdrawal.generation, nodes[-AVOIDED_NODES:])
    return dict(list(found.items())[-_AVOIDING:])


def later(known: Turn | None, turn: Turn) -> Turn:
    """The later of two turns; neither attempts nor retries ever go back."""
    if known is None:
        return turn
    return Turn(max(known.attempt, turn.attempt), max(known.retries, turn.retries))
