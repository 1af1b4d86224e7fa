"""Nodes that are warm for a workload's kernel caches come first, and nothing else changes by that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.caches.preference import caches, mounted, told
from planning.caches.warmth import Cache
from planning.memory import Memory
from planning.model import AVOIDED_NODES, Assignment, Avoided, Ledger, NodeView, WorkloadView
from planning.placement import decide
from planning.strategies import informed, installed
from tests.planning.builders import (
    NOW,
    SETTINGS,
    job,
    node,
    placed,
    promise,
    reservation,
    round_of,
    snapshot,
    workload,
)

Warm = Mapping[Cache, frozenset[str]]


def volume(name: str, **attributes: Any) -> dict[str, Any]:
    given_ = {"kernel-name": name, **attributes}
    return {"name": f"v-{name}", "csi": {"driver": "csi.tkm.io", "volumeAttributes": given_}}


def template(*volumes: Mapping[str, Any]) -> dict[str, Any]:
    mounts = [{"name": each.get("name"), "mountPath": f"/{i}"} for i, each in enumerate(volumes)]
    return {"spec": {"containers": [{"name": "c", "image": "i", "volumeMounts": mounts}], "volumes": list(volumes)}}


def user(uid: str, *names: str, gpus: int = 1, **spec: Any) -> WorkloadView:
    """A workload whose pods mount its namespace's caches of these names."""
    return workload(uid, gpus, spec={"template": template(*map(volume, names)), **spec})


def known(*views: WorkloadView, **facts: Any) -> Ledger:
    return Ledger(accepted={view.uid: view.generation for view in views}, **facts)


def ready(**where: str) -> Warm:
    """`ready(k="ab")`: cache k of namespace ns is Ready on the nodes a and b."""
    return {("ns", name): frozenset(nodes) for name, nodes in where.items()}


def the_caches(raw: Mapping[str, Any], namespace: str = "ns") -> tuple[Cache, ...]:
    view = workload("w", spec={"template": raw})
    assert view.spec is not None, view.invalid
    return caches(mounted(view.spec), namespace)


def test_a_template_mounts_caches_of_its_namespace_and_of_the_cluster_each_once() -> None:
    whole = volume("k", scope="cluster")
    found = the_caches(template(volume("l"), whole, {**volume("l", scope="namespace", readOnly="true"), "name": "x"}))
    assert found == (("ns", "l"), ("", "k"))
    assert the_caches(template(volume("l")), "other") == (("other", "l"),)
    assert the_caches(template()) == ()
    plain = workload("w").spec
    assert plain is not None and mounted(plain) == ()


@pytest.mark.parametrize(
    "raw",
    [
        volume("No Name"),
        volume("k", scope="everywhere"),
        volume("k", surprise="1"),
        volume("k", readOnly=True),
        volume("k", mountPath="../x"),
        {"name": "v", "csi": {"driver": "other.example", "volumeAttributes": {"kernel-name": "k"}}},
        {"name": "v", "csi": {"driver": "csi.tkm.io"}},
        {"name": "v", "csi": {"driver": "csi.tkm.io", "volumeAttributes": ["kernel-name"]}},
        {"name": "v", "csi": "csi.tkm.io"},
    ],
)
def test_what_nodes_would_refuse_is_nobodys_cache(raw: Mapping[str, Any]) -> None:
    assert the_caches(template(raw, volume("good"))) == (("ns", "good"),)


def test_a_volume_that_no_container_mounts_is_asked_for_by_nobody() -> None:
    raw = template(volume("k"), volume("l"))
    first = raw["spec"]["containers"][0]
    first["volumeMounts"] = first["volumeMounts"][:1]
    assert the_caches(raw) == (("ns", "k"),)
    raw["spec"]["initContainers"] = [{"name": "i", "image": "i", "volumeMounts": [{"name": "v-l", "mountPath": "/"}]}]
    assert the_caches(raw) == (("ns", "k"), ("ns", "l"))


