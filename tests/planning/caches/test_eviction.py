"""Which caches leave: never one that is in use, never more than needed, never anything in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planning.caches.eviction import Stored, to_remove

stored = st.lists(
    st.builds(Stored, st.text("abcdef", min_size=1, max_size=3), st.integers(0, 50), st.floats(0, 9)),
    unique_by=lambda each: each.digest,
    max_size=8,
)


def test_those_that_were_unused_longest_leave_first() -> None:
    caches = [Stored("a", 10, 3.0), Stored("b", 10, 1.0), Stored("c", 10, 2.0)]
    assert to_remove(caches, 15, 40, ()) == ("b",)
    assert to_remove(caches, 15, 30, ()) == ("b", "c")
    assert to_remove(caches, 15, 40, {"b"}) == ("c",)
    assert to_remove(caches, 10, 40, ()) == ()
    assert to_remove(caches, 41, 40, ()) is None, "nothing leaves for what cannot fit"


@given(stored, st.integers(0, 100), st.integers(0, 200), st.sets(st.text("abcdef", min_size=1, max_size=3)))
def test_just_enough_and_nothing_that_is_in_use(
    caches: list[Stored], needed: int, quota: int, in_use: set[str]
) -> None:
    chosen = to_remove(caches, needed, quota, in_use)
    held = sum(each.size for each in caches if each.digest in in_use)
    if chosen is None:
        assert held + needed > quota
        return
    left = [each for each in caches if each.digest not in chosen]
    assert not set(chosen) & in_use and sum(each.size for each in left) + needed <= quota
    used = {each.digest: each.used for each in caches}
    assert [used[each] for each in chosen] == sorted(used[each] for each in chosen)
    if chosen:
        spared = next(each for each in caches if each.digest == chosen[-1])
        assert sum(each.size for each in left) + spared.size + needed > quota, "the last one was needed"
