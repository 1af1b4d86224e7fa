"""Why a workload waits, from the cluster as it is: what keeps it off each node, who is before it, and what would help.

For `berth explain`. It decides with the filters, the capacity and the strategies of placement; of the ledger it knows
nothing, so a promise whose Job is not there yet is not counted, nor what a tenant held lately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from crds.settings import Settings
from planning import gangs, strategies
from planning.caches.preference import WarmFirst, caches, mounted
from planning.caches.preference import told as told_of_caches
from planning.caches.warmth import Cache
from planning.capacity import Belongings, Holding, Room, room
from planning.demand import learned
from planning.filters import (
    Shape,
    TolerationView,
    lacking,
    refusal,
    repelling_taint,
    shortage,
    show_amount,
    show_gpus,
    show_taint,
    slots,
    slots_when_empty,
)
from planning.fleet import Fleet
from planning.held import visible
from planning.jobs import refusal as spec_refusal
from planning.jobs import shape_of
from planning.model import (
    Assignment,
    Ledger,
    NodeView,
    Places,
    Resources,
    Snapshot,
    WorkloadView,
)
from planning.placement import decide
from planning.places import Gang, gang_of, times
from planning.prediction import seconds_to_start
from planning.provisioning import PROVISIONING
from planning.queue import in_order
from planning.quotas import firm, opened
from planning.reservation_status import shown_nodes
from planning.reservations import Reservations
from planning.status import shows
from planning.strategies import Rank, Request, StrategyError
from planning.strategy_names import strategy_name
from planning.withdrawals import resumable

_BEST = 10


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node, what is free there, and what keeps the workload off it ('' if nothing does). Of its GPUs, those of the
    resource that the workload asks for.

    `rank` is how the strategy likes it, the lowest first; None where it does not fit or is not among the first. `fits`:
    of a gang, how many of its pods fit there now. `warm`: how many of its kernel caches are Ready there.
    """

    name: str
    model: str
    gpus: int
    free: Resources
    why: str
    rank: Rank | None = None
    fits: int = 0
    warm: int = 0


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain of a gang's topology: how many of its pods fit there now, and if it were empty."""

    name: str
    fits: int
    empty: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that can be told of one workload now.

    state: 'ended', 'invalid', 'suspended', 'placed' (it has a Job), 'outside' the queue for another reason, which the
    message tells (it backs off, is examined, waits for its last Job's pods to go), or 'queued', and only then the rest.
    reasons: why not, and how many nodes; '' counts those that hold it. position: 1 is next. message: what the next
    round will say of it; next_node: where it will place it, and next_warmth what that means for its kernel caches, of
    which caches tells names and on how many nodes each is Ready. quota: what its tenant holds and may still take.
    decisions: the last ones, as its status keeps them. start: seconds until it is expected to start, at the median and
    at the 90th percentile of what runs of the kinds before it took; None if nobody can tell.
    Of a gang: `asks` is one pod's, of its `pods` at least `least` must fit, `domains` are those of its topology ('' for
    all nodes); next_places and places are all its nodes, of which next_node and node are the first.
    """

    namespace: str
    name: str
    state: str
    phase: str
    message: str
    job: str = ""
    node: str = ""
    asks: Resources = field(default_factory=Resources)
    strategy: str = ""
    strategy_from: str = ""
    reasons: tuple[tuple[str, int], ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    position: int = 0
    queued: int = 0
    ahead: tuple[str, ...] = ()
    next_node: str = ""
    next_warmth: str = ""
    caches: tuple[tuple[str, int], ...] = ()
    quota: tuple[str, ...] = ()
    decisions: tuple[dict[str, Any], ...] = ()
    start: tuple[float, float] | None = None
    helps: tuple[str, ...] = ()
    pods: int = 1
    least: int = 1
    domains: tuple[Domain, ...] = ()
    next_places: Places = ()
    places: Places = ()


def explain(snapshot: Snapshot, settings: Settings, namespace: str, name: str) -> Explanation | None:
    """None if there is no such workload."""
    view = next((w for w in snapshot.workloads if (w.namespace, w.name) == (namespace, name)), None)
    if view is None:
        return None
    mine = Belongings.of(snapshot.jobs, snapshot.pods)
    told = Explanation(
        namespace, name, "", view.phase, str(view.status.get("message", "")), decisions=_decisions(view.status)
    )
    if view.finished:
        return replace(told, state="ended")
    refused = view.invalid if view.spec is None else spec_refusal(view.spec, settings)
    if view.spec is None or refused:
        return replace(told, state="invalid", message=refused)
    jobs = [job for job in mine.jobs.get((namespace, view.uid), ()) if not job.finished and not job.deleting]
    if any(job.preempted and not resumable(view, job) for job in jobs):
        return replace(told, state="outside")
    if any(not job.preempted for job in jobs):
        newest = max(jobs, key=lambda job: job.attempt)
        return replace(told, state="placed", job=newest.name, node=newest.node, places=newest.places)
    if view.spec.suspend:
        return replace(told, state="suspended")
    name, source = strategy_name(view.spec, view.namespace, snapshot.defaults)
    if name not in strategies.installed():
        return replace(
            told, state="outside", message=told.message or f"{source}: strategy {name!r} is not installed here"
        )
    if not _in_queue(view, settings, mine):
        return replace(told, state="outside")
    return _queued(told, view, snapshot, settings, mine)


def _queued(
    told: Explanation, view: WorkloadView, snapshot: Snapshot, settings: Settings, mine: Belongings
) -> Explanation:
    if view.spec is None:
        raise ValueError("a workload without a spec is not queued")
    shape, held = shape_of(view.spec, settings), visible(snapshot, mine, settings)
    strategy, source = strategy_name(view.spec, view.namespace, snapshot.defaults)
    left, kept = _reserved(view, shape, snapshot, held)
    why = {node.name: kept.get(node.name) or keeps_off(shape, node, left[node.name]) for node in snapshot.nodes}
    gang = gang_of(view.spec)
    wanted = caches(mounted(view.spec), view.namespace)
    ready = Counter(name for cache in wanted for name in snapshot.warm.get(cache, ()))
    ranks = _ranks(view, shape, strategy, wanted, snapshot, settings, left)
    reports = [
        NodeReport(
            node.name,
            node.model_of(shape.requests.gpu_resource),
            node.allocatable.of(shape.requests.gpu_resource),
            _free(left[node.name], shape.requests.gpu_resource),
            why[node.name],
            ranks.get(node.name),
            slots(shape.requests, left[node.name]) if gang is not None and not why[node.name] else 0,
            ready[node.name],
        )
        for node in snapshot.nodes
    ]
    reports.sort(
        key=lambda each: (each.why != "", each.rank is None, -each.warm, each.rank or (), -each.free.gpus, each.name)
    )
    domains = list(_domains(shape, gang, reports, snapshot)) if gang is not None else []
    books = opened(snapshot, held)
    waiting = [w for w in snapshot.workloads if _in_queue(w, settings, mine)]
    queue = list(in_order(waiting, partial(_about, settings), books, {}, snapshot.now))
    next_, message = _next_round(view, snapshot, settings)
    place = next((i for i, w in enumerate(queue) if w.uid == view.uid), len(queue))
    if any(not each for each in why.values()):
        helps = [] if gang is None else gangs.helps(gang, {each.name: each.fits for each in domains})
    else:
        helps = list(_helps(shape, snapshot.nodes, left))
    return replace(
        told,
        state="queued",
        # How far the autoscaler is with a node for it, the round does not know.
        message=told.message if shows(view, PROVISIONING) else message or told.message,
        next_node=next_.node if next_ is not None else "",
        next_warmth=told_of_caches(next_) if next_ is not None else "",
        caches=tuple((_shown(cache), len(snapshot.warm.get(cache, ()))) for cache in wanted),
        next_places=next_.places if next_ is not None else (),
        pods=gang.pods if gang is not None else 1,
        least=gang.least if gang is not None else 1,
        domains=tuple(domains),
        quota=books.told(view.namespace),
        start=_start(snapshot, settings, view.uid),
        asks=shape.requests,
        strategy=strategy,
        strategy_from=source,
        reasons=tuple(sorted(Counter(why.values()).items(), key=lambda item: (-item[1], item[0]))),
        nodes=tuple(reports),
        position=place + 1,
        queued=len(queue),
        ahead=tuple(f"{w.namespace}/{w.name}" for w in queue[:place]),
        helps=tuple(helps),
    )


def _start(snapshot: Snapshot, settings: Settings, uid: str) -> tuple[float, float] | None:
    early, late = (seconds_to_start(snapshot, settings, uid, share) for share in (0.5, 0.9))
    return None if early is None or late is None else (early, max(early, late))


def _decisions(status: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    found = status.get("decisions")
    return tuple(each for each in found if isinstance(each, dict)) if isinstance(found, list) else ()


def _domains(shape: Shape, gang: Gang, reports: list[NodeReport], snapshot: Snapshot) -> Iterator[Domain]:
    """How many of the gang's pods fit into each domain, those with the most first."""
    now, empty = Counter[str](), Counter[str]()
    fits = {report.name: report.fits for report in reports}
    for node in snapshot.nodes:
        domain = gangs.domain_of(gang, node)
        now[domain] += fits[node.name]
        empty[domain] += slots_when_empty(shape, node, snapshot.now)
    for domain in sorted(+empty, key=lambda each: (-now[each], -empty[each], each)):
        yield Domain(domain, now[domain], empty[domain])


