"""What a GPUSeatProfile's status says: counts, and which nodes fail it and why, in a bounded number of words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.gpuseatprofile import MOST_GROUPS, MOST_SEATS, MOST_SHOWN, GPUSeatProfileStatus
from planning.devices.seat_profiles import chosen
from planning.devices.seat_status import Verdict, reported, seat_status, verdicts
from planning.devices.seats import configured
from tests.crds.test_gpuseatprofile import anything, spec
from tests.planning.devices.test_seat_profiles import view
from tests.planning.devices.test_seats import gpus

NOW = 1_795_000_000.0
REFUSED = "Group G29 (GPUs 2 and 9) of profile pair is refused: there is no GPU 9; this node has GPU 0."


def well(node: str = "node-1", **more: Any) -> Verdict:
    return replace(Verdict(node, "uid-pairs", 3, groups=2, seats=8), **more)


def told(*verdicts: Verdict, wanted: Any = None, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """The status, with its conditions by type."""
    status = seat_status(view("pairs", wanted=wanted), before or {}, verdicts, NOW)
    GPUSeatProfileStatus.model_validate(status)
    return status | {each["type"]: each for each in status["conditions"]}


def test_nodes_that_serve_it_are_counted() -> None:
    status = told(well("b"), well("a"), well("other", uid="uid-other"), well("c", groups=0, seats=0))
    counts = ("groups", "seats", "nodesServing", "nodesRefused", "observedGeneration")
    assert [status[each] for each in counts] == [4, 16, 2, 0, 3]
    assert [each["name"] for each in status["nodes"]] == ["a", "b", "c"]
    assert status["nodes"][0] == {"name": "a", "groups": 2, "seats": 8}
    assert (status["Ready"]["status"], status["Ready"]["reason"]) == ("True", "Serving")
    assert status["Ready"]["message"] == "Seats: 16, on 2 nodes."
    assert (status["Error"]["status"], status["Error"]["reason"]) == ("False", "NothingRefused")


@pytest.mark.parametrize(
    ("said", "reason", "message", "error"),
    [
        ([], "NoNodes", "its nodeSelector matches none", "False"),
        ([well(problems=(REFUSED,))], "Refused", f"is refused by 1 node of 1. node-1: {REFUSED} Seats: 8", "True"),
        ([well(), well("node-2", instead="first", seats=0)], "Overruled", "GPUSeatProfile first is older", "True"),
        ([well(generation=2)], "Pending", "Still to look at it: 1 node of 1 (node-1)", "False"),
        ([well(generation=2, problems=(REFUSED,))], "Pending", "Still to look at it", "False"),
        ([well(waiting=("Group G12 waits: so it is.",))], "Waiting", "node-1: Group G12 waits: so it is.", "False"),
        ([well(waiting=("w.",)), well("b", problems=(REFUSED,))], "Refused", "by 1 node of 2. b: Group G29", "True"),
    ],
)
def test_what_is_amiss_is_said_with_the_nodes(said: list[Verdict], reason: str, message: str, error: str) -> None:
    status = told(*said)
    assert (status["Ready"]["status"], status["Ready"]["reason"]) == ("False", reason)
    assert message in status["Ready"]["message"] and status["Error"]["status"] == error
    assert error == "False" or (status["Error"]["reason"] == reason and message[:40] in status["Error"]["message"])


def test_a_spec_that_cannot_be_read_is_said_though_no_node_did() -> None:
    status = told(well(), wanted=spec(("G01", [0, 1]), ("G12", [1, 2])))
    assert status["Error"]["status"] == "True" and status["Error"]["reason"] == "Invalid"
    assert "GPU 1 is in G01 and in G12" in status["Error"]["message"]
    assert "Nodes keep the configuration that they had. Seats: 8, on 1 node." in status["Error"]["message"]


def test_a_condition_keeps_the_moment_of_its_last_change() -> None:
    before = told(well())
    before["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    after = told(well(), well("b"), before=before)
    assert after["Ready"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    assert told(before=before)["Ready"]["lastTransitionTime"] != "2026-01-01T00:00:00Z"


def test_a_thousand_nodes_stay_within_bounds_and_those_with_news_are_shown() -> None:
    many = [well(f"node-{n:04}") for n in range(900)] + [
        well(f"z-{n:04}", problems=(REFUSED * 20,)) for n in range(100)
    ]
    status = told(*many)
    assert status["nodesRefused"] == 100 and status["nodesServing"] == 1000
    assert len(status["nodes"]) == MOST_SHOWN and all(each["name"].startswith("z-") for each in status["nodes"])
    assert "refused by 100 nodes of 1000. z-0000: Group G29" in status["Error"]["message"]
    assert status["Error"]["message"].endswith("And 95 more."), "whole, not cut"


sentences = st.lists(st.text(max_size=400), max_size=3).map(tuple)
given_verdicts = st.lists(
    st.builds(
        Verdict,
        node=st.text(max_size=253),
        uid=st.sampled_from(["uid-pairs", "uid-x"]),
        generation=st.integers(0, 5),
        groups=st.integers(0, 99),
        seats=st.integers(0, 99),
        problems=sentences,
        waiting=sentences,
        instead=st.text(max_size=9),
    ),
    max_size=9,
)


@given(given_verdicts)
def test_any_verdicts_make_a_status_that_the_api_server_takes(said: list[Verdict]) -> None:
    status = told(*said)
    assert status["Ready"]["status"] == "False" or status["Error"]["status"] == "False"
    assert told(*reversed(said))["conditions"][0]["reason"] == status["conditions"][0]["reason"]


def test_a_nodes_verdicts_are_on_all_that_select_it() -> None:
    configuration = chosen([view("pairs", wanted=spec(("G01", [0, 1]), ("G89", [8, 9]))), view("second")], {})
    mine, second = verdicts("node-1", configuration, configured(configuration.spec, gpus(4)))
    assert (mine.uid, mine.generation, mine.groups, mine.seats) == ("uid-pairs", 3, 1, 4)
    assert "there is no GPU 8" in mine.problems[0]
    assert (second.uid, second.instead, second.seats) == ("uid-second", "pairs", 0)
    assert verdicts("node-1", chosen([], {}), configured(None, [])) == []


def test_what_a_node_reports_of_its_seats_is_its_verdict() -> None:
    configuration = chosen([view("pairs", wanted=spec(("G01", [0, 1]), ("G89", [8, 9]))), view("second")], {})
    own = verdicts("node-1", configuration, configured(configuration.spec, gpus(4)))
    seats = {
        "source": configuration.source,
        "generation": 3,
        "groups": own[0].groups,
        "seats": own[0].seats,
        "problems": list(own[0].problems),
    }
    assert reported("node-1", configuration, seats) == own
    assert reported("node-1", configuration, seats | {"source": "GPUSeatProf…"}) == own
    for behind in (None, {}, seats | {"source": "GPUSeatProfile other"}, seats | {"source": 3}):
        mine, second = reported("node-1", configuration, behind)
        assert (mine.generation, mine.seats, mine.problems) == (0, 0, ()) and second == own[1]
    assert reported("node-1", chosen([], {}), seats) == []


def test_a_node_that_makes_up_seats_keeps_no_status_from_being_written() -> None:
    configuration, int32 = chosen([view("pairs")], {}), 2**31 - 1
    seats = {"source": configuration.source, "generation": 3, "groups": int32, "seats": int32}
    status = told(*(each for node in ("a", "b") for each in reported(node, configuration, seats)))
    assert (status["groups"], status["seats"]) == (2 * MOST_GROUPS, 2 * MOST_GROUPS * MOST_SEATS)


@given(anything, anything)
def test_whatever_a_node_reports_does_no_harm(seats: Any, value: Any) -> None:
    configuration = chosen([view("pairs")], {})
    whole = {"source": configuration.source, **dict.fromkeys(("generation", "groups", "seats", "problems"), value)}
    for said in (seats, whole):
        told(*reported("node-1", configuration, said))