def only(view: WorkloadView, nodes: Sequence[NodeView], warm: Warm, **facts: Any) -> Assignment:
    (assignment,) = round_of(snapshot(nodes, [view], warm=warm), known(view, **facts)).assignments
    return assignment


def test_the_warmest_node_is_taken_before_the_strategy_decides() -> None:
    nodes, view = [node("a"), node("b", 4), node("c", 4), node("d", 2)], user("w", "k", "l")
    assert only(view, nodes, {}).node == "a", "leastLoaded takes the emptiest"
    assert only(view, nodes, ready(k="bd", l="d")).node == "d"
    assert only(view, nodes, ready(k="cd")).node == "c", "of the equally warm the strategy's"
    elsewhere = {("other", "k"): frozenset("b"), ("", "k"): frozenset("c"), ("ns", "m"): frozenset("d")}
    assert only(view, nodes, elsewhere).node == "a", "other caches are none of its own"


@pytest.mark.parametrize("strategy", installed())
def test_every_strategy_is_preceded(strategy: str) -> None:
    view = user("w", "k", schedulingStrategy=strategy)
    for warm in "abc":
        found = only(view, [node("a"), node("b", 4), node("c", 2)], ready(k=warm))
        assert (found.node, found.strategy) == (warm, strategy)


def test_a_cold_node_is_taken_rather_than_waiting() -> None:
    nodes, view, full = [node("a"), node("b")], user("w", "k"), job("x", "b", gpus=8)
    seen = snapshot(nodes, [view, workload("x", 8)], jobs=[full], warm=ready(k="b"))
    assert placed(round_of(seen, known(view))) == {"w": "a"}
    assert only(view, [node("a"), node("b", ready=False)], ready(k="b")).node == "a"


def test_in_its_reservation_a_workload_takes_the_warm_nodes_first() -> None:
    view = user("w", "k", reservation="r")
    held = reservation("r", gpus=16, start=-10, end=1000)
    ledger = known(view, reserved={held.uid: {"a": 8, "b": 8}})
    for warm in "ab":
        seen = snapshot([node("a"), node("b"), node("c")], [view], reservations=[held], warm=ready(k=f"{warm}c"))
        assert placed(round_of(seen, ledger)) == {"w": warm}


def test_where_room_is_kept_for_others_warm_nodes_come_first_too() -> None:
    """Whoever can be stopped may use what is reserved for later."""
    view = user("w", "k", preemptible=True)
    held = reservation("r", gpus=24, start=1000, end=9000)
    ledger = known(view, reserved={held.uid: dict.fromkeys("abc", 8)})
    for warm in "abc":
        seen = snapshot([node(name) for name in "abc"], [view], reservations=[held], warm=ready(k=warm))
        (found,) = round_of(seen, ledger).assignments
        assert (found.node, found.lent) == (warm, True)


def test_who_comes_next_still_finds_the_reserved_room_that_a_warm_node_was_taken_before() -> None:
    views = [user("w1", "k", gpus=8, preemptible=True), user("w2", gpus=8, preemptible=True)]
    held = reservation("r", gpus=16, start=1000, end=9000)
    ledger = known(*views, reserved={held.uid: dict.fromkeys("ab", 8)})
    for warm in "ab":
        seen = snapshot([node("a"), node("b")], views, reservations=[held], warm=ready(k=warm))
        found = placed(round_of(seen, ledger))
        assert found["w1"] == warm and set(found.values()) == {"a", "b"}


def test_what_is_kept_for_the_first_in_the_queue_is_lent_on_warm_nodes_first() -> None:
    running = [workload(f"on-{name}", 2) for name in "ab"]
    jobs = [job(f"on-{name}", name, gpus=2) for name in "ab"]
    first = [
        workload(f"first-{name}", 8, created=NOW - 500, spec={"nodeSelector": {"kubernetes.io/hostname": name}})
        for name in "ab"
    ]
    view = user("w", "k", preemptible=True)
    for warm in "ab":
        seen = snapshot([node("a"), node("b")], [*running, *first, view], jobs=jobs, warm=ready(k=warm))
        (found,) = round_of(seen, known(view)).assignments
        assert (found.uid, found.node, found.backfill) == ("w", warm, 0.0)


