"""Where caches are Ready is known from their uses on nodes, whatever comes, changes or goes in which order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from planning.caches.warmth import CacheUse, WarmNodes

USE = CacheUse("uid", "ns", "k", "a", True, 0)


def test_of_caches_that_are_ready_the_nodes_are_known() -> None:
    warm = WarmNodes()
    for each in (USE, replace(USE, node="b"), replace(USE, namespace=""), replace(USE, node="c", ready=False, pods=1)):
        warm.change(None, each)
    assert warm.now() == {("ns", "k"): {"a", "b"}, ("", "k"): {"a"}}


def test_what_was_given_out_does_not_change_and_what_did_not_change_is_the_same_object() -> None:
    warm = WarmNodes()
    other = replace(USE, cache="other")
    warm.change(None, USE)
    warm.change(None, other)
    before = warm.now()
    warm.change(USE, replace(USE, pods=3))
    assert warm.now() is before, "that a pod has it says nothing new of where it is Ready"
    warm.change(other, replace(other, node="b"))
    after = warm.now()
    assert before["ns", "other"] == {"a"} and after["ns", "other"] == {"b"}
    assert after["ns", "k"] is before["ns", "k"]


def test_a_cache_that_was_made_anew_is_ready_until_both_of_its_statuses_are_gone() -> None:
    warm = WarmNodes()
    anew = replace(USE, cache_uid="anew")
    warm.change(None, USE)
    warm.change(None, anew)
    warm.change(USE, None)
    assert warm.now() == {("ns", "k"): {"a"}}
    warm.change(anew, None)
    assert warm.now() == {}


uses = st.builds(
    CacheUse,
    st.just("uid"),
    st.sampled_from(["", "x", "y"]),
    st.sampled_from(["", "k", "l"]),
    st.sampled_from(["", "a", "b", "c"]),
    st.booleans(),
    st.just(0),
)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | uses, st.booleans())))
def test_it_is_what_a_look_at_all_uses_finds(changes: list[tuple[int, CacheUse | None, bool]]) -> None:
    warm, there = WarmNodes(), dict[int, CacheUse]()
    for uid, new, looked in changes:
        warm.change(there.pop(uid, None), new)
        if new is not None:
            there[uid] = new
        if looked:
            warm.now()
    found: dict[tuple[str, str], set[str]] = {}
    for use in there.values():
        if use.ready and use.cache and use.node:
            found.setdefault((use.namespace, use.cache), set()).add(use.node)
    assert warm.now() == found