def _next_round(view: WorkloadView, snapshot: Snapshot, settings: Settings) -> tuple[Assignment | None, str]:
    """The place that the next round gives to the workload, or what it will say of it."""
    untold = tuple(replace(w, status={}) if w.uid == view.uid else w for w in snapshot.workloads)
    # Whoever has a template and waits was examined: else it would not be in the queue.
    examined = {w.uid: w.generation for w in untold if w.spec is not None and w.spec.template is not None}
    ledger = Ledger(accepted=examined, reserved=shown_nodes(snapshot))
    jobs = tuple(job for job in snapshot.jobs if not job.halted)  # whose workload waits for a place like any other
    decision = decide(replace(snapshot, workloads=untold, jobs=jobs), ledger, settings, limit=len(untold), seed=0)
    place = next((each for each in decision.assignments if each.uid == view.uid), None)
    told = {each.uid: each.message for each in decision.waiting}
    told |= {each.uid: each.message for each in decision.verdicts}
    return place, told.get(view.uid, "")


def _reserved(
    view: WorkloadView, shape: Shape, snapshot: Snapshot, held: list[Holding]
) -> tuple[dict[str, Room], dict[str, str]]:
    """What is left for the workload on each node, and which reservation keeps it off where there would be room."""
    left, known = room(snapshot.nodes, held), Reservations(snapshot, shown_nodes(snapshot))
    known.as_recorded(snapshot, held)
    window, need, kept = known.of(view), shape.requests, dict[str, str]()
    if window is not None:
        for name, there in left.items():
            there.gpus = min(there.gpus, max(0, window.left(name)))
        others = (node.name for node in snapshot.nodes if window.left(node.name) < need.gpus)
        return left, {name: f"without {show_gpus(need.gpus)} left of GPUReservation {window.name}" for name in others}
    deadline = view.spec.active_deadline_seconds if view.spec else None
    stays = -inf if not firm(view) else inf if deadline is None else snapshot.now + deadline
    for name, claim in known.claims().items():
        keeper = claim.keeper(need)
        if keeper is not None and lacking(need, claim.left(stays)) and not lacking(need, left[name]):
            kept[name] = f"kept for GPUReservation {keeper.name}"
        left[name] = claim.left(stays)
    return left, kept


