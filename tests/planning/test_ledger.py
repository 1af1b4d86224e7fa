"""The ledger's transitions: promises end only when their Job was seen, and no turn is lost to a crossing signal."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from planning.ledger import after_carrying_out, after_deciding, after_requeue, later, still_due
from planning.model import AVOIDED_NODES, Assignment, Avoided, Decision, Ledger, Resources, Turn, Verdict, Withdrawal


def assignment(uid: str, turn: Turn | None = None) -> Assignment:
    return Assignment(uid, "ns", uid, 1, 1, turn or Turn(), "node", Resources(gpus=1), "leastLoaded", f"{uid}-0")


def test_a_promise_stays_until_its_job_was_seen() -> None:
    asked = Ledger()
    promised = after_deciding(asked, Decision(assignments=[assignment("a")]))
    assert "a" in promised.in_flight
    assert "a" in after_deciding(promised, Decision()).in_flight
    assert "a" not in after_deciding(promised, Decision(seen=["a"])).in_flight


def test_a_turn_that_comes_back_during_a_decision_is_not_forgotten_by_it() -> None:
    asked = Ledger(in_flight={"a": assignment("a")})
    crossing = after_requeue(asked, "a", Turn(1, 1))
    assert after_deciding(crossing, Decision(seen=["a"])).turns == {"a": Turn(1, 1)}


def test_a_turn_that_is_over_is_not_given_again_by_a_planner_that_was_asked_before() -> None:
    crossing = after_requeue(Ledger(), "a", Turn(1, 1))
    decision = Decision(assignments=[assignment("a", Turn(0, 0)), assignment("b")], queued=2)
    assert still_due(crossing, decision) == Decision(assignments=[assignment("b")], queued=2)
    again = Decision(assignments=[assignment("a", Turn(1, 1))])
    assert still_due(crossing, again) == again


def test_a_turn_stays_until_its_workload_is_gone() -> None:
    """A Job that somebody deletes is followed by the same turn's Job, never by one of an older turn."""
    asked = Ledger(turns={"a": Turn(1, 1)}, in_flight={"a": assignment("a", Turn(1, 1))})
    seen = after_deciding(asked, Decision(seen=["a"]))
    assert seen == Ledger(turns={"a": Turn(1, 1)})
    assert after_deciding(seen, Decision(forget=["a"])) == Ledger()


BACK = Withdrawal("a", "ns", "a", "a-0", "j", Turn(1, 0), "no place", generation=1)


def test_a_withdrawal_never_lowers_what_a_crossing_signal_brought() -> None:
    crossing = after_requeue(after_deciding(Ledger(), Decision(withdrawals=[BACK])), "a", Turn(5, 2))
    assert after_carrying_out(crossing, [BACK], [], [], {}, {}, {}, {}).turns["a"] == Turn(5, 2)


def test_a_withdrawal_brings_its_turn_once_it_was_carried_out_and_none_if_it_came_too_late() -> None:
    decided = after_deciding(Ledger(), Decision(withdrawals=[BACK]))
    assert decided == Ledger(), "nobody knows yet whether the Job goes on"
    assert after_carrying_out(decided, [BACK], ["a"], [], {}, {}, {}, {}) == Ledger()
    assert after_carrying_out(decided, [BACK], [], [], {}, {}, {}, {}).turns == {"a": Turn(1, 0)}


def test_what_an_older_build_withdrew_took_its_turn_with_the_decision() -> None:
    """Whether a signal wakes the ledger depends on the turn it knows: another moment would be another history."""
    old = replace(BACK, generation=0)
    decided = after_deciding(Ledger(), Decision(withdrawals=[old]))
    assert decided.turns == {"a": Turn(1, 0)}
    assert after_carrying_out(decided, [old], ["a"], [], {}, {}, {}, {}) == decided


def test_a_refusal_of_a_turn_that_is_over_holds_nobody() -> None:
    """Its workflow hears of it first, and may have come back for the next turn before the ledger knows."""
    promised = Ledger(in_flight={"a": assignment("a", Turn(0, 0))})
    refused = Verdict("a", "ns", "a", Turn(0, 0), "JobRefused", "no", 1)
    assert after_carrying_out(promised, [], [], [refused], {}, {}, {}, {}).held == {"a": Turn(0, 0)}
    back = after_requeue(promised, "a", Turn(1, 0))
    assert after_carrying_out(back, [], [], [refused], {}, {}, {}, {}).held == {}


def withdrawn_on(name: str, uid: str = "a", generation: int = 1) -> Withdrawal:
    return replace(BACK, uid=uid, generation=generation, avoid=name)


def withdraw(ledger: Ledger, *withdrawals: Withdrawal, stale: tuple[str, ...] = ()) -> Ledger:
    decided = after_deciding(ledger, Decision(withdrawals=list(withdrawals)))
    return after_carrying_out(decided, withdrawals, stale, [], {}, {}, {}, {})


