"""Health with hysteresis: nothing trips on one doubt, everything comes back, and silence is not illness at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planning.devices.cards import Card, Sight, Trouble
from planning.devices.health import (
    SILENT,
    SILENT_SECONDS,
    VANISHED,
    WELL_LOOKS,
    WELL_SECONDS,
    Health,
    changes,
    judged,
    unanswered,
    vendor_of,
)

CARD = Card("tt-1", "tenstorrent", "n150", "tenstorrent.com/n150", 0)
STALLED = Trouble("HeartbeatStalled", "Its heartbeat does not move.")
LOST = Trouble("Detached", "Its driver has let go of it.", sure=True)


def look(before: dict[str, Health], trouble: Trouble | None, now: float) -> dict[str, Health]:
    return judged(before, Sight("tenstorrent", (CARD,), {"tt-1": trouble} if trouble else {}), now)


def after(*troubles: Trouble | None, start: float = 0.0, step: float = 5.0) -> Health:
    health: dict[str, Health] = {}
    for number, trouble in enumerate(troubles):
        health = look(health, trouble, start + step * number)
    return health["tt-1"]


def test_a_doubt_counts_when_it_is_seen_twice_and_what_is_sure_at_once() -> None:
    assert after(None, STALLED).state == "Healthy"
    assert after(None, STALLED, None, STALLED).state == "Healthy", "twice in a row"
    tripped = after(None, STALLED, STALLED)
    assert (tripped.state, tripped.reason, tripped.since) == ("Unhealthy", "HeartbeatStalled", 10.0)
    assert after(None, LOST).state == "Unhealthy"


def test_a_new_card_with_trouble_is_not_given_out_before_it_is_well() -> None:
    assert after(STALLED).state == "Unhealthy"


def test_it_is_well_again_after_a_while_without_trouble() -> None:
    assert after(None, LOST, None, None).state == "Unhealthy"
    assert after(None, LOST, *[None] * WELL_LOOKS, step=WELL_SECONDS / 10).state == "Unhealthy", "too soon"
    assert after(None, LOST, *[None] * (WELL_LOOKS - 1), step=WELL_SECONDS * 2).state == "Unhealthy", "too few looks"
    healed = after(None, LOST, *[None] * (WELL_LOOKS + 1))
    assert (healed.state, healed.reason, healed.message) == ("Healthy", "", "")


def test_the_reason_follows_what_is_seen_while_it_stays_ill() -> None:
    found = after(None, LOST, STALLED)
    assert (found.reason, found.since) == ("HeartbeatStalled", 5.0)


def test_a_card_that_is_gone_has_vanished_unless_its_provider_may_have_missed_it() -> None:
    before = look({}, None, 0)
    gone = judged(before, Sight("tenstorrent"), 5)["tt-1"]
    assert (gone.state, gone.reason, gone.since) == ("Unhealthy", VANISHED, 5)
    assert judged({"tt-1": gone}, Sight("tenstorrent"), 9)["tt-1"].since == 5
    missed = judged(before, Sight("tenstorrent", problem="It lists nothing."), 5)["tt-1"]
    assert missed.state == "Unknown" and "It lists nothing." in missed.message


def test_silence_makes_a_card_unknown_and_only_a_long_one_unhealthy() -> None:
    health = look({}, None, 0)
    for now in (1.0, 10.0, SILENT_SECONDS):
        health = unanswered(health, "The watcher hangs.", now)
        assert (health["tt-1"].state, health["tt-1"].usable) == ("Unknown", True)
    health = unanswered(health, "The watcher hangs.", SILENT_SECONDS + 1)
    assert (health["tt-1"].state, health["tt-1"].reason) == ("Unhealthy", SILENT)
    assert look(unanswered(look({}, None, 0), "x", 1.0), None, 2.0)["tt-1"].state == "Healthy"


def test_silence_takes_no_reason_from_what_is_ill() -> None:
    ill = look(look({}, None, 0), LOST, 1)
    assert unanswered(ill, "The watcher hangs.", 100)["tt-1"].reason == "Detached"


def test_changes_are_told_once_with_what_it_had() -> None:
    well, ill = look({}, None, 0), look(look({}, None, 0), LOST, 5)
    cards = {"tt-1": CARD}
    assert changes({}, well, cards) == [] and changes(ill, ill, cards) == []
    assert changes(well, ill, cards) == [("tt-1", "n150 tt-1 is unhealthy (Detached): Its driver has let go of it.")]
    again = ill
    for now in range(10, 40, 5):
        again = look(again, None, now)
    assert changes(ill, again, cards) == [("tt-1", "n150 tt-1 is well again after 15 s of Detached")]


def test_what_a_clock_that_goes_back_makes_of_it() -> None:
    ill = look(look({}, None, 1000), LOST, 1005)
    for now in (1010.0, 10.0, 15.0):
        ill = look(ill, None, now)
    assert ill["tt-1"].state == "Unhealthy", "the wait began anew at 10"
    well = look(ill, None, 20)
    assert well["tt-1"].state == "Healthy"
    assert changes(ill, well, {}) == [("tt-1", "tt-1 is well again after 0 s of Detached")]
    silent = unanswered(unanswered(look({}, None, 1000), "x", 1000), "x", 10)
    assert silent["tt-1"].state == "Unknown"
    assert unanswered(silent, "x", 10 + SILENT_SECONDS)["tt-1"].state == "Unhealthy"


def test_a_card_that_comes_back_has_to_be_seen_well_for_a_while() -> None:
    gone = judged(look({}, None, 0), Sight("tenstorrent"), 5)
    back = look(gone, None, 6)
    assert (back["tt-1"].state, back["tt-1"].reason) == ("Unhealthy", VANISHED)
    assert look(look(back, None, 10), None, 16)["tt-1"].state == "Healthy"


def test_each_vendors_cards_are_judged_by_its_own_sights() -> None:
    gpu = Card("GPU-1", "nvidia", "H100", "nvidia.com/gpu", 0)
    health = {"tt-1": Health("Healthy"), "GPU-1": Health("Healthy")}
    assert list(vendor_of([CARD, gpu], health, "nvidia")) == ["GPU-1"]


steps = st.lists(
    st.tuples(st.sampled_from(["well", "doubt", "sure", "gone", "missing", "silent"]), st.floats(-5, 20)), max_size=30
)


@given(steps)
def test_whatever_happens_there_is_a_reason_and_a_way_back(story: list[tuple[str, float]]) -> None:
    health: dict[str, Health] = {}
    now = 1000.0
    for what, passed in story:
        now += passed  # clocks go back as well
        if what == "silent":
            health = unanswered(health, "x", now)
        elif what in ("gone", "missing"):
            health = judged(health, Sight("tenstorrent", problem="p" if what == "missing" else ""), now)
        else:
            health = look(health, {"well": None, "doubt": STALLED, "sure": LOST}[what], now)
        for each in health.values():
            assert (each.state == "Healthy") == (not each.reason)
    for _ in range(WELL_LOOKS + 2):
        now += WELL_SECONDS
        health = look(health, None, now)
    assert health["tt-1"].state == "Healthy"


@given(st.lists(st.booleans(), max_size=40))
def test_single_doubts_never_trip_it(doubts: list[bool]) -> None:
    story = [trouble for doubt in doubts for trouble in ([STALLED, None] if doubt else [None])]
    assert after(None, *story).state == "Healthy"


@given(steps)
def test_it_is_given_out_again_only_after_it_was_well_for_long_enough(story: list[tuple[str, float]]) -> None:
    """So it changes its mind at most once in WELL_SECONDS, whatever its provider says."""
    health: dict[str, Health] = {}
    now, bad, looks, trips, start = 0.0, 0.0, 0, 0, None
    for what, passed in story:
        now += abs(passed)
        before = health.get("tt-1")
        if what == "silent":
            health = unanswered(health, "x", now)
        elif what in ("gone", "missing"):
            health = judged(health, Sight("tenstorrent", problem="p" if what == "missing" else ""), now)
        else:
            health = look(health, {"well": None, "doubt": STALLED, "sure": LOST}[what], now)
        if not health:
            continue
        start = now if start is None else start
        bad, looks = (bad, looks + 1) if what == "well" else (now, 0)
        after = health["tt-1"]
        if before is not None and before.usable and not after.usable:
            trips += 1
        if before is not None and not before.usable and after.usable:
            assert looks >= WELL_LOOKS and now - bad >= WELL_SECONDS
        if what == "sure":
            assert not after.usable
    assert start is None or trips <= 1 + (now - start) / WELL_SECONDS