def test_a_gangs_pods_go_to_warm_nodes_of_the_domain_that_it_gets_anyway() -> None:
    zones = {"a": "east", "b": "east", "c": "east", "d": "west", "e": "west"}
    nodes = [node(name, 2, labels={"zone": zone}) for name, zone in zones.items()]
    view = user("w", "k", replicas=3, topology={"level": "zone", "mode": "Required"})
    assert only(view, nodes, ready(k="abcd")).places == (("d", 2), ("e", 1))
    assert only(view, nodes, ready(k="abce")).places == (("d", 1), ("e", 2))


def test_a_workload_that_warm_nodes_would_not_run_gets_everywhere_in_the_end() -> None:
    """More warm nodes than are remembered, and none of them has it: chance must lead it to the others."""
    names = [f"n{i:02}" for i in range(AVOIDED_NODES + 3)]
    nodes, view = [node(name) for name in [*names, "cold"]], user("w", "k")
    warm = {("ns", "k"): frozenset(names)}
    avoided = {"w": Avoided(1, tuple(names[:AVOIDED_NODES]))}
    seen, ledger = snapshot(nodes, [view], warm=warm), known(view, avoided=avoided)
    found = {round_of(seen, ledger, seed=seed).assignments[0].node for seed in range(40)}
    assert found == {*names[AVOIDED_NODES:], "cold"}
    first = known(view, avoided={"w": Avoided(1, tuple(names[:2]))})
    assert placed(round_of(seen, first))["w"] in names[2:], "until then the warm ones that are left come first"


def test_a_decision_tells_what_became_of_the_caches() -> None:
    nodes, one, two = [node("a"), node("b", 1)], user("w", "k"), user("w", "k", "l")
    assert told(promise("w", "a")) == told(only(workload("w"), nodes, ready(k="a"))) == ""
    assert told(only(one, nodes, ready(k="b"))) == "its kernel cache is ready there"
    assert told(only(one, nodes, {})) == "its kernel cache is ready on no node yet"
    wide = user("w", "k", gpus=2)
    assert told(only(wide, nodes, ready(k="b"))) == (
        "its kernel cache is not ready there: no node where it is ready could take it"
    )
    assert told(only(two, nodes, ready(k="b", l="b"))) == "its 2 kernel caches are ready there"
    assert told(only(two, nodes, ready(k="b"))) == ("1 of its 2 kernel caches is ready there, and no node has more")
    wide = user("w", "k", "l", gpus=2)
    assert told(only(wide, nodes, ready(k="b", l="b"))) == (
        "none of its 2 kernel caches is ready there: no node with more could take it"
    )
    gang = user("w", "k", gpus=8, replicas=2)
    assert told(only(gang, [node("a"), node("b")], ready(k="ab"))) == "its kernel cache is ready on all of its nodes"
    assert told(only(gang, [node("a"), node("b")], ready(k="a"))) == (
        "its kernel cache is not ready on all of its nodes"
    )


def test_ranks_are_kept_for_as_long_as_the_same_nodes_are_warm() -> None:
    memory, strategy, wanted = Memory(), informed("leastLoaded", tuple), (("ns", "k"),)
    warm = ready(k="a", l="b")
    memory.begin(SETTINGS)
    first = memory.warm_first(strategy, wanted, warm)
    memory.begin(SETTINGS)
    assert memory.warm_first(strategy, wanted, {**warm, ("ns", "l"): frozenset("c")}) is first
    assert memory.warm_first(strategy, wanted, {**warm, ("ns", "k"): frozenset("b")}) is not first
    assert first.steady and first.counts == {"a": 1}


