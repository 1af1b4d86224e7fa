"""Decides one round of placement: which queued workloads get which nodes now, and what all others are told.

For the planner activity. The order is priority, then age, then name. A workload that does not fit is skipped and later
ones may take what is free, so a large one can be overtaken by small ones for as long as they keep coming; reserving
room for it (backfill) is left to a later issue. The same snapshot, ledger and seed give the same decision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings
from planning import status, strategies
from planning.capacity import Belongings, Room, room, standing
from planning.demand import learned
from planning.filters import Constraints, Shape, able_when_empty, explain_never, explain_now, refusal
from planning.jobs import refusal as spec_refusal
from planning.lifecycle import JOB_REFUSED, NO_SUITABLE_NODE, WITHDRAWN
from planning.memory import Memory
from planning.model import (
    AVOIDED_NODES,
    Assignment,
    Decision,
    Defaults,
    Ledger,
    Snapshot,
    Turn,
    Verdict,
    Waiting,
    WorkloadView,
)
from planning.naming import job_name
from planning.strategies import Request, Strategy, StrategyError
from planning.strategies.random import Random
from planning.withdrawals import next_deadline, to_reconsider, withdrawals

INVALID = "Invalid"
UNKNOWN_STRATEGY = "UnknownStrategy"
STRATEGY_FAILED = "StrategyFailed"
TEMPLATE_REFUSED = "TemplateRefused"
WAITING_FOR_CAPACITY = "WaitingForCapacity"
WAITING_FOR_PODS = "WaitingForPods"

# A decision goes through a history and must stay far below 1 MiB (law 4): beyond this the rest is left to the next
# round. An entry's own size is its message and about this much for names and punctuation.
_BUDGET = 384 * 1024
_ENTRY = 448

_PODLESS = (
    "no pod could be created for its Jobs: a quota, the namespace's PodSecurity level or a webhook refuses them "
    "(`kubectl get events` of the namespace names it)"
)


@dataclass(slots=True)
class _Budget:
    left: int = _BUDGET

    def pays(self, message: str) -> bool:
        """Whether one more entry with this message still fits; counts it if so."""
        cost = _ENTRY + len(message) * 2
        if cost > self.left:
            return False
        self.left -= cost
        return True


@dataclass(slots=True)
class _Queued:
    """A workload that wants a place now."""

    view: WorkloadView
    turn: Turn
    shape: Shape
    strategy: str
    limit: int  # retries that the workload allows


class _Floor:
    """The nodes during one round: what is left on them, and what was found out about shapes so far."""

    def __init__(self, snapshot: Snapshot, settings: Settings, left: dict[str, Room], memory: Memory) -> None:
        self.nodes, self.left = snapshot.nodes, left
        self.full: dict[Shape, bool] = {}  # no room for this shape -> whether any node could ever
        self._fleet = memory.fleet
        self._fleet.refresh((node, left[node.name]) for node in snapshot.nodes)
        self._messages: dict[Shape, str] = {}
        self._refusals: dict[Constraints, list[str]] = {}
        self._strategies: dict[str, Strategy] = {}
        self._learned = partial(learned, snapshot.workloads, partial(memory.shape, settings=settings), snapshot.now)

    def take(self, wish: _Queued, strategy: str, seed: int, avoided: Collection[str] = ()) -> str:
        """The node that holds the request from now on; '' if none does, but for those to avoid."""
        view, need = wish.view, wish.shape.requests
        request = Request(view.uid, view.namespace, view.name, need, seed)
        place = self._fleet.find(request, wish.shape, self._strategy(strategy), avoided)
        if place is None:
            return ""
        self._fleet.take(place, need)
        self.left[place.node].take(need)
        return place.node

    def _strategy(self, name: str) -> Strategy:
        known = self._strategies.get(name)
        if known is None:
            known = self._strategies[name] = strategies.informed(name, self._learned)
        return known

    def never(self, shape: Shape) -> bool:
        """Whether no node could hold the shape even empty; remembers that it does not fit now."""
        if shape not in self.full:
            self.full[shape] = not any(able_when_empty(shape, node) for node in self.nodes)
        return self.full[shape]

    def explain(self, shape: Shape) -> str:
        if shape not in self._messages:
            if self.never(shape):
                self._messages[shape] = explain_never(shape, self.nodes)
            else:
                refusals = self._refusals.get(shape.constraints)
                if refusals is None:
                    refusals = [refusal(shape.constraints, node) for node in self.nodes]
                    self._refusals[shape.constraints] = refusals
                self._messages[shape] = explain_now(shape, self.nodes, self.left, refusals)
        return self._messages[shape]


def decide(
    snapshot: Snapshot, ledger: Ledger, settings: Settings, *, limit: int, seed: int, memory: Memory | None = None
) -> Decision:
    """One round: at most `limit` assignments, and as many other entries as a history takes; `more` tells of a rest.

    Every assignment carries the resourceVersion at which the workload was seen: whoever applies it makes that a
    precondition, so that a decision on an old view ends as stale and not as a Job. `memory` of earlier rounds changes
    nothing but how long this one takes.
    """
    memory = memory or Memory()
    memory.begin(settings)
    mine = Belongings.of(snapshot.jobs, snapshot.pods)
    promised = standing(snapshot, ledger, mine)
    floor = _Floor(snapshot, settings, room(snapshot, promised, mine), memory)
    decision, budget = Decision(), _Budget()
    more, queued = False, 0
    reconsidered = to_reconsider(snapshot, mine, ledger)

    for withdrawal in withdrawals(snapshot, mine, settings):
        if budget.pays(withdrawal.message):
            decision.withdrawals.append(withdrawal)
        else:
            more = True

    queue: list[_Queued] = []
    for view in snapshot.workloads:
        if view.finished or view.deleting or view.uid in ledger.held or view.uid in promised:
            continue
        turn = ledger.turns.get(view.uid, Turn())
        jobs = mine.jobs.get((view.namespace, view.uid), ())
        if any(job.attempt >= turn.attempt or not (job.finished or job.deleting) for job in jobs):
            continue  # its Job is there, and tells what comes next; one that goes on is as good as its turn's
        found = _examine(view, turn, ledger, settings, snapshot.defaults, memory)
        if isinstance(found, _Queued):
            if not jobs and (view.namespace, view.uid) not in mine.pods:
                queue.append(found)
                continue
            queued += 1
            left_over = len(jobs) + len(mine.pods.get((view.namespace, view.uid), ()))
            found = _wait(view, WAITING_FOR_PODS, f"waiting for the previous Job and its pods to go ({left_over} left)")
        if found.reason == UNKNOWN_STRATEGY:
            queued += 1  # the default may be repaired, and nobody pokes for a namespace or the settings
        if found.reason == status.EXAMINING:
            entries = decision.examine
        elif status.shows(view, found.reason):
            continue
        elif found.reason == WAITING_FOR_PODS and status.shows(view, WITHDRAWN):
            continue  # that tells more
        else:
            entries = decision.waiting
        if budget.pays(found.message):
            entries.append(found)
        else:
            more = True

    queue.sort(key=lambda wish: turn_in_queue(wish.view))
    for index, wish in enumerate(queue):
        if len(decision.assignments) >= limit:
            more, queued = True, queued + len(queue) - index
            break
        shape, view = wish.shape, wish.view
        if wish.turn.retries > wish.limit:
            if budget.pays(_PODLESS):
                decision.verdicts.append(
                    Verdict(view.uid, view.namespace, view.name, wish.turn, JOB_REFUSED, _PODLESS, view.generation)
                )
            else:
                more = True
            continue
        avoided = ledger.avoided.get(view.uid) if view.uid not in reconsidered else None
        try:
            assignment, anew = _assigned(wish, floor, avoided.nodes if avoided else (), seed)
        except StrategyError as failed:
            queued += 1
            if not status.shows(view, STRATEGY_FAILED):
                message = f"{failed}; choose another (spec.schedulingStrategy), or mend it"
                if budget.pays(message):
                    decision.waiting.append(_wait(view, STRATEGY_FAILED, message))
                else:
                    more = True
            continue
        if assignment:
            decision.assignments.append(assignment)
            if anew:
                reconsidered.append(view.uid)
        elif floor.never(shape):
            message = floor.explain(shape)
            if budget.pays(message):
                decision.verdicts.append(
                    Verdict(view.uid, view.namespace, view.name, wish.turn, NO_SUITABLE_NODE, message, view.generation)
                )
            else:
                more = True
        else:
            queued += 1
            if not status.shows(view, WAITING_FOR_CAPACITY):
                message = floor.explain(shape)
                if budget.pays(message):
                    decision.waiting.append(_wait(view, WAITING_FOR_CAPACITY, message))
                else:
                    more = True

    return Decision(
        assignments=decision.assignments,
        waiting=decision.waiting,
        examine=decision.examine,
        verdicts=decision.verdicts,
        withdrawals=decision.withdrawals,
        seen=_seen(ledger, promised),
        forget=_forget(snapshot, ledger),
        queued=queued,
        more=more,
        reconsidered=reconsidered,
        wake_after=next_deadline(snapshot, mine, settings, bool(decision.assignments or promised)),
    )


def strategy_name(spec: GPUWorkloadSpec, namespace: str, defaults: Defaults) -> tuple[str, str]:
    """The strategy that holds for a workload and where it comes from: its spec, its namespace, the installation."""
    if spec.scheduling_strategy:
        return spec.scheduling_strategy, "spec.schedulingStrategy"
    if namespace in defaults.namespace_strategies:
        return defaults.namespace_strategies[namespace], f"namespace {namespace}"
    return defaults.strategy, "the installation's settings"


def _examine(
    view: WorkloadView, turn: Turn, ledger: Ledger, settings: Settings, defaults: Defaults, memory: Memory
) -> _Queued | Waiting:
    """The workload as the queue sees it, or why it is not (or not yet) in the queue."""
    spec = view.spec
    if spec is None:
        return _wait(view, INVALID, view.invalid or "spec: is not valid")
    refused = spec_refusal(spec, settings)
    if refused:
        return _wait(view, INVALID, refused)
    name, source = strategy_name(spec, view.namespace, defaults)
    if name not in strategies.installed():
        known = ", ".join(strategies.installed())
        return _wait(view, UNKNOWN_STRATEGY, f"{source}: there is no strategy {name[:64]!r}; installed are {known}")
    if spec.suspend:
        return _wait(view, status.SUSPENDED, "suspended; set spec.suspend to false to queue it")
    if spec.template is not None:
        if ledger.rejected.get(view.uid) == view.generation:
            return _wait(view, TEMPLATE_REFUSED, "the API server refused spec.template in a dry run; edit the spec")
        if ledger.accepted.get(view.uid) != view.generation:
            return _wait(view, status.EXAMINING, "the template is being checked by a dry run")
    return _Queued(view, turn, memory.shape(spec, settings), name, spec.retry_policy.max_retries)


def turn_in_queue(view: WorkloadView) -> tuple[int, float, str, str]:
    """What orders the queue: the lowest goes first."""
    priority = view.spec.priority_value if view.spec else 0
    return (-priority, view.created, view.namespace, view.name)


def _wait(view: WorkloadView, reason: str, message: str) -> Waiting:
    return Waiting(view.uid, view.namespace, view.name, view.resource_version, reason, message)


def _assigned(wish: _Queued, floor: _Floor, avoided: tuple[str, ...], seed: int) -> tuple[Assignment | None, bool]:
    """The workload's place: on a node where it was not withdrawn before, if there is one; if not (True) it begins anew.

    A strategy that always chooses alike would go round in a circle among the nodes that are remembered and the next
    one. Where that many were tried in vain, chance goes on: it gets everywhere in the end.
    """
    if wish.shape in floor.full:
        return None, False
    view, turn = wish.view, wish.turn
    strategy = Random.name if len(avoided) >= AVOIDED_NODES else wish.strategy
    node, anew = floor.take(wish, strategy, seed, avoided), False
    if not node and avoided:
        strategy, anew = wish.strategy, True
        node = floor.take(wish, strategy, seed)
    if not node:
        return None, False
    return Assignment(
        uid=view.uid,
        namespace=view.namespace,
        name=view.name,
        generation=view.generation,
        resource_version=view.resource_version,
        turn=turn,
        node=node,
        requests=wish.shape.requests,
        strategy=strategy,
        job_name=job_name(view.name, view.uid, turn.attempt),
    ), anew


def _seen(ledger: Ledger, promised: Mapping[str, Assignment]) -> list[str]:
    """Promises whose Job is visible, or came and went."""
    return [uid for uid in ledger.in_flight if uid not in promised]


def _forget(snapshot: Snapshot, ledger: Ledger) -> list[str]:
    """Workloads of the ledger that are gone or ended.

    A promise goes with them only when no Job of it can be there unseen: a Job is created only after the workload has
    berth's finalizer, and that goes only when the teardown has found neither Job nor pod; and a Job that is known to be
    made must be known to be gone.
    """
    alive = {view.uid for view in snapshot.workloads if not view.finished}
    gone = {*ledger.in_flight, *ledger.turns, *ledger.held, *ledger.accepted, *ledger.rejected, *ledger.avoided} - alive
    unseen = {uid for uid, version in ledger.made.items() if version > snapshot.jobs_version}
    held_up = unseen | {job.workload_uid for job in snapshot.jobs if not job.finished and job.workload_uid in gone}
    return sorted(gone - held_up)
