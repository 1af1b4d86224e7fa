"""Caches take turns at having orders under way: never too many at once, nobody left out, nobody broken up."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from planning.caches.turns import HELD, Turns


def test_whoever_comes_when_all_places_are_taken_waits_for_all_that_it_asked_for() -> None:
    turns = Turns(10)
    assert turns.grant("a", 6, 0.0) == 6
    assert turns.grant("b", 6, 0.0) == 0
    assert turns.turns(0.0) == []
    assert turns.grant("a", 5, 1.0) == 5
    assert turns.turns(1.0) == [], "five places are not enough for it"
    assert turns.grant("a", 4, 2.0) == 4
    assert turns.turns(2.0) == ["b"]
    assert turns.grant("b", 6, 2.0) == 6


def test_the_row_is_kept_and_nobody_small_slips_past() -> None:
    turns = Turns(10)
    assert turns.grant("a", 8, 0.0) == 8
    assert turns.grant("b", 6, 0.0) == 0
    assert turns.grant("c", 1, 0.0) == 0, "b was first"
    assert turns.grant("b", 6, 1.0) == 0
    assert turns.grant("a", 0, 2.0) == 0
    assert turns.turns(2.0) == ["b", "c"]


def test_places_are_held_for_whoever_is_called_while_others_wait() -> None:
    turns = Turns(10)
    turns.grant("a", 10, 0.0)
    turns.grant("b", 10, 0.0)
    turns.grant("c", 10, 0.0)
    turns.grant("a", 0, 1.0)
    assert turns.turns(1.0) == ["b"]
    assert turns.grant("c", 10, 1.0) == 0
    assert turns.grant("b", 10, 1.0) == 10


def test_one_that_wants_more_keeps_what_it_has_meanwhile() -> None:
    turns = Turns(10)
    assert turns.grant("a", 2, 0.0) == 2
    assert turns.grant("b", 7, 0.0) == 7
    assert turns.grant("a", 9, 1.0) == 2
    assert turns.grant("b", 0, 1.0) == 0
    assert turns.turns(1.0) == ["a"]
    assert turns.grant("a", 9, 1.0) == 9


def test_nodes_that_take_their_time_keep_nobody_waiting_for_long() -> None:
    turns = Turns(10)
    assert turns.grant("slow", 10, 0.0) == 10
    assert turns.grant("next", 10, 1.0) == 0
    assert turns.turns(HELD - 0.1) == []
    assert turns.turns(HELD) == ["next"]


def test_more_than_there_are_places_is_granted_as_far_as_they_go() -> None:
    assert Turns(10).grant("a", 1000, 0.0) == 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 30)), min_size=1, max_size=40), st.randoms())
def test_never_too_many_at_once_and_all_are_served(asked: list[tuple[str, int]], random: Random) -> None:
    """Each cache has so many nodes and wants four of them under way; the nodes answer in any order."""
    turns, now = Turns(10), 0.0
    left = dict(asked)
    open_orders = dict.fromkeys(left, 0)
    due = list(left)
    for _ in range(2000):
        if not due:
            break
        now += 0.01
        uid = due.pop(0)
        wanted = min(4, open_orders[uid] + left[uid])
        granted = turns.grant(uid, wanted, now)
        assert granted >= min(open_orders[uid], wanted), "what is under way is never taken back"
        more = max(0, granted - open_orders[uid])
        left[uid] -= more
        open_orders[uid] += more
        assert sum(open_orders.values()) <= 10
        busy = [each for each, count in open_orders.items() if count]
        if busy:
            answers = random.choice(busy)
            open_orders[answers] -= 1
            if answers not in due:
                due.append(answers)
        due += [each for each in turns.turns(now) if each not in due]
    assert not any(left.values()) and not due
