"""How a cache stands on one node, from whatever its status object holds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planning.caches.warmth import CacheUse, cache_use

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["spec", "status", "metadata", "conditions", "type", "finalizers", "kernelCacheRef", "uid"]
            ),
            each,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def raw(ready: str = "True", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "ns"},
        "spec": {"nodeName": "n", "kernelCacheRef": {"name": "llama", "uid": "u"}},
        "status": {"conditions": [{"type": "Ready", "status": ready}], **status},
    }


def test_a_node_that_is_ready_or_has_pods_counts() -> None:
    assert cache_use(raw(podsUsing=2)) == CacheUse("u", "ns", "llama", "n", ready=True, pods=2)
    assert cache_use(raw("False", podsUsing=1)) == CacheUse("u", "ns", "llama", "n", ready=False, pods=1)
    assert cache_use(raw("Unknown")) is None
    for odd in (-1, "3", True, None, 2.5):
        found = cache_use(raw(podsUsing=odd))
        assert found is not None and found.pods == 0


@given(JSON, JSON)
def test_nothing_raises(whole: Any, part: Any) -> None:
    cache_use(whole)
    cache_use({"metadata": part, "spec": part, "status": part})
    cache_use({**raw(), "spec": {"kernelCacheRef": part, "nodeName": part}})
    cache_use({**raw(), "status": {"conditions": part, "podsUsing": part}})
