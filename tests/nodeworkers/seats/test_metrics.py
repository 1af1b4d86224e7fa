"""What Prometheus reads of seats: switches and their stages, bytes, and what the seat proxy counts, each once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.seats import metrics
from nodeworkers.seats.metrics import OUTCOMES, REFUSED
from nodeworkers.seats.proxy_words import HoldTimes, SeatMetrics
from nodeworkers.seats.world import Moved
from planning.seats.status import GroupPicture, SeatPicture, SwitchPicture
from tests.docs.pages import ROOT
from tests.scraping import Read, scraping

A, B = "kyb-G01-s1", "kyb-G01-s2"
GROUPS = {A: "G01", B: "G01"}
BOUNDS = (0.05, 1.0, 30.0)


@pytest.fixture
def scraped() -> Iterator[Read]:
    with scraping(metrics) as read:
        yield read


def counted(buckets: tuple[int, int, int, int] = (0, 0, 0, 0), **counts: int) -> SeatMetrics:
    whole = dict.fromkeys(OUTCOMES, 0) | counts
    return SeatMetrics(whole, HoldTimes(BOUNDS, buckets, 2.0 * sum(buckets)))


def requests(scraped: Read, outcome: str, group: str = "G01") -> float:
    return scraped().get(f'berth_seat_requests_total{{group="{group}",outcome="{outcome}"}}', 0.0)


def test_how_groups_are_is_a_set_of_states(scraped: Read) -> None:
    seats = [
        SeatPicture(A, "Active", requests=0), SeatPicture(B, "Parked", requests=3, parked_bytes=5),
        SeatPicture("kyb-G01-s3", "Absent"),
    ]  # fmt: skip
    shown = [GroupPicture("G01", "Active", A, seats=seats, oldest=4.5), GroupPicture("G23", "Quarantined")]
    metrics.observe(lambda: shown)
    found = scraped()
    phases = {key: value for key, value in found.items() if key.startswith("berth_seat_group_phase{") and value}
    assert phases == {
        'berth_seat_group_phase{group="G01",phase="Active"}': 1,
        'berth_seat_group_phase{group="G23",phase="Quarantined"}': 1,
    }
    assert found['berth_seats{group="G01",phase="Parked"}'] == found['berth_seats{group="G01",phase="Active"}'] == 1
    assert found['berth_seat_parked_bytes{group="G01"}'] == 5
    assert found['berth_seat_requests_waiting{group="G01"}'] == 3
    assert found['berth_seat_oldest_wait_seconds{group="G01"}'] == 4.5
    assert found['berth_seat_oldest_wait_seconds{group="G23"}'] == 0
    shown.pop()
    assert not any("G23" in key for key in scraped()), "a group that went has no series"


def test_switches_are_counted_by_outcome_and_timed_by_stage(scraped: Read) -> None:
    metrics.begin(["G01"])
    stages = {"drain": 0.1, "park": 1.0, "park: what an engine calls it": 0.9, "wake": 2.0}
    metrics.switched("G01", SwitchPicture(0.0, A, B, "", stages))
    metrics.switched("G01", SwitchPicture(0.0, B, B, "", {"drain": 30.0}, "Kept"))
    found = scraped()
    assert found['berth_seat_switches_total{group="G01",outcome="Switched"}'] == 1
    assert found['berth_seat_switches_total{group="G01",outcome="Kept"}'] == 1
    assert found['berth_seat_switches_total{group="G01",outcome="Failed"}'] == 0, "so that the first is an increase"
    assert found['berth_seat_switch_seconds_count{group="G01"}'] == 1
    assert found['berth_seat_switch_seconds_sum{group="G01"}'] == pytest.approx(3.1)
    assert found['berth_seat_stage_seconds_count{group="G01",stage="drain"}'] == 2
    assert not any("engine" in key for key in found), "stages are those of the code"
    assert found['berth_seat_quarantines_total{group="G01"}'] == 0
    metrics.quarantined("G01")
    assert scraped()['berth_seat_quarantines_total{group="G01"}'] == 1


def test_parks_and_wakes_tell_bytes_and_seconds_by_backend(scraped: Read) -> None:
    metrics.parked("G01", "simulated", Moved(40 << 30), 8.0)
    metrics.woken("G01", "simulated", Moved(40 << 30), 4.0)
    metrics.woken("G01", "cold", Moved(-1), -1.0)
    found = scraped()
    assert found['berth_seat_moved_bytes_total{backend="simulated",direction="out",group="G01"}'] == 40 << 30
    assert found['berth_seat_park_seconds_sum{backend="simulated",group="G01"}'] == 8.0
    assert found['berth_seat_wake_seconds_bucket{backend="simulated",group="G01",le="5.0"}'] == 1
    assert found['berth_seat_wake_seconds_bucket{backend="simulated",group="G01",le="3.0"}'] == 0
    assert found['berth_seat_wake_seconds_sum{backend="cold",group="G01"}'] == 0


def test_what_the_proxy_counted_before_is_not_counted_again(scraped: Read) -> None:
    seen = metrics.Requests()
    seen.heard({A: counted(forwarded=1000, refused_queue=7)}, GROUPS)
    assert requests(scraped, "forwarded") == 0 and seen.refused == {}
    seen.heard({A: counted(forwarded=1010, refused_queue=9), B: counted(forwarded=5)}, GROUPS)
    assert requests(scraped, "forwarded") == 15, "B's counters began after the first look"
    assert requests(scraped, "refused_queue") == 2 and seen.refused == {"G01": 2}


def test_a_proxy_or_a_route_that_began_anew_loses_and_doubles_nothing(scraped: Read) -> None:
    seen = metrics.Requests()
    seen.heard({A: counted()}, GROUPS)
    seen.heard({A: counted(forwarded=10)}, GROUPS)
    seen.heard(None, GROUPS)
    assert scraped()["berth_seat_proxy_up"] == 0
    seen.heard({A: counted(forwarded=3)}, GROUPS)
    assert scraped()["berth_seat_proxy_up"] == 1 and requests(scraped, "forwarded") == 13
    seen.heard({}, GROUPS)
    seen.heard({A: counted(forwarded=2)}, GROUPS)
    assert requests(scraped, "forwarded") == 15
    seen.heard({A: counted(forwarded=9), "kyb-gone-s1": counted(forwarded=4)}, {})
    assert requests(scraped, "forwarded") == 15, "of a group that is none any more"


def test_waits_are_what_histogram_quantile_takes(scraped: Read) -> None:
    seen = metrics.Requests()
    seen.heard({A: counted((1, 0, 0, 0))}, GROUPS)
    seen.heard({A: counted((1, 4, 2, 1))}, GROUPS)
    found = scraped()
    buckets = {
        bound: found[f'berth_seat_waits_total{{group="G01",le="{bound}"}}'] for bound in ("0.05", "1", "30", "+Inf")
    }
    assert buckets == {"0.05": 0, "1": 4, "30": 6, "+Inf": 7}
    assert found['berth_seat_waited_seconds_total{group="G01"}'] == 14.0


def test_it_reads_what_the_proxy_counts() -> None:
    source = (ROOT / "native" / "seat-proxy" / "src" / "counts.rs").read_text()
    listed = source.split("counts!(\n")[1].split(");")[0]
    assert tuple(line.split(",")[0].strip() for line in listed.splitlines() if line.strip()) == OUTCOMES
    assert set(REFUSED) == {name for name in OUTCOMES if name.startswith("refused_")}


COUNTS = st.dictionaries(st.sampled_from([A, B, "kyb-other-s1"]), st.integers(0, 50), max_size=3)


@given(st.lists(st.none() | COUNTS, max_size=12))
def test_counts_never_fall_whatever_a_proxy_says(told: list[dict[str, int] | None]) -> None:
    with scraping(metrics) as scraped:
        seen, last = metrics.Requests(), 0.0
        for each in told:
            heard = None if each is None else {seat: counted((n, 0, n, 0), forwarded=n) for seat, n in each.items()}
            seen.heard(heard, GROUPS)
            now = requests(scraped, "forwarded")
            assert now >= last
            last = now
