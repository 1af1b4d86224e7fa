"""A rollout outlives what it does not expect: lost state, silent nodes, other rules for another image."""

from __future__ import annotations

from dataclasses import replace

from planning.caches.orders import SUPERSEDED, NodeOrder, Report
from planning.caches.rollout import (
    AT_ONCE,
    SILENT,
    Aim,
    Nodes,
    Rollout,
    Target,
    Wanted,
    applied,
    farewell,
    images,
    reported,
    step,
)
from tests.planning.caches.test_rollout import A, B, World, aim, nodes, spec, wanted, world

OLD, NEW = Target("registry.example/old/cache", A), Target("registry.example/new/cache", B)


def test_after_a_move_to_another_repository_a_bad_digest_is_given_up_once() -> None:
    here = World(Wanted(1, spec(), {OLD.image: "old rules", NEW.image: "new rules"}), nodes("a"), Rollout())
    here.rollout = Rollout(Aim(f"{OLD.image}:v1", OLD, 0.0, OLD))
    here.look()
    here.answer("a", "ready")
    here.look()
    assert here.rollout.aim.good == OLD
    here.rollout = replace(here.rollout, aim=Aim(f"{NEW.image}:v1", NEW, 0.0, NEW, OLD))
    here.look()
    here.answer("a", "failed")
    here.look()
    assert (here.rollout.aim.goal, here.rollout.aim.rejected) == (OLD, B)
    here.answer("a", "ready")
    for _ in range(3):
        here.look()
        assert (here.rollout.aim.goal, here.rollout.aim.rejected, here.inbox) == (OLD, B, {})
    assert images(here.rollout.aim) == {OLD.image, NEW.image}
    here.want = replace(here.want, rules={**here.want.rules, NEW.image: "signer added"})
    here.look()
    assert here.rollout.aim.goal == NEW


def late(name: str, order: NodeOrder, newest: int) -> Report:
    return Report(name, order.epoch, "retrying", A, SUPERSEDED, "it has begun a newer one", newest=newest)


def test_what_was_lost_and_was_ahead_of_the_clock_is_heard_of_by_the_nodes() -> None:
    here = world("a", "b")
    here.look()
    first, begun = dict(here.inbox), 5_000_000
    here.rollout = reported(here.rollout, late("a", first["a"], begun))
    here.look()
    again = here.inbox["a"]
    assert again.epoch > begun and (again.task, again.digest) == ("prepare", A)
    assert here.inbox["b"] == first["b"], "others are not told for that"
    here.rollout = reported(here.rollout, late("b", first["b"], begun - 1))
    here.look()
    assert here.inbox["b"].epoch > again.epoch
    for name in ("a", "b"):
        here.answer(name, "ready")
    here.look()
    assert here.rollout.aim.good.digest == A and here.inbox == {}


def test_one_that_is_to_let_go_is_told_again_too() -> None:
    here = world("a")
    here.nodes = replace(here.nodes, holding=frozenset({"a"}))
    assert not here.leave()
    here.rollout = reported(here.rollout, late("a", here.inbox["a"], 7_000_000))
    assert not here.leave()
    assert here.inbox["a"].task == "remove" and here.inbox["a"].epoch > 7_000_000
    here.answer("a", "removed")
    assert here.leave()


def test_a_node_that_claims_what_no_clock_says_spoils_no_epoch() -> None:
    here = world("a")
    here.look()
    before = here.rollout
    here.rollout = reported(before, late("a", here.inbox["a"], 2**62))
    assert (here.rollout.epoch, here.rollout.members["a"].key) == (before.epoch, before.members["a"].key)
    assert here.rollout.members["a"].outcome == "retrying"


def test_nodes_that_never_answer_do_not_keep_all_others_from_being_told() -> None:
    here = world(*(f"n{number:03}" for number in range(AT_ONCE + 3)))
    here.clock = 1_700_000_000_000
    here.look()
    assert len(here.inbox) == AT_ONCE
    here.clock += SILENT // 2
    here.look()
    assert len(here.inbox) == AT_ONCE
    here.clock += SILENT
    here.look()
    assert len(here.inbox) == AT_ONCE + 3


def test_after_all_was_lost_deletion_waits_for_nodes_that_have_it() -> None:
    here = world("a", "b")
    here.rollout = Rollout()
    here.nodes = Nodes({}, frozenset("ab"), holding=frozenset(("a", "gone")))
    assert not here.leave()
    assert set(here.inbox) == {"a"} and here.inbox["a"].task == "remove"
    here.answer("a", "busy")
    assert not here.leave()
    here.answer("a", "removed")
    assert here.leave(), "also while the node still shows it"


def test_after_all_was_lost_every_node_that_has_it_is_told_anew() -> None:
    here = world("a", "b", "c")
    here.nodes = Nodes({"a": True, "b": False}, frozenset("abc"), holding=frozenset("abc"))
    here.look()
    assert {name: order.task for name, order in here.inbox.items()} == {"a": "prepare", "c": "remove"}
    assert set(here.rollout.members) == {"a", "b", "c"}, "one that is away is waited for later"
    here.nodes = nodes("a", "b", "c")
    here.look()
    assert here.inbox["b"].digest == A


def test_a_node_that_comes_back_under_its_name_before_anybody_looked_is_told_anew() -> None:
    here = world("a")
    here.look()
    epoch = here.inbox.pop("a").epoch
    here.rollout = reported(here.rollout, Report("a", epoch, "removed", reason="NodeGone"))
    here.look()
    assert here.inbox["a"].epoch > epoch


def test_what_a_step_adopts_is_carried_also_where_it_orders_nothing() -> None:
    seen = Nodes({"a": False}, frozenset("a"), holding=frozenset("a"))
    taken = step(Rollout(aim(A)), wanted(), seen, 1)
    assert taken.orders == () and set(applied(Rollout(aim(A)), taken).members) == {"a"}
    known = replace(Rollout(aim(A)), epoch=5)
    assert farewell(known, 1, seen, 1, forced=False).over, "of a life that is remembered nothing is adopted"
