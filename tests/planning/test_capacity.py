"""What is free, counted once; and a small cluster with lagging watches in which no GPU is ever promised twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crds.gpuworkload import MAX_GPUS
from planning.capacity import Belongings, Room, holdings, room, standing
from planning.ledger import after_carrying_out, after_deciding, after_requeue
from planning.lifecycle import Observation, Step, next_step
from planning.model import (
    Assignment,
    JobView,
    Ledger,
    NodeView,
    Pin,
    Places,
    PodView,
    Resources,
    Snapshot,
    Stopped,
    Turn,
    WorkloadView,
)
from planning.naming import spec_hash
from planning.placement import decide
from planning.places import pods_in, ranks
from tests.planning.builders import ASKED, GIB, NOW, SETTINGS, job, node, pod, promise, round_of, snapshot, workload


def left_on_n(seen: Snapshot, promises: dict[str, Assignment] | None = None) -> Room:
    """What a round finds free on the node `n`."""
    mine = Belongings.of(seen.jobs, seen.pods)
    promised = standing(seen, Ledger(in_flight=promises or {}), mine)
    return room(seen.nodes, holdings(seen, promised, mine, ASKED, SETTINGS.bind_deadline_seconds))["n"]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("job_seen", [False, True])
@pytest.mark.parametrize("pod_seen", ["", "unbound", "bound", "terminating"])
def test_one_workload_is_counted_once_however_much_of_it_is_visible(
    in_flight: bool, job_seen: bool, pod_seen: str
) -> None:
    it = job("a", "n", gpus=3)
    promises = {"a": promise("a", "n", gpus=3)} if in_flight else {}
    pods = []
    if pod_seen:
        pods = [pod("p", "" if pod_seen == "unbound" else "n", of=it, terminating=pod_seen == "terminating")]
    seen = snapshot([node("n", 8)], [workload("a", 3)], jobs=[it] if job_seen else [], pods=pods)
    counted = in_flight or job_seen or pod_seen in ("bound", "terminating")
    left = left_on_n(seen, promises)
    assert (left.gpus, left.pods) == ((5, 109) if counted else (8, 110))


def test_a_job_claims_no_more_than_its_workload_wants_and_for_none_that_is_not_there() -> None:
    forged = job("a", "n", gpus=1_000_000)
    assert left_on_n(snapshot([node("n", 8)], jobs=[forged])).gpus == 8, "of no workload"
    others = replace(forged, namespace="other")
    assert left_on_n(snapshot([node("n", 8)], [workload("a", 2)], jobs=[others])).gpus == 8
    assert left_on_n(snapshot([node("n", 8)], [workload("a", 2)], jobs=[forged])).gpus == 6
    broken = replace(workload("a", 2), spec=None, invalid="spec: broken")
    assert left_on_n(snapshot([node("n", 8)], [broken], jobs=[forged])).gpus == 0
    many = [job("a", "n", attempt, gpus=2) for attempt in range(50)]
    assert left_on_n(snapshot([node("n", 8)], [workload("a", 2)], jobs=many)).gpus == 6, "the newest"


@pytest.mark.parametrize("places", [(), (("n", 2), ("m", 500))])
def test_a_job_claims_no_more_cpu_and_memory_than_its_workload_wants(places: Places) -> None:
    """Whoever may create Jobs may write anything on one: also that it is of another spec."""
    spec = {"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}, "replicas": 2 if places else 1}
    forged = replace(job("a", "n", places=places), requests=Resources(1, 2**62, 2**62, 2**62))
    seen = snapshot([node("n"), node("m")], [workload("a", 1, spec=spec)], jobs=[forged])
    left, pods = left_on_n(seen), 2 if places else 1
    assert (left.cpu_milli, left.memory, left.pods) == (64_000 - pods * 2_000, 256 * GIB - pods * GIB, 110 - pods)
    other = replace(forged, spec_hash="other", requests=replace(forged.requests, gpus=2))
    broken = replace(seen.workloads[0], spec=None, invalid="spec: broken")
    for unlike in (replace(seen, jobs=(other,)), replace(seen, workloads=(broken,))):
        left = left_on_n(unlike)
        assert (left.cpu_milli, left.memory, left.pods) == (64_000, 256 * GIB, 110), "how much it wanted nobody knows"


def test_the_pods_of_a_job_count_as_anybodys_do() -> None:
    it = job("a", "n")
    bound = pod("p", "n", of=it, requests=Resources(1, 9_000, GIB, 1))
    left = left_on_n(snapshot([node("n")], [workload("a", 1)], jobs=[it], pods=[bound]))
    assert (left.gpus, left.cpu_milli, left.memory) == (7, 55_000, 255 * GIB)


def test_what_a_job_says_of_other_gpus_is_not_believed() -> None:
    offered = Resources(8, 64_000, 256 * GIB, 110, other_gpus=(("amd.com/gpu", 8),))
    forged = replace(job("a", "n"), requests=Resources(8, 0, 0, 1, gpu_resource="amd.com/gpu"))
    left = left_on_n(snapshot([node("n", allocatable=offered)], [workload("a", 1)], jobs=[forged]))
    assert (left.gpus, left.of("amd.com/gpu")) == (7, 8), "what its workload wants"


def test_a_job_of_a_spec_that_was_edited_claims_what_it_was_made_for() -> None:
    before, now = workload("a", 8), workload("a", 1, generation=2)
    assert before.spec is not None
    assert now.spec is not None
    it = job("a", "n", gpus=8, spec_hash=spec_hash(before.spec))
    assert left_on_n(snapshot([node("n", 8)], [now], jobs=[it])).gpus == 0
    forged = replace(it, requests=replace(it.requests, gpus=1_000_000))
    assert left_on_n(snapshot([node("n", 16)], [now], jobs=[forged])).gpus == 8, "no more than any workload can want"
    many = [replace(job("a", "n", attempt, gpus=8), spec_hash="other") for attempt in range(50)]
    assert left_on_n(snapshot([node("n", 16)], [now], jobs=many)).gpus == 8, "the newest"
    told = replace(it, spec_hash=spec_hash(now.spec))
    assert left_on_n(snapshot([node("n", 8)], [now], jobs=[told])).gpus == 7, "no more than its workload wants"


# Twice as long as a Job is given whose pods nobody has tried to bind.
YOUNG = 2.0 * 4 * SETTINGS.bind_deadline_seconds
DOUBTFUL: list[dict[str, Any]] = [{"spec_hash": "other"}, {"deleting": True}, {"suspended": True}, {"preempted": True}]


@pytest.mark.parametrize("of", [{}, *DOUBTFUL])
@pytest.mark.parametrize("spec", [{}, {"gpuCount": -1}])
@pytest.mark.parametrize("age", [0.0, 86_400.0])
def test_one_forged_job_keeps_nobody_else_waiting(of: dict[str, Any], spec: dict[str, Any], age: float) -> None:
    nodes = [node(f"n{i}", 8) for i in range(20)]
    everywhere = tuple((each.name, 1) for each in nodes)
    forged = replace(job("evil", "n0", 5, gpus=64, places=everywhere, created=NOW - age), **of)
    seen = snapshot(nodes, [workload("evil", spec=spec), workload("other", 8, namespace="theirs")], jobs=[forged])
    assert [each.uid for each in round_of(seen).assignments] == ["other"]


@pytest.mark.parametrize("of", DOUBTFUL)
def test_a_job_for_which_no_pods_will_come_is_believed_while_some_may_not_be_visible_yet(of: dict[str, Any]) -> None:
    def left(created: float, **more: Any) -> int:
        it = replace(job("a", "n", gpus=4, created=created), **of, **more)
        pods = [pod("p", "n", of=it)] if more else []
        return left_on_n(
            snapshot([node("n", 8)], [workload("a", 4 if "spec_hash" not in of else 3)], jobs=[it], pods=pods)
        ).gpus

    if "preempted" not in of:  # without any pod that one holds nothing in any case
        assert (left(NOW), left(NOW - YOUNG + 1)) == (4, 4)
    assert left(NOW - YOUNG) == 8
    assert left(NOW + YOUNG) == 8, "of the future: what a Job says of when it was let go on is nobody's word either"
    assert left(NOW - YOUNG, counted=True) == 4, "its live pod counts as anybody's does"


@pytest.mark.parametrize("of", DOUBTFUL)
def test_a_job_that_claims_nothing_hides_none_that_does(of: dict[str, Any]) -> None:
    hiding = replace(job("a", "m", 9, gpus=1, created=NOW - YOUNG), **of)
    seen = snapshot([node("n", 8), node("m", 8)], [workload("a", 8)], jobs=[job("a", "n", gpus=8), hiding])
    assert left_on_n(seen).gpus == 0


def test_a_job_cannot_say_that_it_claims_less_than_its_workload_wants() -> None:
    view = workload("a", 8)
    assert view.spec is not None
    it = job("a", "n", gpus=0, spec_hash=spec_hash(view.spec))
    seen = snapshot([node("n", 8)], [view, workload("b", 8)], jobs=[it])
    assert (left_on_n(seen).gpus, round_of(seen).assignments) == (0, [])
    gang = replace(view, spec=view.spec.model_copy(update={"gpu_count": 2, "replicas": 4}))
    assert gang.spec is not None
    it = replace(it, spec_hash=spec_hash(gang.spec), places=(("n", 4),))
    bound = pod("p", "n", gpus=2, of=None, workload_uid="a", job_name=it.name, index=0)
    assert left_on_n(snapshot([node("n", 16)], [gang], jobs=[it], pods=[bound])).gpus == 8, "each that is not there"


@settings(max_examples=100)
@given(st.data())
def test_whatever_a_job_says_it_claims_no_more_than_some_workload_of_so_many_pods_could_have(
    data: st.DataObject,
) -> None:
    replicas, wanted = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    view = workload("a", wanted, spec={"replicas": replicas})
    assert view.spec is not None
    names = [f"n{i}" for i in range(5)]
    told = st.lists(st.tuples(st.sampled_from(names), st.integers(1, 9)), max_size=5, unique_by=lambda place: place[0])
    places = tuple(data.draw(told)) if replicas > 1 or data.draw(st.booleans()) else ()
    genuine = data.draw(st.booleans())
    it = job(
        "a", "n0", data.draw(st.integers(0, 9)), gpus=data.draw(st.sampled_from([0, 1, 8, 64, 10**6])), places=places,
        spec_hash=spec_hash(view.spec) if genuine else "other", deleting=data.draw(st.booleans()),
        suspended=data.draw(st.booleans()), created=NOW + data.draw(st.sampled_from([-1e6, -1.0, 0.0, 1e6])),
    )  # fmt: skip
    seen = snapshot([node(name, 10**9) for name in names], [view], jobs=[it])
    mine = Belongings.of(seen.jobs, seen.pods)
    held = sum(each.requests.gpus for each in holdings(seen, {}, mine, ASKED, SETTINGS.bind_deadline_seconds))
    assert held <= MAX_GPUS * replicas
    if genuine and not it.deleting and not it.suspended:
        assert held == wanted * min(replicas, pods_in(places) or 1), "just what it was promised"
    elif abs(it.created - NOW) > YOUNG and it.requests.gpus != wanted:
        assert held == 0


def test_a_finished_job_holds_nothing_but_its_live_pods_do() -> None:
    ended = job("a", "n", gpus=3, finished="Failed")
    assert left_on_n(snapshot([node("n", 8)], jobs=[ended])).gpus == 8
    assert left_on_n(snapshot([node("n", 8)], jobs=[ended], pods=[pod("p", "n", of=ended)])).gpus == 5


def test_anybodys_pods_count_and_over_commitment_is_not_negative() -> None:
    strangers = [pod(f"p{i}", "n", gpus=3) for i in range(3)]
    assert left_on_n(snapshot([node("n", 8)], pods=strangers)).as_resources().gpus == 0


# --- a cluster, its truth and what a lagging cache shows of it -----------------------------------------------------


@dataclass
class World:
    """Truth, and per kind a queue of watch events that the cache has not seen yet."""

    nodes: tuple[NodeView, ...]
    workloads: dict[str, WorkloadView]
    strangers: dict[str, PodView]
    jobs: dict[str, JobView] = field(default_factory=dict)
    pods: dict[str, PodView] = field(default_factory=dict)
    events: dict[str, list[tuple[str, Any]]] = field(default_factory=lambda: {"jobs": [], "pods": [], "workloads": []})
    cache: dict[str, dict[str, Any]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    turns: dict[str, Turn] = field(default_factory=dict)  # what each workload's own workflow was started for
    undelivered: Assignment | None = None
    now: float = NOW
    version: int = 0
    jobs_version: int = 0
    rounds: int = 0
    pinned: dict[str, str] = field(default_factory=dict)  # the nodes that a gang's pods were told, by pod

    def __post_init__(self) -> None:
        self.cache = {"jobs": {}, "pods": dict(self.strangers), "workloads": {}}
        self.events["workloads"] = list(self.workloads.items())  # they arrive one by one
        self.pods = dict(self.strangers)

    def put(self, kind: str, key: str, value: Any) -> None:
        self.version += 1
        value = replace(value, resource_version=self.version)
        getattr(self, kind)[key] = value
        self.events[kind].append((key, value))

    def drop(self, kind: str, key: str) -> None:
        self.version += 1
        getattr(self, kind).pop(key)
        self.events[kind].append((key, None))
        if kind == "jobs":
            self.events[kind][-1] = (key, self.version)

    def deliver(self, kind: str, count: int) -> None:
        for key, value in self.events[kind][:count]:
            if value is None or isinstance(value, int):
                self.cache[kind].pop(key, None)
            else:
                self.cache[kind][key] = value
            if kind == "jobs":
                self.jobs_version = value if isinstance(value, int) else value.resource_version
        del self.events[kind][:count]

    def seen(self) -> Snapshot:
        return snapshot(
            self.nodes, list(self.cache["workloads"].values()), jobs=list(self.cache["jobs"].values()),
            pods=list(self.cache["pods"].values()), now=self.now, jobs_version=self.jobs_version,
        )  # fmt: skip

    # --- what happens ----------------------------------------------------------------------------------------------

    def decide(self, carry_out: bool = True) -> None:
        self.rounds += 1
        decision = decide(self.seen(), self.ledger, SETTINGS, limit=3, seed=self.rounds)
        self.ledger = after_deciding(self.ledger, decision)
        made, stale = {}, []
        for withdrawal in decision.withdrawals:
            it = self.jobs.get(withdrawal.job_name)
            if it is not None and it.resource_version == withdrawal.job_version:
                self.put("jobs", it.name, replace(it, withdrawn=True))
                self.delete_job(withdrawal.job_name)
            else:
                stale.append(withdrawal.uid)
        for assignment in decision.assignments:
            view = self.workloads.get(assignment.uid)
            if not carry_out or view is None or view.finished or assignment.job_name in self.jobs:
                stale.append(assignment.uid)
                continue
            if view.generation != assignment.generation or view.spec is None:
                stale.append(assignment.uid)
                continue
            new = job(assignment.uid, assignment.node, assignment.turn.attempt, gpus=assignment.requests.gpus)
            new = replace(new, retries=assignment.turn.retries, requests=assignment.requests, created=self.now)
            new = replace(new, spec_hash=spec_hash(view.spec), places=assignment.places)
            new = replace(new, missing=pods_in(assignment.places))
            self.put("jobs", new.name, new)
            made[assignment.uid] = self.version
        self.ledger = after_carrying_out(self.ledger, decision.withdrawals, stale, [], {}, {}, made, {})
        for pin in decision.pins if carry_out else []:
            self.lift(pin, 1 + self.rounds % 3)
        for verdict in decision.verdicts:
            raise AssertionError(f"no request here is impossible, but {verdict}")

    def lift(self, pin: Pin, most: int) -> None:
        """Lifts some of the gates, if the pods are what they were taken for."""
        mine = {p.index: p for p in self.pods.values() if p.job_name == pin.job_name and not p.terminating}
        done = self.jobs[pin.job_name].done if pin.job_name in self.jobs else frozenset()
        if not {*mine, *done}.issuperset(range(pods_in(pin.places))):
            return
        for p in [p for p in mine.values() if p.gated][:most]:
            self.pinned[p.name] = ranks(pin.places)[p.index]
            self.put("pods", p.name, replace(p, gated=False))

    def control_jobs(self) -> None:
        """The Job controller and the kube-scheduler, which knows the truth of pods."""
        for it in [it for it in self.jobs.values() if it.places and it.missing and not it.deleting]:
            index = pods_in(it.places) - it.missing
            name = f"pod-{it.name}-{index}"
            self.put("pods", name, pod(name, of=it, index=index, gated=True))
            self.put("jobs", it.name, replace(it, missing=it.missing - 1, counted=True))
        for it in list(self.jobs.values()):
            mine = [p for p in self.pods.values() if p.job_name == it.name]
            if it.deleting and not mine:
                self.drop("jobs", it.name)
            elif not it.finished and not it.deleting and not mine and not it.counted:
                self.put("jobs", it.name, replace(it, counted=True))
                self.put("pods", f"pod-{it.name}", pod(f"pod-{it.name}", of=it))
            for p in mine:
                where = self.pinned.get(p.name) if it.places else it.node
                if where and not p.node and not p.terminating and self.really_free(where) >= it.requests.gpus:
                    self.put("pods", p.name, replace(p, node=where, running=True))
            if it.places and not it.ready and not it.missing:
                bound = {p.index for p in self.pods.values() if p.job_name == it.name and p.running} | it.done
                if bound.issuperset(range(pods_in(it.places))):
                    self.put("jobs", it.name, replace(it, ready=True))

    def end_pod(self, pick: int) -> None:
        ours = [p for p in self.pods.values() if p.workload_uid and (p.node or p.terminating)]
        if ours:
            it = ours[pick % len(ours)]
            of = self.jobs.get(it.job_name)
            self.drop("pods", it.name)
            if of is not None and of.places and not it.terminating:
                self.put("jobs", of.name, replace(of, done=of.done | {it.index}))

    def end_job(self, pick: int) -> None:
        """A Job whose pod has ended learns of it; every third fails, half of these by eviction."""
        ended = [
            j for j in self.jobs.values()
            if j.counted and not (j.missing or j.finished)
            and not any(p.job_name == j.name for p in self.pods.values())
        ]  # fmt: skip
        if ended:
            it = ended[pick % len(ended)]
            if pick % 3:
                self.put("jobs", it.name, replace(it, finished="Complete"))
            else:
                reason = "PodFailurePolicy" if pick % 2 else "BackoffLimitExceeded"
                self.put("jobs", it.name, replace(it, finished="Failed", reason=reason))

    def follow(self) -> None:
        """Every workload's own workflow takes a look at the cache and does what follows."""
        for uid, view in list(self.cache["workloads"].items()):
            jobs = tuple(j for j in self.cache["jobs"].values() if j.workload_uid == uid)
            if not jobs or self.workloads[uid].finished:
                continue
            step = self.look(uid, view, jobs)
            if step.kind in ("retry", "again", "withdrawn"):
                self.ledger = after_requeue(self.ledger, uid, step.turn)
                self.turns[uid] = step.turn
            if step.kind == "finish":
                self.put("workloads", uid, replace(self.workloads[uid], status={"phase": step.phase}))
            for ref in step.delete:
                self.delete_job(ref.name)

    def look(self, uid: str, view: WorkloadView, jobs: tuple[JobView, ...]) -> Step:
        pods = tuple(p for p in self.cache["pods"].values() if p.workload_uid == uid)
        newest = max(jobs, key=lambda j: j.attempt)
        here = next(n for n in self.nodes if n.name == newest.node)
        return next_step(Observation(self.now, view, jobs, pods, here), self.turns.get(uid, Turn()), None, 0.0)

    def delete_job(self, name: str) -> None:
        """Foreground: the Job stays until its pods are gone."""
        it = self.jobs.get(name)
        if it is None or it.deleting:
            return
        self.put("jobs", name, replace(it, deleting=True))
        for p in list(self.pods.values()):
            if p.job_name == name:
                self.put("pods", p.name, replace(p, terminating=True))

    def delete_a_job_by_hand(self, pick: int) -> None:
        names = sorted(self.jobs)
        if names:
            self.delete_job(names[pick % len(names)])

    def edit(self, pick: int) -> None:
        """Somebody wants another number of GPUs, also while there is a Job of which no status tells yet."""
        view = self.workloads[sorted(self.workloads)[pick % len(self.workloads)]]
        if not view.finished and view.spec is not None:
            spec = view.spec.model_copy(update={"gpu_count": 1 + pick % 4})
            self.put("workloads", view.uid, replace(view, spec=spec, generation=view.generation + 1))

    # --- what must always hold --------------------------------------------------------------------------------------

    def really_free(self, name: str) -> int:
        whole = next(n for n in self.nodes if n.name == name).allocatable.gpus
        return whole - sum(p.requests.gpus for p in self.pods.values() if p.node == name)

    def check(self) -> None:
        for n in self.nodes:
            held = sum(p.requests.gpus for p in self.pods.values() if p.node == n.name)
            bound = {p.job_name for p in self.pods.values() if p.node}
            going = {
                j.name: j.requests.gpus for j in self.jobs.values()
                if j.node == n.name and not j.finished and not j.deleting and j.name not in bound and not j.places
                and (not j.counted or any(p.job_name == j.name for p in self.pods.values()))
            }  # fmt: skip
            there = {(p.job_name, p.index) for p in self.pods.values() if p.node}
            held += sum(
                j.requests.gpus for j in self.jobs.values() if not j.finished and not j.deleting
                for index, name in enumerate(ranks(j.places))
                if name == n.name and index not in j.done and (j.name, index) not in there
            )  # fmt: skip
            assert held + sum(going.values()) <= n.allocatable.gpus, f"{n.name} is promised twice"
        for uid in self.workloads:
            live = [j for j in self.jobs.values() if j.workload_uid == uid and not j.finished]
            assert len(live) <= 1, f"two live Jobs for {uid}"
            nodes = {p.job_name for p in self.pods.values() if p.workload_uid == uid}
            assert len(nodes) <= 1, f"pods of two Jobs for {uid}"