names = st.sampled_from("abcd")
warmths = st.fixed_dictionaries({("ns", name): st.frozensets(names) for name in "kl"})
fleets = st.dictionaries(names, st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans()), min_size=1)
mounts = st.sampled_from(["", "k", "l", "kl"])


def built(fleet: Mapping[str, tuple[int, int, bool]]) -> tuple[list[NodeView], list[Any], list[WorkloadView]]:
    """Nodes of which so many GPUs are in use."""
    nodes = [node(name, gpus, ready=up) for name, (gpus, _, up) in fleet.items()]
    used = {name: min(gpus, held) for name, (gpus, held, _) in fleet.items() if min(gpus, held)}
    jobs = [job(f"on-{name}", name, gpus=held) for name, held in used.items()]
    return nodes, jobs, [workload(f"on-{name}", held) for name, held in used.items()]


@given(fleets, warmths, mounts, st.integers(1, 8), st.sampled_from(installed()))
def test_it_changes_where_and_never_whether(
    fleet: Mapping[str, tuple[int, int, bool]], warm: Warm, mount: str, gpus: int, strategy: str
) -> None:
    nodes, jobs, running = built(fleet)
    view = user("w", *mount, gpus=gpus, schedulingStrategy=strategy)

    def seen(nodes: Sequence[NodeView], warm: Warm) -> dict[str, str]:
        here = {each.name for each in nodes}
        mine = [each for each in jobs if each.node in here]
        others = [each for each in running if each.uid in {job.workload_uid for job in mine}]
        return placed(round_of(snapshot(nodes, [view, *others], jobs=mine, warm=warm), known(view)))

    found = seen(nodes, warm)
    assert found.keys() == seen(nodes, {}).keys()
    able = [each.name for each in nodes if seen([each], {})]
    assert bool(found) == bool(able)
    if found:
        counts = Counter(name for each in mount for name in warm["ns", each])
        assert found["w"] in able
        assert counts[found["w"]] == max(counts[name] for name in able)


@given(fleets, warmths, st.lists(mounts, max_size=12), st.integers(1, 4), st.sampled_from(installed()))
def test_of_a_queue_of_equals_as_many_are_placed(
    fleet: Mapping[str, tuple[int, int, bool]], warm: Warm, queue: list[str], gpus: int, strategy: str
) -> None:
    nodes, jobs, running = built(fleet)
    views = [user(f"w{i}", *mount, gpus=gpus, schedulingStrategy=strategy) for i, mount in enumerate(queue)]
    rounds = [round_of(snapshot(nodes, [*views, *running], jobs=jobs, warm=each), known(*views)) for each in (warm, {})]
    assert placed(rounds[0]).keys() == placed(rounds[1]).keys()
    held = Counter({each.node: each.requests.gpus for each in jobs})
    for assignment in rounds[0].assignments:
        held[assignment.node] += gpus
    assert all(held[each.name] <= max(each.allocatable.gpus, 0) for each in nodes)


@given(st.lists(st.tuples(fleets, warmths, st.lists(mounts, max_size=5)), max_size=8), st.sampled_from(installed()))
def test_with_a_memory_each_round_decides_as_without(
    rounds: list[tuple[Mapping[str, tuple[int, int, bool]], Warm, list[str]]], strategy: str
) -> None:
    memory = Memory()
    for fleet, warm, queue in rounds:
        nodes, jobs, running = built(fleet)
        views = [user(f"w{i}", *mount, schedulingStrategy=strategy) for i, mount in enumerate(queue)]
        seen, ledger = snapshot(nodes, [*views, *running], jobs=jobs, warm=warm, now=NOW), known(*views)
        fresh = decide(seen, ledger, SETTINGS, limit=9, seed=1)
        assert decide(seen, ledger, SETTINGS, limit=9, seed=1, memory=memory) == fresh