def test_where_a_workload_was_withdrawn_is_remembered_until_it_is_reconsidered_or_gone() -> None:
    ledger = withdraw(withdraw(Ledger(), withdrawn_on("n")), withdrawn_on("o"))
    assert ledger.avoided == {"a": Avoided(1, ("n", "o"))}
    assert withdraw(ledger, withdrawn_on("n")).avoided["a"].nodes == ("o", "n"), "each once, the latest last"
    assert withdraw(ledger, withdrawn_on("")).avoided == ledger.avoided, "nobody tried the pod there"
    assert withdraw(ledger, withdrawn_on("p"), stale=("a",)).avoided == ledger.avoided, "the Job goes on"
    assert withdraw(ledger, withdrawn_on("p", generation=2)).avoided == {"a": Avoided(2, ("p",))}
    assert after_deciding(ledger, Decision(reconsidered=["a"])).avoided == {}
    assert after_deciding(ledger, Decision(forget=["a"])) == Ledger()
    assert after_requeue(ledger, "a", Turn(3, 0)).avoided == ledger.avoided


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), min_size=40, max_size=80))
def test_a_workloads_memory_of_nodes_is_bounded_and_the_latest_stays(story: list[tuple[int, int]]) -> None:
    ledger = Ledger()
    for uid, where in story:
        ledger = withdraw(ledger, withdrawn_on(f"n{where}", f"w{uid}"))
        assert ledger.avoided[f"w{uid}"].nodes[-1] == f"n{where}"
    assert all(len(set(a.nodes)) == len(a.nodes) <= AVOIDED_NODES for a in ledger.avoided.values())


def test_the_memory_of_nodes_has_room_for_the_latest_workloads() -> None:
    ledger = Ledger()
    for i in range(300):
        ledger = withdraw(ledger, withdrawn_on("n", f"w{i}"))
    assert list(ledger.avoided) == [f"w{i}" for i in range(44, 300)]


def test_whose_jobs_could_not_be_stopped_is_remembered_of_the_latest_until_they_may_be_tried_again() -> None:
    ledger = Ledger()
    for i in range(300):
        ledger = after_carrying_out(ledger, [], [], [], {}, {}, {}, {f"w{i}": float(i)})
    assert list(ledger.spared.items()) == [(f"w{i}", float(i)) for i in range(44, 300)]
    assert after_carrying_out(ledger, [], [], [], {}, {}, {}, {"w299": 900.0}).spared["w299"] == 900.0
    assert "w298" not in after_deciding(ledger, Decision(stoppable=["w298"])).spared
    assert "w297" not in after_deciding(ledger, Decision(forget=["w297"])).spared
    assert after_deciding(ledger, Decision()).spared == ledger.spared


def test_what_older_builds_recorded_is_still_read() -> None:
    ledger = TypeAdapter(Ledger).validate_json('{"turns": {"a": {"attempt": 1, "retries": 0}}}')
    assert ledger == Ledger(turns={"a": Turn(1, 0)})
    assert TypeAdapter(Decision).validate_json('{"forget": ["a"]}').reconsidered == []
    names = {"uid": "a", "namespace": "ns", "name": "a", "job_name": "a-0", "job_uid": "j", "message": "no place"}
    old = TypeAdapter(Withdrawal).validate_python(names | {"next_turn": {"attempt": 1, "retries": 0}})
    assert old == replace(BACK, generation=0)
    known = Ledger(avoided={"a": Avoided(1, ("n",))})
    assert TypeAdapter(Ledger).validate_json(TypeAdapter(Ledger).dump_json(known)) == known


def test_a_refused_workload_is_held_until_it_comes_back() -> None:
    ledger = Ledger(in_flight={"a": assignment("a")}, turns={"a": Turn(2, 1)})
    refused = Verdict("a", "ns", "a", Turn(2, 1), "JobRefused", "no")
    held = after_carrying_out(ledger, [], [], [refused], {}, {}, {}, {})
    assert held == Ledger(held={"a": Turn(2, 1)}, turns={"a": Turn(2, 1)})
    assert after_requeue(held, "a", Turn(2, 1)) == held, "a doubled signal about the turn before releases nothing"
    assert after_requeue(held, "a", Turn(3, 2)) == Ledger(turns={"a": Turn(3, 2)})


turns = st.builds(Turn, st.integers(0, 50), st.integers(0, 10))


@given(turns, turns)
def test_later_is_commutative_and_never_goes_back(a: Turn, b: Turn) -> None:
    assert later(a, b) == later(b, a)
    assert later(a, b).attempt >= a.attempt
    assert later(a, b).retries >= b.retries
    assert later(None, a) == a


def test_a_turn_for_a_later_job_survives_the_sight_of_the_job_before() -> None:
    asked = Ledger(in_flight={"a": assignment("a")}, turns={"a": Turn(1, 1)})
    after = after_deciding(asked, Decision(seen=["a"]))
    assert after.in_flight == {} and after.turns == {"a": Turn(1, 1)}