def _shown(cache: Cache) -> str:
    namespace, name = cache
    return name if namespace else f"{name} of the cluster"


def _about(settings: Settings, view: WorkloadView) -> tuple[WorkloadView, Resources]:
    if view.spec is None:
        return view, Resources()
    gang, asked = gang_of(view.spec), shape_of(view.spec, settings).requests
    return view, asked if gang is None else times(asked, gang.least)


def keeps_off(shape: Shape, node: NodeView, left: Room) -> str:
    """What keeps such a request off the node now; '' if nothing does."""
    return refusal(shape.constraints, node) or shortage(shape.requests, node, left)


def _ranks(
    view: WorkloadView, shape: Shape, name: str, wanted: tuple[Cache, ...], snapshot: Snapshot, settings: Settings,
    left: dict[str, Room],
) -> dict[str, Rank]:  # fmt: skip
    """How the strategy likes the best nodes, of the warmest; none if it fails."""
    known = partial(learned, snapshot.workloads, partial(shape_of, settings=settings), snapshot.now, snapshot.profiles)
    fleet = Fleet((node, left[node.name]) for node in snapshot.nodes)
    request = Request(view.uid, view.namespace, view.name, shape.requests)
    try:
        first = WarmFirst(strategies.informed(name, known), wanted, snapshot.warm)
        return {node: rank[1:] for node, rank in fleet.best(request, shape, first, _BEST)}
    except StrategyError:
        return {}


