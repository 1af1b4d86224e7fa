"""A digest's way to all nodes: waves, rollback, nodes that come, go and fail, and the farewell."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from crds.kernelcache import TritonKernelCacheSpec
from planning.caches.orders import NodeOrder, Outcome, Report
from planning.caches.rollout import (
    AT_ONCE,
    Aim,
    Nodes,
    Rollout,
    Target,
    Wanted,
    answered,
    applied,
    farewell,
    next_ask,
    reported,
    step,
    unavailable,
)

IMAGE = "registry.example/team/cache"
A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


def spec(**changes: Any) -> TritonKernelCacheSpec:
    policy = {key: changes.pop(key) for key in ("maxUnavailable", "automaticRollback", "type") if key in changes}
    raw = {"ociImage": {"image": f"{IMAGE}:v1"}, "updatePolicy": policy, **changes}
    parsed, problem = TritonKernelCacheSpec.parse(raw)
    assert parsed is not None, problem
    return parsed


def wanted(rules: str = "r", generation: int = 1, **changes: Any) -> Wanted:
    return Wanted(generation, spec(**changes), {IMAGE: rules})


def aim(digest: str, good: str = "") -> Aim:
    target = Target(IMAGE, digest)
    return Aim(f"{IMAGE}:v1", target, 0.0, target, Target(IMAGE, good) if good else Target())


def nodes(*names: str, away: tuple[str, ...] = (), rechecked: tuple[str, ...] = ()) -> Nodes:
    usable = {name: name not in away for name in names}
    return Nodes(usable, frozenset(names), frozenset(rechecked))


@dataclass
class World:
    """The nodes as they are: what each serves, which orders wait for it, and what becomes of a digest on it."""

    want: Wanted
    nodes: Nodes
    rollout: Rollout
    serves: dict[str, str] = field(default_factory=dict)
    inbox: dict[str, NodeOrder] = field(default_factory=dict)
    clock: int = 0

    def look(self) -> None:
        self.clock += 1
        taken = step(self.rollout, self.want, self.nodes, self.clock)
        self.take(taken)

    def leave(self, *, forced: bool = False) -> bool:
        self.clock += 1
        taken = farewell(self.rollout, 1, self.nodes, self.clock, forced=forced)
        self.take(taken)
        return taken.over

    def take(self, taken: Any) -> None:
        for sent in taken.orders:
            assert sent.node in self.nodes.alive
            before = self.rollout.members.get(sent.node)
            assert before is None or sent.order.epoch > before.epoch
            self.inbox[sent.node] = sent.order
        self.rollout = applied(self.rollout, taken)

    def answer(self, name: str, outcome: Outcome, reason: str = "") -> None:
        order = self.inbox[name]
        if outcome == "ready":
            self.serves[name] = order.digest
        if outcome == "removed":
            self.serves.pop(name, None)
        if outcome not in ("retrying", "busy"):
            del self.inbox[name]
        report = Report(name, order.epoch, outcome, self.serves.get(name, ""), reason, f"{outcome} on {name}", 2)
        self.rollout = reported(self.rollout, report)

    def serve(self, digest: str) -> None:
        for name in self.nodes.selected:
            self.serves[name] = digest
        self.rollout = replace(self.rollout, aim=aim(digest))
        self.look()
        while self.inbox:
            for name in list(self.inbox):
                self.answer(name, "ready")
            self.look()


def world(*names: str, **changes: Any) -> World:
    return World(wanted(**changes), nodes(*names), Rollout(aim(A)))


def test_nodes_that_serve_nothing_are_all_told_at_once() -> None:
    here = world("a", "b", "c")
    here.look()
    assert set(here.inbox) == {"a", "b", "c"}
    assert here.inbox["a"] == NodeOrder(1, "prepare", IMAGE, A, 1)
    here.look()
    assert here.rollout.epoch == 1, "nobody is told twice"


def test_a_registry_is_not_asked_by_a_thousand_nodes_at_once() -> None:
    here = world(*(f"n{number:04}" for number in range(1000)))
    here.look()
    assert len(here.inbox) == AT_ONCE
    here.answer("n0000", "ready")
    here.look()
    assert len(here.inbox) == AT_ONCE


def test_the_digest_is_the_last_known_good_once_every_node_has_it() -> None:
    here = world("a", "b")
    here.look()
    here.answer("a", "ready")
    here.look()
    assert here.rollout.aim.good == Target()
    here.answer("b", "incompatible")
    here.look()
    assert here.rollout.aim.good.digest == A


def test_a_new_digest_comes_in_waves() -> None:
    here = world("a", "b", "c", "d", maxUnavailable="50%")
    here.serve(A)
    here.rollout = replace(here.rollout, aim=aim(B, good=A))
    here.look()
    assert set(here.inbox) == {"a", "b"}
    here.answer("b", "ready")
    here.look()
    assert set(here.inbox) == {"a", "c"}
    here.answer("a", "retrying", "RegistryAway")
    here.look()
    assert set(here.inbox) == {"a", "c"}, "one that cannot get on holds its place"
    for name in ("a", "c", "d"):
        here.answer(name, "ready")
        here.look()
    assert here.rollout.aim.good.digest == B


def test_a_node_that_is_away_neither_is_told_nor_holds_up_others() -> None:
    here = world("a", "b")
    here.serve(A)
    here.rollout = replace(here.rollout, aim=aim(B, good=A))
    here.look()
    assert set(here.inbox) == {"a"}
    here.nodes = nodes("a", "b", away=("a",))
    here.look()
    assert set(here.inbox) == {"a", "b"}
    here.answer("b", "ready")
    here.look()
    assert here.rollout.aim.good.digest == B, "a node that is away does not keep it from having been good"
    here.nodes = nodes("a", "b")
    here.answer("a", "ready")
    here.look()
    assert not here.inbox


def test_an_image_that_is_at_fault_is_given_up_everywhere_for_the_last_good_one() -> None:
    here = world("a", "b", "c", maxUnavailable=2)
    here.serve(A)
    here.rollout = replace(here.rollout, aim=aim(B, good=A))
    here.look()
    here.answer("a", "ready")
    here.answer("b", "failed", "SignatureRefused")
    here.look()
    found = here.rollout.aim
    assert (found.goal.digest, found.rejected) == (A, B)
    assert found.why == "b: failed on b"
    assert here.inbox["a"].digest == A
    for name in list(here.inbox):
        here.answer(name, "ready")
    here.look()
    assert here.serves == {"a": A, "b": A, "c": A}
    assert not here.inbox


def test_what_was_given_up_is_tried_again_when_the_rules_change_and_not_before() -> None:
    here = world("a")
    here.serve(A)
    here.rollout = replace(here.rollout, aim=aim(B, good=A))
    here.look()
    here.answer("a", "failed", "NotSigned")
    here.look()
    here.answer("a", "ready")
    here.look()
    assert here.rollout.aim.goal.digest == A
    here.want = wanted(rules="signer added")
    here.look()
    assert here.rollout.aim.goal.digest == B
    assert here.inbox["a"].digest == B


def test_without_automatic_rollback_a_bad_digest_stops_where_it_is() -> None:
    here = world("a", "b", automaticRollback=False)
    here.serve(A)
    here.rollout = replace(here.rollout, aim=aim(B, good=A))
    here.look()
    here.answer("a", "failed")
    here.look()
    assert here.rollout.aim.goal.digest == B
    assert not here.inbox
    assert here.serves == {"a": A, "b": A}


def test_a_first_digest_that_fails_has_nothing_to_go_back_to() -> None:
    here = world("a")
    here.look()
    here.answer("a", "failed")
    here.look()
    assert here.rollout.aim.goal.digest == A
    assert here.rollout.members["a"].outcome == "failed"


def test_other_rules_have_every_node_check_anew() -> None:
    here = world("a", "b")
    here.serve(A)
    here.want = wanted(rules="another")
    here.look()
    assert set(here.inbox) == {"a", "b"}


def test_a_node_with_other_hardware_checks_anew_alone() -> None:
    here = world("a", "b")
    here.serve(A)
    here.nodes = nodes("a", "b", rechecked=("b",))
    here.look()
    assert set(here.inbox) == {"b"}


def test_a_node_that_is_no_longer_selected_lets_go_and_may_come_back() -> None:
    here = world("a", "b")
    here.serve(A)
    here.nodes = Nodes({"a": True}, frozenset({"a", "b"}))
    here.look()
    assert {order.task for order in here.inbox.values()} == {"remove"}
    here.look()
    here.answer("b", "busy", "InUse")
    here.look()
    assert "b" in here.rollout.members
    here.answer("b", "removed")
    here.look()
    assert "b" not in here.rollout.members
    here.nodes = nodes("a", "b")
    here.look()
    assert here.inbox["b"].task == "prepare"


def test_a_deleted_node_is_forgotten() -> None:
    here = world("a", "b")
    here.look()
    here.nodes = nodes("a")
    here.look()
    assert set(here.rollout.members) == {"a"}


def test_an_answer_to_an_older_order_says_nothing() -> None:
    here = world("a")
    here.look()
    old = here.inbox["a"]
    here.want = wanted(rules="another")
    here.look()
    before = here.rollout
    here.rollout = reported(here.rollout, Report("a", old.epoch, "ready", A))
    assert here.rollout is before
    assert reported(before, Report("stranger", 1, "ready")) is before


def test_deletion_waits_for_live_nodes_only() -> None:
    here = world("a", "b", "c")
    here.serve(A)
    assert not here.leave()
    assert {order.task for order in here.inbox.values()} == {"remove"}
    here.answer("a", "removed")
    here.answer("b", "busy")
    here.nodes = nodes("a", "b")
    assert not here.leave()
    assert set(here.rollout.members) == {"b"}
    here.answer("b", "removed")
    assert here.leave()


def test_a_forced_deletion_tells_the_nodes_and_waits_for_nobody() -> None:
    here = world("a")
    here.serve(A)
    assert here.leave(forced=True)
    assert here.inbox["a"].task == "remove"


def test_a_cache_that_no_node_has_goes_at_once() -> None:
    assert world().leave()


def test_the_registry_is_asked_once_for_a_reference_and_again_where_the_tag_is_followed() -> None:
    fresh, known = Aim(), replace(aim(A), asked_at=1000.0)
    assert next_ask(spec(), fresh) == 0.0
    assert next_ask(spec(), known) is None
    assert next_ask(spec(type="OnTagChange"), known) == 1600.0
    assert next_ask(spec(ociImage={"image": f"{IMAGE}:v1", "pullPolicy": "Always"}), known) == 1600.0
    for nobody in ({"image": f"{IMAGE}:v1", "pullPolicy": "Never"}, {"image": f"{IMAGE}@{A}"}):
        assert next_ask(spec(ociImage=nobody, type="OnTagChange"), fresh) is None
        assert next_ask(spec(ociImage=nobody, type="OnTagChange"), known) is None


def test_a_tag_that_moved_is_followed_where_that_is_wanted() -> None:
    moved = Target(IMAGE, B)
    assert answered(aim(A, good=A), f"{IMAGE}:v1", moved, 5.0, follow=True).goal == moved
    stays = answered(aim(A, good=A), f"{IMAGE}:v1", moved, 5.0, follow=False)
    assert (stays.goal.digest, stays.latest) == (A, moved)
    assert answered(aim(A, good=A), f"{IMAGE}:v2", moved, 5.0, follow=False).goal == moved


def test_what_was_given_up_is_not_followed_again() -> None:
    rejected = replace(aim(A, good=A), rejected=B, why="b: bad", under="1/r")
    stays = answered(rejected, f"{IMAGE}:v1", Target(IMAGE, B), 5.0, follow=True)
    assert (stays.goal.digest, stays.rejected) == (A, B)
    assert answered(rejected, f"{IMAGE}:v1", Target(IMAGE, C), 5.0, follow=True).goal.digest == C


def test_shares_of_nodes() -> None:
    assert [unavailable(most, 10) for most in (1, 3, "10%", "25%", "100%", "1%")] == [1, 3, 1, 2, 10, 1]


NAMES = ("a", "b", "c", "d", "e")
OUTCOMES: tuple[Outcome, ...] = ("ready", "ready", "ready", "incompatible", "failed", "retrying")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_happens_waves_are_kept_and_all_is_settled_in_the_end(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 3))
    here = World(wanted(maxUnavailable=most), nodes(*NAMES), Rollout(aim(A)))
    here.serve(A)
    bad = data.draw(st.sets(st.sampled_from((B, C)), max_size=1))
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(("tag", "answer", "answer", "node", "rules"))):
            case "tag":
                digest = data.draw(st.sampled_from((A, B, C)))
                found = answered(here.rollout.aim, f"{IMAGE}:v1", Target(IMAGE, digest), 1.0, follow=True)
                here.rollout = replace(here.rollout, aim=found)
            case "answer" if here.inbox:
                name = data.draw(st.sampled_from(sorted(here.inbox)))
                order = here.inbox[name]
                if order.task == "remove":
                    here.answer(name, data.draw(st.sampled_from(("removed", "busy"))))
                else:
                    outcome = "failed" if order.digest in bad else data.draw(st.sampled_from(OUTCOMES))
                    here.answer(name, "ready" if outcome == "failed" and order.digest not in bad else outcome)
            case "node":
                alive = data.draw(st.sets(st.sampled_from(NAMES), min_size=1))
                usable = {name: data.draw(st.booleans()) for name in alive}
                here.nodes = Nodes(usable, frozenset(alive))
                here.inbox = {name: order for name, order in here.inbox.items() if name in alive}
                here.serves = {name: digest for name, digest in here.serves.items() if name in alive}
            case "rules":
                here.want = wanted(rules=data.draw(st.sampled_from("xyz")), maxUnavailable=most)
        changing = _changing(here)
        here.look()
        fresh = _changing(here) - changing
        assert not fresh or len(_changing(here)) <= most
    here.nodes = nodes(*NAMES)
    for _ in range(60):
        here.look()
        for name in sorted(here.inbox):
            order = here.inbox[name]
            here.answer(name, "removed" if order.task == "remove" else "failed" if order.digest in bad else "ready")
    here.look()
    goal = here.rollout.aim.goal.digest
    assert not here.inbox
    if goal not in bad:
        for name in NAMES:
            assert here.serves.get(name) == goal or here.rollout.members[name].outcome == "incompatible"
        if any(digest == goal for digest in here.serves.values()):
            assert here.rollout.aim.good.digest == goal


def _changing(here: World) -> set[str]:
    """Nodes that are ready, serve one digest, and were told to have another."""
    return {
        name
        for name, member in here.rollout.members.items()
        if here.nodes.selected.get(name)
        and member.digest
        and member.outcome in ("", "retrying", "failed")
        and member.serves not in ("", member.digest)
    }
