"""Decides one round of placement: which queued workloads get which nodes now, and what all others are told.

For the planner activity. Here is gathered who wants a place and what is there; `planning.queue` orders them,
`planning.turns` gives each its turn. The same snapshot, ledger and seed give the same decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf

from crds.settings import Settings
from planning import gates, status
from planning.caches.preference import caches
from planning.capacity import Belongings, holdings, room, standing
from planning.endings import completions
from planning.filters import Constraints
from planning.floor import Floor, Wish
from planning.jobs import refusal as spec_refusal
from planning.lifecycle import PREEMPTED, WITHDRAWN
from planning.memory import Memory
from planning.model import (
    Assignment,
    Decision,
    Lately,
    Ledger,
    Snapshot,
    Stopped,
    Turn,
    Waiting,
    WorkloadView,
)
from planning.places import gang_of
from planning.preemption import Preemptor, candidates, next_stoppable, no_longer_spared
from planning.provisioning import Orders
from planning.queue import in_order, turn_in_queue
from planning.quotas import Books, opened, remembered
from planning.reservations import Reservations
from planning.strategy_names import not_installed, strategy_name
from planning.turns import NEXT_ROUND, Told, Turns, wait
from planning.windows import before_it_begins
from planning.withdrawals import next_deadline, resumable, to_reconsider, turn_is_over, withdrawals

INVALID = "Invalid"
UNKNOWN_STRATEGY = "UnknownStrategy"
TEMPLATE_REFUSED = "TemplateRefused"
WAITING_FOR_PODS = "WaitingForPods"

# Seconds between two times that the ledger takes down what each tenant holds.
_LATELY = 60.0


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
    told = Told()
    for withdrawal in withdrawals(snapshot, mine, settings, ledger):
        if told.affords(withdrawal.message):
            told.decision.withdrawals.append(withdrawal)
            # Nothing is written where a Job is kept, so no news of it wakes the ledger; and now it may have a place.
            told.more |= withdrawal.keep
    ended = completions(snapshot, mine, seed)
    starting = list(gates.starts(snapshot, mine))
    if starting:
        _start(starting, snapshot, settings, memory, told)
    deadline = settings.bind_deadline_seconds
    held = list(holdings(snapshot, promised, mine, lambda spec: memory.shape(spec, settings).requests, deadline))
    left = room(snapshot.nodes, held)
    reservations = Reservations(snapshot, ledger.reserved)
    reservations.settle(snapshot, held, promised, left, settings.gpu_resource)
    queue = _queue(snapshot, ledger, settings, mine, promised, memory, told, reservations)
    floor = Floor(snapshot, settings, left, memory, reservations.claims())
    books = opened(snapshot, held)
    reconsidered = to_reconsider(snapshot, mine, ledger)
    stoppable = candidates(snapshot, mine, settings, ledger.spared, reservations) if queue else []
    preemptor = Preemptor(floor, books, held, stoppable, snapshot.by_uid(), snapshot.now)
    orders = Orders.of(settings.provisioning, ledger, floor, books, snapshot.workloads, queue, snapshot.now)
    turns = Turns(floor, books, preemptor, orders, told, ledger, snapshot.now, seed, reconsidered, held)

    def has_word(wish: Wish) -> bool:
        return ledger.clearing.get(wish.view.uid) == wish.view.generation

    # Before all others, for nobody else may have what is theirs: now, and then soon.
    in_window = [wish for wish in queue if wish.window is not None and wish.window.during(snapshot.now)]
    about_to = [wish for wish in queue if wish.window is not None and not wish.window.during(snapshot.now)]
    promised_room = [wish for wish in queue if has_word(wish) and wish.window is None]
    rest = [wish for wish in queue if not has_word(wish) and wish.window is None]

    def in_turn() -> Iterator[Wish]:
        for group in (in_window, about_to):
            yield from sorted(group, key=lambda wish: turn_in_queue(wish.view))
        turns.hold(promised_room)
        yield from sorted(promised_room, key=lambda wish: turn_in_queue(wish.view))
        yield from in_order(rest, lambda wish: (wish.view, wish.need), books, ledger.lately, snapshot.now)

    waiting = {wish.view.uid for wish in queue}
    for wish in in_turn():
        if len(told.decision.assignments) >= limit:
            told.more = True
            told.reasons[NEXT_ROUND] += len(waiting)
            break
        waiting.discard(wish.view.uid)
        turns.take(wish)
    # Who was stopped waits too, though not yet in the queue.
    stopped = (job for job in snapshot.jobs if job.preempted and not job.finished)
    told.reasons[PREEMPTED] += sum(not turn_is_over(job, ledger) for job in stopped)
    due = (
        next_deadline(snapshot, mine, settings, bool(told.decision.assignments or promised)),
        gates.next_look(starting, settings, snapshot.now),
        next_stoppable(snapshot, mine, settings) if told.queued else None,
        orders.due_in if orders.due_in < inf else None,
        reservations.next_change(),
    )
    return replace(
        told.decision,
        seen=_seen(ledger, promised),
        forget=_forget(snapshot, ledger),
        queued=told.queued,
        reasons=dict(+told.reasons),
        more=told.more,
        reconsidered=reconsidered,
        wake_after=min((seconds for seconds in due if seconds is not None), default=None),
        lately=_lately(books, ledger, snapshot.now),
        completions=ended,
        stoppable=no_longer_spared(ledger.spared, snapshot.now),
        cleared=[uid for uid in ledger.clearing if uid not in turns.awaiting and uid not in waiting],
        orders=orders.placed,
        provisioning=orders.changed,
        unprovisioned=orders.dropped(waiting),
        reserved=reservations.recorded(),
    )


def _start(starting: list[gates.Start], snapshot: Snapshot, settings: Settings, memory: Memory, told: Told) -> None:
    """Gangs whose pods are all there are told their nodes; those that cannot start are taken back."""
    nodes = {node.name: node for node in snapshot.nodes}

    def demands(view: WorkloadView) -> Constraints:
        return memory.shape(view.spec, settings).constraints if view.spec is not None else Constraints()

    taken_back = set()
    for withdrawal in gates.withdrawals(starting, nodes, demands, settings, snapshot.now):
        taken_back.add(withdrawal.job_uid)
        if told.affords(withdrawal.message):
            told.decision.withdrawals.append(withdrawal)
    for pin in gates.pins(starting, nodes, demands, taken_back):
        if told.affords("", sum(len(name) for name, _ in pin.places)):
            told.decision.pins.append(pin)


def _queue(
    snapshot: Snapshot, ledger: Ledger, settings: Settings, mine: Belongings, promised: Mapping[str, Assignment],
    memory: Memory, told: Told, reservations: Reservations,
) -> list[Wish]:  # fmt: skip
    """All that want a place now; who does not, or not yet, is told why."""
    queue: list[Wish] = []
    for view in snapshot.workloads:
        if view.finished or view.deleting or view.uid in ledger.held or view.uid in promised:
            continue
        turn = ledger.turns.get(view.uid, Turn())
        jobs = mine.jobs.get((view.namespace, view.uid), ())
        stopped = next((job for job in jobs if resumable(view, job) and turn_is_over(job, ledger)), None)
        others = jobs if stopped is None else [job for job in jobs if job is not stopped]
        if any(job.attempt >= turn.attempt or not (job.finished or job.deleting) for job in others):
            continue  # its Job is there, and tells what comes next; one that goes on is as good as its turn's
        found = _examine(view, turn, ledger, settings, snapshot, memory, reservations)
        if isinstance(found, Wish):
            if not others and (view.namespace, view.uid) not in mine.pods:
                if stopped is not None:
                    found = replace(found, resumes=Stopped(stopped.name, stopped.uid, stopped.resource_version))
                queue.append(found)
                continue
            told.reasons[WAITING_FOR_PODS] += 1
            left_over = len(others) + len(mine.pods.get((view.namespace, view.uid), ()))
            found = wait(view, WAITING_FOR_PODS, f"waiting for the previous Job and its pods to go ({left_over} left)")
        if found.reason == UNKNOWN_STRATEGY:
            # It waits for a place: the default may be repaired, and nobody pokes for a namespace or the settings.
            told.reasons[UNKNOWN_STRATEGY] += 1
        if found.reason == status.EXAMINING:
            entries = told.decision.examine
        elif status.tells(view, found.reason, partial(str, found.message)):
            continue
        elif found.reason == WAITING_FOR_PODS and (status.shows(view, WITHDRAWN) or status.shows(view, PREEMPTED)):
            continue  # that tells more
        else:
            entries = told.decision.waiting
        if told.affords(found.message):
            entries.append(found)
    return queue


def _examine(
    view: WorkloadView, turn: Turn, ledger: Ledger, settings: Settings, snapshot: Snapshot, memory: Memory,
    reservations: Reservations,
) -> Wish | Waiting:  # fmt: skip
    """The workload as the queue sees it, or why it is not (or not yet) in the queue."""
    spec = view.spec
    if spec is None:
        return wait(view, INVALID, view.invalid or "spec: is not valid")
    refused = spec_refusal(spec, settings)
    if refused:
        return wait(view, INVALID, refused)
    name, source = strategy_name(spec, view.namespace, snapshot.defaults)
    if missing := not_installed(name, source):
        return wait(view, UNKNOWN_STRATEGY, missing)
    if spec.suspend:
        return wait(view, status.SUSPENDED, "suspended; set spec.suspend to false to queue it")
    if spec.template is not None:
        if ledger.rejected.get(view.uid) == view.generation:
            return wait(view, TEMPLATE_REFUSED, "the API server refused spec.template in a dry run; edit the spec")
        if ledger.accepted.get(view.uid) != view.generation:
            return wait(view, status.EXAMINING, "the template is being checked by a dry run")
    if missing := reservations.unusable(view):
        return wait(view, status.NO_RESERVATION, missing)
    window = reservations.of(view)
    if window is not None and snapshot.now < window.opens:
        # Not counted among those in the queue: nothing that happens until then is any news to it.
        return wait(view, status.WAITING_FOR_RESERVATION, before_it_begins(window))
    deadline, shape, limit = spec.active_deadline_seconds, memory.shape(spec, settings), spec.retry_policy.max_retries
    until = inf if deadline is None else snapshot.now + deadline
    mounts = () if spec.template is None else caches(memory.mounted(spec), view.namespace)
    return Wish(view, turn, shape, name, limit, gang_of(spec), until, window, caches=mounts)


def _lately(books: Books, ledger: Ledger, now: float) -> dict[str, Lately]:
    """What the tenants held lately, reckoned anew; nothing while that was done a moment ago."""
    if all(now - known.at < _LATELY for known in ledger.lately.values()) and ledger.lately:
        return {}
    return remembered(books, ledger.lately, now)


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
    known = (
        ledger.in_flight, ledger.turns, ledger.held, ledger.accepted, ledger.rejected, ledger.avoided, ledger.spared,
        ledger.provisioning,
    )  # fmt: skip
    gone = {uid for facts in known for uid in facts} - alive
    unseen = {uid for uid, version in ledger.made.items() if version > snapshot.jobs_version}
    held_up = unseen | {job.workload_uid for job in snapshot.jobs if not job.finished and job.workload_uid in gone}
    return sorted(gone - held_up)