def _in_queue(view: WorkloadView, settings: Settings, mine: Belongings) -> bool:
    """Whether it wants a place now. That the ledger holds it back (it backs off, is examined) its status tells."""
    if view.finished or view.deleting or view.phase == "Pending":
        return False
    if view.spec is None or view.spec.suspend or spec_refusal(view.spec, settings):
        return False
    jobs = mine.jobs.get((view.namespace, view.uid), ())
    return all(resumable(view, job) for job in jobs) and not mine.pods.get((view.namespace, view.uid))


def _helps(shape: Shape, nodes: Sequence[NodeView], left: dict[str, Room]) -> Iterator[str]:
    """Single changes with which it would fit somewhere now, the smallest first."""

    def holders(changed: Shape) -> list[str]:
        return sorted(node.name for node in nodes if not keeps_off(changed, node, left[node.name]))

    need, asked = shape.requests, shape.constraints
    for gpus in range(need.gpus - 1, 0, -1):
        found = holders(replace(shape, requests=replace(need, gpus=gpus)))
        if found:
            yield f"asking for {show_gpus(gpus, need.gpu_resource)} instead of {need.gpus}: fits {_some(found)} now"
            break
    for what, lesser in (("CPU", replace(need, cpu_milli=0)), ("memory", replace(need, memory=0))):
        found = holders(replace(shape, requests=lesser))
        if found:
            most = max(found, key=lambda name: (left[name].cpu_milli if what == "CPU" else left[name].memory, name))
            free = show_amount(what, left[most].as_resources())
            yield f"asking for at most {free}{' of memory' * (what == 'memory')}: fits {most} now"
    taints = {taint for node in nodes if (taint := repelling_taint(asked, node)) is not None}
    for taint in sorted(taints, key=show_taint):
        allowed = (*asked.tolerations, TolerationView(taint.key, "Equal", taint.value, taint.effect))
        found = holders(replace(shape, constraints=replace(asked, tolerations=allowed)))
        if found:
            yield f"tolerating {show_taint(taint)}: fits {_some(found)} now"
    if asked.gpu_memory:
        found = holders(replace(shape, constraints=replace(asked, gpu_memory=0)))
        if found:
            yield f"without gpuMemory: fits {_some(found)} now"
    if asked.selector or asked.affinity is not None:
        found = holders(replace(shape, constraints=replace(asked, selector=(), affinity=None)))
        if found:
            yield f"without its nodeSelector and node affinity: fits {_some(found)} now"
    for word, mend in (("uncordoned", _uncordoned), ("ready", _ready)):
        found = [node.name for node in nodes if not keeps_off(shape, mend(node), left[node.name])]
        if found:
            yield f"{_some(sorted(found))} {word}: it would fit there"


def _free(left: Room, resource: str) -> Resources:
    """What is free, with the GPUs of this resource alone."""
    return replace(left.as_resources(), gpus=max(left.of(resource), 0), gpu_resource=resource, other_gpus=())


def _uncordoned(node: NodeView) -> NodeView:
    taints = tuple(taint for taint in node.taints if taint.key != "node.kubernetes.io/unschedulable")
    return replace(node, unschedulable=False, taints=taints)


def _ready(node: NodeView) -> NodeView:
    passing = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    return replace(node, ready=True, taints=tuple(taint for taint in node.taints if taint.key not in passing))


def _some(names: Sequence[str]) -> str:
    """`n1`, or `n1 and 3 others`."""
    others = len(names) - 1
    return names[0] + (f" and {others} other{'s' * (others > 1)}" if others else "")