def act(world: World, code: int) -> None:
    what, pick = code % 11, code // 11
    actions: list[Callable[[], None]] = [
        world.decide,
        lambda: world.decide(carry_out=pick % 4 != 0),
        lambda: world.deliver("jobs", 1 + pick % 3),
        lambda: world.deliver("pods", 1 + pick % 3),
        lambda: world.deliver("workloads", 1 + pick % 3),
        world.control_jobs,
        lambda: world.end_pod(pick),
        lambda: world.end_job(pick),
        world.follow,
        lambda: world.delete_a_job_by_hand(pick) if pick % 3 == 0 else setattr(world, "now", world.now + pick % 20),
        lambda: world.edit(pick),
    ]
    actions[what]()
    world.check()


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**40),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 2, 3])), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_no_gpu_is_promised_twice_and_everyone_ends(seed: int, wishes: list[tuple[int, int]], taken: int) -> None:
    world = World(
        (node("a", 4), node("b", 4), node("c", 4)),
        # later ones go before earlier ones, so that no promise is kept by merely being made again
        {
            f"w{i}": workload(f"w{i}", gpus, spec={"priority": i, "replicas": pods, "minReplicas": min(pods, 2)})
            for i, (gpus, pods) in enumerate(wishes)
        },
        {"s": pod("s", "a", gpus=taken)},
    )
    dice = random.Random(seed)  # long stories: hypothesis' own lists are mostly short
    for _ in range(dice.randrange(150)):
        act(world, dice.randrange(440))
    for lap in range(400):  # from here on the world is fair: everything is delivered, every controller works
        if all(view.finished for view in world.workloads.values()):
            break
        for kind in ("jobs", "pods", "workloads"):
            world.deliver(kind, 1000)
        world.decide()
        world.control_jobs()
        for _ in range(3):
            world.end_pod(lap)
            world.end_job(1)
        world.follow()
        world.now += 5
        world.check()
    assert all(view.finished for view in world.workloads.values()), "somebody waits for ever"


def test_only_the_promised_job_or_a_later_one_makes_a_promise_visible() -> None:
    old = job("a", "n", 0, gpus=3, finished="Failed")
    assert left_on_n(snapshot([node("n", 8)], jobs=[old]), {"a": promise("a", "n", 1, gpus=3)}).gpus == 5
    assert left_on_n(snapshot([node("n", 8)], jobs=[old]), {"a": promise("a", "n", 0, gpus=3)}).gpus == 8


@pytest.mark.parametrize("name", ["a-a-0", "a-a-1"])
def test_a_promise_to_a_stopped_job_is_not_counted_beside_its_pod_whichever_job_made_that(name: str) -> None:
    """The pod may be visible before the Job shows that it goes on, or was replaced."""
    resumes = replace(promise("a", "n", 1, gpus=3), resumes=Stopped("a-a-0", "j", 1))
    halted = job("a", "n", 0, gpus=3, preempted=True, halted=True)
    made = pod("p", "n", of=replace(halted, name=name), running=True)
    assert left_on_n(snapshot([node("n", 8)], jobs=[halted]), {"a": resumes}).gpus == 5
    assert left_on_n(snapshot([node("n", 8)], jobs=[halted], pods=[made]), {"a": resumes}).gpus == 5
