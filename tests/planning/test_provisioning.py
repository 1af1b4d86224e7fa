"""A node is ordered for who needs one: once, not before its time, and not for whom there will be room anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.settings import Provisioning as Rules
from crds.settings import Settings
from planning.accelerators import AMD
from planning.arrivals import Arrivals, coming_for
from planning.capacity import Room
from planning.jobs import shape_of
from planning.ledger import after_carrying_out, after_deciding, after_provisioning
from planning.model import Booking, Decision, Gap, Ledger, NodeView, Provisioning, Resources, Snapshot
from planning.placement import decide
from planning.places import Gang
from planning.provisioning import AGAIN, PROVISIONING, RENEWED
from planning.resources import COMING
from tests.planning.builders import NOW, job, node, pod, quota, snapshot, taint, workload

WAIT, TIMEOUT = 30, 900


def settings(**changes: Any) -> Settings:
    rules = {"className": "c", "waitSeconds": WAIT, "timeoutSeconds": TIMEOUT, **changes}
    parsed, wrong = Settings.parse({"provisioning": rules})
    assert parsed is not None, wrong
    return parsed


def round_of(seen: Snapshot, ledger: Ledger | None = None, **changes: Any) -> Decision:
    return decide(seen, ledger or Ledger(), settings(**changes), limit=100, seed=1)


def reason(decision: Decision, uid: str) -> str:
    return next((each.reason for each in decision.waiting if each.uid == uid), "")


def ordered(decision: Decision) -> list[str]:
    return [order.uid for order in decision.orders]


def arriving(name: str, gpus: int = 8, age: float = 60.0, **changes: Any) -> NodeView:
    """A node whose GPUs are not allocatable yet."""
    view = node(name, 0, gaps=(Gap(gpus, "no device plugin runs there"),), created=NOW - age)
    return replace(view, **changes)


def busy(name: str, gpus: int = 8, until: int | None = None) -> tuple[NodeView, Any, Any]:
    running = job(f"on-{name}", name, gpus=gpus, started=NOW, ready=True, active_deadline=until)
    return node(name, gpus), running, pod(f"pod-{name}", name, of=running)


# --- when a node is ordered ----------------------------------------------------------------------------------------


def test_without_settings_nothing_is_ordered() -> None:
    seen = snapshot([node("n", 4)], [workload("a", 8), workload("b", 4), workload("c", 4)])
    decision = decide(seen, Ledger(), Settings(), limit=100, seed=1)
    assert not decision.orders and not decision.provisioning
    assert [verdict.uid for verdict in decision.verdicts] == ["a"]


def test_what_no_node_could_hold_has_one_ordered_at_once_and_costs_no_retry() -> None:
    decision = round_of(snapshot([node("n", 4)], [workload("a", 8)]))
    assert ordered(decision) == ["a"] and not decision.verdicts
    (told,) = decision.waiting
    assert told.reason == PROVISIONING
    assert told.message == "no node has 8 GPUs; the largest has 4; a node is ordered for it"
    assert decision.orders[0].generation == 1 and decision.queued == 1


def test_an_empty_cluster_has_a_node_ordered() -> None:
    assert ordered(round_of(snapshot([], [workload("a", 1)]))) == ["a"]


def test_who_waits_for_capacity_waits_for_it_some_time_first() -> None:
    full, running, its_pod = busy("n")
    seen = snapshot([full], [workload("on-n", 8), workload("a", 8)], jobs=[running], pods=[its_pod])
    first = round_of(seen)
    assert not first.orders and reason(first, "a") == "WaitingForCapacity"
    assert first.wake_after == WAIT
    ledger = after_deciding(Ledger(), first)
    assert ledger.provisioning == {"a": Provisioning(1, "waiting", NOW)}
    early = round_of(replace(seen, now=NOW + WAIT - 1), ledger)
    assert not early.orders and early.wake_after == 1
    assert ordered(round_of(replace(seen, now=NOW + WAIT), ledger)) == ["a"]


def test_who_found_a_place_begins_to_wait_anew() -> None:
    full, running, its_pod = busy("n")
    waiting = [workload("on-n", 8), workload("a", 8)]
    ledger = after_deciding(Ledger(), round_of(snapshot([full], waiting, jobs=[running], pods=[its_pod])))
    free = round_of(snapshot([node("n")], [workload("a", 8)]), ledger)
    assert after_deciding(ledger, free).provisioning == {}


def test_an_order_is_made_once() -> None:
    seen = snapshot([], [workload("a", 8)])
    ledger = after_deciding(Ledger(), round_of(seen))
    assert ledger.provisioning["a"].state == "ordered"
    later = round_of(replace(seen, now=NOW + RENEWED - 1), ledger)
    assert not later.orders and not later.verdicts and reason(later, "a") == PROVISIONING
    assert after_deciding(ledger, later) == ledger


def test_an_open_order_is_given_again_once_an_hour_to_whoever_carries_it_out() -> None:
    """To nobody, if that workflow was terminated."""
    known = Provisioning(1, "provisioned", NOW - RENEWED, Booking("r", "c"))
    decision = round_of(snapshot([], [workload("a", 8)]), Ledger(provisioning={"a": known}))
    assert ordered(decision) == ["a"]
    ledger = after_deciding(Ledger(provisioning={"a": known}), decision)
    assert ledger.provisioning == {"a": replace(known, since=NOW)}
    assert not round_of(snapshot([], [workload("a", 8)]), ledger).orders


def test_an_edited_workload_has_another_ordered() -> None:
    ledger = Ledger(provisioning={"a": Provisioning(1, "ordered", NOW)})
    decision = round_of(snapshot([], [workload("a", 4, generation=2)]), ledger, maxOrders=1)
    assert [(order.uid, order.generation) for order in decision.orders] == [("a", 2)]


@pytest.mark.parametrize("state", ["ordered", "provisioned"])
def test_so_many_at_once_at_most(state: Any) -> None:
    ledger = Ledger(provisioning={"a": Provisioning(1, state, NOW)})
    decision = round_of(snapshot([], [workload(uid, 8) for uid in "abcd"]), ledger, maxOrders=2)
    assert ordered(decision) == ["b"]
    assert [reason(decision, uid) for uid in "cd"] == [PROVISIONING] * 2 and not decision.verdicts
    assert "when one of the 2 orders that may be open at once is done" in decision.waiting[-1].message


def test_an_order_whose_workload_found_a_place_takes_no_ones_turn() -> None:
    placed, its_pod = job("a", "n", gpus=8), pod("p", "n", of=job("a", "n", gpus=8))
    ledger = Ledger(provisioning={"a": Provisioning(1, "provisioned", NOW)})
    seen = snapshot([node("n")], [workload("a", 8), workload("b", 4, spec={"nodeSelector": {"x": "y"}})],
                    jobs=[placed], pods=[its_pod])  # fmt: skip
    assert ordered(round_of(seen, ledger, maxOrders=1)) == ["b"]


# --- for whom there is room anyway ---------------------------------------------------------------------------------


def test_a_node_that_is_coming_is_not_ordered_again() -> None:
    decision = round_of(snapshot([arriving("new")], [workload("a", 8), workload("b", 8)]), waitSeconds=0)
    assert len(decision.orders) == 1, "it will hold one of them"


def test_one_coming_node_serves_as_many_as_fit() -> None:
    asked = [workload(uid, 2) for uid in "abcde"]
    assert ordered(round_of(snapshot([arriving("new")], asked), waitSeconds=0)) == ["e"]


def test_what_is_coming_is_first_for_those_whose_order_is_open() -> None:
    ledger = Ledger(provisioning={"z": Provisioning(1, "provisioned", NOW)})
    asked = [workload("a", 8), workload("z", 8)]
    decision = round_of(snapshot([arriving("new")], asked), ledger, waitSeconds=0)
    assert ordered(decision) == ["a"], "the node that is coming is z's"


def test_a_node_of_unknown_size_serves_one() -> None:
    coming = arriving("new", 0)
    assert ordered(round_of(snapshot([coming], [workload("a", 8)]), waitSeconds=0)) == []
    both = round_of(snapshot([coming], [workload("a", 1), workload("b", 1)]), waitSeconds=0)
    assert ordered(both) == ["b"]


def test_of_a_new_node_only_what_it_does_not_offer_yet_is_coming() -> None:
    """Its NVIDIA GPUs are there, and one who waits for such does so because they are another's; AMD's will be."""
    mixed = node("new", 8, gaps=(Gap(0, "no device plugin runs there", AMD),), created=NOW - 5)
    assert ordered(round_of(snapshot([mixed], [workload("a", 8), workload("b", 8)]), waitSeconds=0)) == ["b"]
    asks = [workload(uid, 4, spec={"gpuResource": AMD}) for uid in "cd"]
    assert ordered(round_of(snapshot([mixed], asks), waitSeconds=0)) == ["d"], (
        "it serves one, for nobody tells how many"
    )
    told = replace(mixed, gaps=(Gap(8, "no device plugin runs there", AMD),))
    assert not round_of(snapshot([told], asks), waitSeconds=0).orders


def test_a_new_node_that_is_not_ready_yet_is_coming() -> None:
    coming = node("new", 8, ready=False, created=NOW - 5)
    assert not round_of(snapshot([coming], [workload("a", 8)]), waitSeconds=0).orders
    silent = node("new", 0, ready=False, created=NOW - 5, allocatable=Resources(), gaps=(Gap(8, "none"),))
    assert not round_of(snapshot([silent], [workload("a", 8)]), waitSeconds=0).orders


@pytest.mark.parametrize("asks", [{}, {"replicas": 2}], ids=["single", "gang"])
@pytest.mark.parametrize(
    "new",
    [node("new", 8, created=NOW - 60), arriving("new"), node("new", 8, created=NOW - 60, ready=False)],
    ids=["usable", "without a plugin", "not ready"],
)
def test_a_new_node_that_does_not_tell_its_memory_yet_is_waited_for(new: NodeView, asks: dict[str, Any]) -> None:
    """The device plugin may come before the labels of feature discovery."""
    large = workload("a", 4, spec={**asks, "gpuMemory": "80G"})
    assert not round_of(snapshot([new], [large]), waitSeconds=0).orders
    waits = decide(snapshot([new], [large]), Ledger(), Settings(), limit=100, seed=1)
    assert not waits.verdicts and waits.queued == 1, "nor does it cost a retry where nobody orders"
    small = replace(new, gpu_memory=(("", 16_384),))
    old = replace(new, created=NOW - COMING - 1)
    for known in small, old:
        assert ordered(round_of(snapshot([known], [large]), waitSeconds=0)) == ["a"]
        (verdict,) = decide(snapshot([known], [large]), Ledger(), Settings(), limit=100, seed=1).verdicts
        assert verdict.reason == "NoSuitableNode"


def test_before_another_try_a_node_that_does_not_tell_its_memory_yet_counts_as_coming() -> None:
    new, asked = node("new", 8, created=NOW - 60), workload("a", 8, spec={"gpuMemory": "80G"})
    assert asked.spec is not None
    shape = shape_of(asked.spec, Settings())
    assert coming_for(shape, None, snapshot([new], [asked]), Settings())
    used = snapshot([new], [asked], pods=[pod("b", "new", gpus=1)])
    assert not coming_for(shape, None, used, Settings()), "somebody has one of them"
    plain = workload("a", 8).spec
    assert plain is not None
    assert not coming_for(shape_of(plain, Settings()), None, snapshot([new], [asked]), Settings()), "it is there"


@pytest.mark.parametrize(
    "never_coming",
    [
        arriving("old", age=COMING + 1),
        arriving("cordoned", unschedulable=True),
        arriving("small", 4),
        arriving("other", labels={"pool": "theirs"}),
        arriving("tainted", taints=(taint("theirs"),)),
        arriving("weak", allocatable=Resources(0, 1000, 2**30, 110)),
    ],
    ids=lambda view: view.name,
)
def test_what_will_not_hold_it_is_not_waited_for(never_coming: NodeView) -> None:
    asked = workload("a", 8, spec={"nodeSelector": {"kubernetes.io/hostname": never_coming.name},
                                   "resources": {"requests": {"cpu": "4"}}})  # fmt: skip
    assert ordered(round_of(snapshot([never_coming], [asked]), waitSeconds=0)) == ["a"]


def test_room_that_is_kept_and_free_in_time_is_waited_for() -> None:
    full, running, its_pod = busy("n", until=TIMEOUT)
    seen = snapshot([full], [workload("on-n", 8), workload("a", 8)], jobs=[running], pods=[its_pod])
    decision = round_of(seen, waitSeconds=0)
    assert not decision.orders and decision.queued == 1
    late, running, its_pod = busy("n", until=TIMEOUT + 1)
    seen = snapshot([late], [workload("on-n", 8), workload("a", 8)], jobs=[running], pods=[its_pod])
    assert ordered(round_of(seen, waitSeconds=0)) == ["a"]


def test_nothing_is_ordered_for_who_lacks_quota_or_for_whom_others_are_stopped() -> None:
    empty = snapshot([], [workload("a", 8)], quotas=[quota("q", "ns", gpus=4)])
    assert not round_of(empty).orders
    running = job("low", "n", gpus=8, started=NOW - 1000, ready=True, counted=True)
    preemptible = workload("low", 8, spec={"priority": "low"})
    seen = snapshot([node("n")], [preemptible, workload("a", 8, spec={"priority": "high"})], jobs=[running],
                    pods=[pod("p", "n", of=running, running=True)])  # fmt: skip
    decision = round_of(seen, waitSeconds=0)
    assert decision.preemptions and not decision.orders


@pytest.mark.parametrize("spec", [{"suspend": True}, {"schedulingStrategy": "nobodys"}])
def test_nothing_is_ordered_for_who_is_not_in_the_queue(spec: dict[str, Any]) -> None:
    assert not round_of(snapshot([], [workload("a", 8, spec=spec)])).orders


# --- what becomes of an order --------------------------------------------------------------------------------------

BOOKING = Booking("a-1", "c")


def test_what_is_booked_goes_with_the_place() -> None:
    ledger = Ledger(provisioning={"a": Provisioning(1, "ordered", NOW)})
    ledger = after_provisioning(ledger, "a", 1, Provisioning(1, "provisioned", NOW, BOOKING))
    decision = round_of(snapshot([node("n"), node("m")], [workload("a", 8), workload("b", 8)]), ledger)
    assert {each.uid: each.booking for each in decision.assignments} == {"a": BOOKING, "b": None}


def test_an_order_in_vain_ends_as_without_orders() -> None:
    seen = snapshot([node("n", 4)], [workload("a", 8)])
    ledger = Ledger(provisioning={"a": Provisioning(1, "failed", NOW)})
    decision = round_of(seen, ledger)
    assert [verdict.reason for verdict in decision.verdicts] == ["NoSuitableNode"] and not decision.orders
    assert decision.verdicts[0].message == "no node has 8 GPUs; the largest has 4"
    again = round_of(replace(seen, now=NOW + AGAIN), ledger)
    assert ordered(again) == ["a"], "what was sold out may be there again"
    gone = round_of(snapshot([node("n", 4)], [], now=NOW + AGAIN), ledger)
    assert gone.unprovisioned == ["a"]


def test_who_could_have_a_node_goes_on_waiting_after_an_order_in_vain() -> None:
    full, running, its_pod = busy("n")
    seen = snapshot([full], [workload("on-n", 8), workload("a", 8)], jobs=[running], pods=[its_pod])
    decision = round_of(seen, Ledger(provisioning={"a": Provisioning(1, "failed", NOW - 100)}), waitSeconds=0)
    assert not decision.orders and not decision.verdicts and reason(decision, "a") == "WaitingForCapacity"


def test_news_of_an_order_that_is_not_the_ledgers_changes_nothing() -> None:
    ledger = Ledger(provisioning={"a": Provisioning(2, "ordered", NOW), "b": Provisioning(1, "waiting", NOW)})
    booked = Provisioning(1, "provisioned", NOW, BOOKING)
    for uid in "abc":
        assert after_provisioning(ledger, uid, 1, booked) == ledger
        assert after_provisioning(ledger, uid, 1, None) == ledger
    assert after_provisioning(ledger, "a", 2, None).provisioning.keys() == {"b"}


def test_an_order_that_reached_nobody_is_no_order() -> None:
    ledger = Ledger(provisioning={"a": Provisioning(1, "ordered", NOW), "b": Provisioning(1, "provisioned", NOW)})
    assert after_carrying_out(ledger, (), ["a", "b"], (), {}, {}, {}, {}).provisioning.keys() == {"b"}


def test_who_is_gone_is_forgotten() -> None:
    ledger = Ledger(provisioning={"a": Provisioning(1, "ordered", NOW)})
    decision = round_of(snapshot([], []), ledger)
    assert after_deciding(ledger, decision) == Ledger()


def test_settings_that_go_take_notes_along_and_leave_open_orders_to_their_end() -> None:
    states = {"a": "waiting", "b": "ordered", "c": "failed"}
    ledger = Ledger(provisioning={uid: Provisioning(1, state, NOW) for uid, state in states.items()})  # type: ignore[arg-type]  # the states are those
    asked = [workload(uid, 8) for uid in states]
    decision = decide(snapshot([], asked), ledger, Settings(), limit=100, seed=1)
    assert after_deciding(ledger, decision).provisioning.keys() == {"b"}


# --- for any cluster -----------------------------------------------------------------------------------------------

SIZES = st.integers(1, 8)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Snapshot, Ledger, Rules]:
    nodes = [node(f"n{i}", gpus) for i, gpus in enumerate(draw(st.lists(st.integers(0, 8), max_size=3)))]
    nodes += [arriving(f"c{i}", gpus) for i, gpus in enumerate(draw(st.lists(SIZES, max_size=3)))]
    sizes = draw(st.lists(st.tuples(SIZES, st.sampled_from(["ns", "ns", "other"])), max_size=8))
    asked = [workload(f"w{i}", gpus, namespace=namespace) for i, (gpus, namespace) in enumerate(sizes)]
    states: st.SearchStrategy[Any] = st.sampled_from(["waiting", "ordered", "provisioned", "failed"])
    about = draw(st.dictionaries(st.sampled_from([view.uid for view in asked] or ["w"]), states, max_size=4))
    ages = draw(st.lists(st.integers(0, 4000), min_size=4, max_size=4))
    known = {
        uid: Provisioning(1, state, NOW - age)
        for (uid, state), age in zip(about.items(), ages, strict=False)
    }  # fmt: skip
    rules = Rules(class_name="c", wait_seconds=draw(st.sampled_from([0, 30])), max_orders=draw(st.integers(1, 4)))
    return snapshot(nodes, asked), Ledger(provisioning=known), rules


@given(clusters(), st.integers(1, 6))
def test_never_two_orders_for_one_need_and_never_more_than_may_be_open(
    drawn: tuple[Snapshot, Ledger, Rules], rounds: int
) -> None:
    seen, ledger, rules = drawn
    before = {uid for uid, known in ledger.provisioning.items() if known.open}
    made, tenants = list[str](), {view.namespace for view in seen.workloads}
    for number in range(rounds):
        decision = decide(
            replace(seen, now=NOW + 40 * number), ledger, Settings(provisioning=rules), limit=100, seed=number
        )
        in_queue = {view.uid for view in seen.workloads}
        placed = {each.uid for each in decision.assignments}
        for order in decision.orders:
            assert order.uid not in placed and order.uid in in_queue
            known = ledger.provisioning.get(order.uid)
            again = known is not None and known.open
            assert not again or NOW + 40 * number - known.since >= RENEWED  # type: ignore[union-attr]  # it is there
            made += [] if again else [order.uid]
        ledger = after_deciding(ledger, decision)
        open_now = {uid for uid, known in ledger.provisioning.items() if known.open and uid not in ledger.in_flight}
        assert len(open_now) <= max(rules.max_orders, len(before))
        for tenant in tenants if len(tenants) > 1 else ():
            mine = {view.uid for view in seen.workloads if view.namespace == tenant}
            assert len(open_now & mine) <= max((rules.max_orders + 1) // 2, len(before & mine))
    assert len(made) == len(set(made))


@given(st.lists(SIZES, min_size=1, max_size=6), st.integers(0, 3))
def test_none_is_ordered_while_what_is_coming_suffices(sizes: list[int], spare: int) -> None:
    coming = [arriving(f"c{i}", gpus) for i, gpus in enumerate(sizes)]
    asked = [workload(f"w{i}", gpus) for i, gpus in enumerate(sizes)]
    rules = Rules(class_name="c", wait_seconds=0, max_orders=100)
    # All alike, so that any order of turns fits them.
    alike = snapshot([replace(each, gaps=(Gap(8, "none"),)) for each in coming], asked)
    assert not decide(alike, Ledger(), Settings(provisioning=rules), limit=100, seed=spare).orders
    lacking = replace(alike, nodes=alike.nodes[1:], workloads=tuple(workload(w.uid, 8) for w in asked))
    assert len(decide(lacking, Ledger(), Settings(provisioning=rules), limit=100, seed=spare).orders) == 1


def test_a_gang_needs_nodes_for_all_of_its_pods_and_claims_none_where_they_do_not_suffice() -> None:
    gang = workload("g", 8, spec={"replicas": 2}, created=NOW - 200)
    single = workload("s", 8)
    for coming, wanted in ((["n"], ["g"]), (["n", "m"], ["s"]), (["n", "m", "o"], [])):
        nodes = [arriving(name) for name in coming]
        waited = Ledger(provisioning={uid: Provisioning(1, "waiting", NOW - WAIT) for uid in "gs"})
        assert ordered(round_of(snapshot(nodes, [gang, single]), waited)) == wanted, coming


@pytest.mark.parametrize(("free", "coming", "wanted"), [(1, 1, []), (0, 2, []), (0, 1, ["g"]), (1, 0, ["g"])])
def test_a_gang_counts_what_is_free_beside_what_is_coming(free: int, coming: int, wanted: list[str]) -> None:
    nodes = [node(f"n{i}") for i in range(free)] + [arriving(f"c{i}") for i in range(coming)]
    gang = workload("g", 8, spec={"replicas": 2})
    assert ordered(round_of(snapshot(nodes, [gang]), waitSeconds=0)) == wanted


def test_what_one_gang_counts_as_free_another_does_not_count_again() -> None:
    """For the first, room is kept on two of the nodes; three are free on the third, and three are coming twice."""
    nodes = [node(f"n{i}") for i in range(3)] + [arriving(f"c{i}", 3) for i in range(2)]
    first = workload("first", 8, spec={"replicas": 2}, created=NOW - 300)
    gangs = [workload(uid, 3, spec={"replicas": 2}, created=NOW - age) for uid, age in (("g", 200), ("h", 100))]
    theirs = [pod(f"p{i}", f"n{i}", gpus=5) for i in range(3)]
    seen = snapshot(nodes, [first, *gangs], pods=theirs)
    assert ordered(round_of(seen, waitSeconds=0)) == ["first", "h"]


@pytest.mark.parametrize(("zones", "wanted"), [("aab", []), ("abc", ["g"]), ("ab-", ["g"])])
def test_a_gang_that_must_be_in_one_domain_is_served_by_one(zones: str, wanted: list[str]) -> None:
    """Nothing is coming to zone b; what lacks the label is in no domain."""
    level = "topology.kubernetes.io/zone"
    labels = [{level: zone} if zone != "-" else {} for zone in zones]
    nodes = [arriving("c0", labels=labels[0]), node("n0", labels=labels[1]), node("n1", labels=labels[2])]
    gang = workload("g", 8, spec={"replicas": 2, "topology": {"mode": "Required", "level": level}})
    waited = Ledger(provisioning={"g": Provisioning(1, "waiting", NOW - WAIT)})
    assert ordered(round_of(snapshot(nodes, [gang]), waited)) == wanted


@given(st.integers(1, 6), st.integers(0, 3), st.lists(SIZES, max_size=3), st.lists(SIZES, max_size=3))
def test_a_gang_has_nodes_ordered_just_if_what_is_free_and_coming_does_not_suffice(
    pods: int, each: int, free: list[int], coming: list[int]
) -> None:
    nodes = [node(f"n{i}", gpus) for i, gpus in enumerate(free)]
    nodes += [arriving(f"c{i}", gpus) for i, gpus in enumerate(coming)]
    gang = workload("g", each + 1, spec={"replicas": pods + 1})
    decision = round_of(snapshot(nodes, [gang]), waitSeconds=0)
    now, later = (sum(gpus // (each + 1) for gpus in some) for some in (free, coming))
    assert bool(decision.assignments) == (now > pods)
    assert bool(decision.orders) == (now + later <= pods)


def test_many_gangs_that_no_coming_node_can_hold_are_looked_at_once() -> None:
    nodes = [arriving(f"n{i}") for i in range(3)]
    arrivals = Arrivals(nodes, {each.name: Room(0, 64_000, 2**40, 110) for each in nodes}, NOW)
    spec = workload("g", 8).spec
    assert spec is not None
    shape = shape_of(spec, Settings())
    four, two = Gang(4, 4), Gang(2, 2)
    assert not arrivals.serve(shape, four) and arrivals.serve(shape, two) and not arrivals.serve(shape, two)
    assert arrivals.serve(shape) and not arrivals.serve(shape)
