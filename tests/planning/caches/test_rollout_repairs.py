"""A rollout outlives what it does not expect: lost state, silent nodes, other rules for another image."""

from __future__ import annotations

from dataclasses import replace

from planning.caches.orders import Report
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
