"""How a server is parked: what its pod says first, what cannot be is told, and there is always a way."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from planning.seats.parking import ENGINES, WAYS, Asked, Way, choose, host_bytes

asked = st.builds(Asked, st.none() | st.sampled_from(WAYS), st.none() | st.sampled_from(ENGINES), st.booleans())


@given(asked, st.lists(st.text(min_size=1), max_size=2), st.dictionaries(st.sampled_from(WAYS), st.text()))
def test_each_way_is_possible_or_told_why_not_and_there_is_one(
    asked: Asked, missing: list[str], failed: Mapping[Way, str]
) -> None:
    choice = choose(asked, missing, failed)
    assert choice.ways and set(choice.ways) | choice.why_not.keys() == set(WAYS)
    assert not set(choice.ways) & choice.why_not.keys() and all(choice.why_not.values())
    assert "cold" in choice.ways
    if asked.way in choice.ways:
        assert choice.ways[0] == asked.way
    if missing:
        assert not any("cuda-checkpoint" in way for way in choice.ways)
    if asked.engine is None or not asked.port:
        assert not any("engine-sleep" in way for way in choice.ways)


def test_whoever_says_nothing_is_parked_by_the_driver_and_without_one_by_its_engine_and_at_last_cold() -> None:
    vllm = Asked(engine="vllm", port=True)
    assert choose(vllm).ways[0] == "cuda-checkpoint"
    assert choose(vllm, ["Driver 550 is too old."]).ways == ("engine-sleep", "cold")
    assert choose(vllm, ["Driver 550 is too old."], {"engine-sleep": "it frees nothing"}).ways == ("cold",)
    assert choose(Asked()).ways == ("cuda-checkpoint", "cold")
    assert "kyb.ai/engine" in choose(Asked(way="engine-sleep")).why_not["engine-sleep"]


def test_what_parking_takes_of_the_host() -> None:
    assert [host_bytes(way, 100, None) for way in WAYS] == [100, 100, 100, 0]
    assert [host_bytes(way, 100, 30) for way in WAYS] == [100, 30, 30, 0], "what its engine kept when it slept before"
