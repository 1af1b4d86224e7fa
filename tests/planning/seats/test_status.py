"""GPUSeatGroups as a node writes them: valid whatever is in them, and nothing that means nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from crds.gpuseatgroup import GPUSeatGroupStatus
from crds.gpuseatprofile import GROUP_PATTERN, MOST_NAME
from crds.gpuworkload import ObjectName
from planning.seats.orders import GroupPhase
from planning.seats.preflight import Check
from planning.seats.status import (
    GroupPicture,
    SeatPicture,
    SwitchPicture,
    document,
    object_name,
    status,
)

A, B = "kyb-G01-s1", "kyb-G01-s2"


def test_what_people_see_of_a_group() -> None:
    found = status(
        GroupPicture(
            "G01", "Active", A, f"{A} serves", 1_000_000.0, 7,
            [
                SeatPicture(A, "Active", ("team", "llama-0", "server"), 31000, wake=1.25, backend="cuda-checkpoint"),
                SeatPicture(B, "Parked", ("team", "qwen-0", "server"), 31001, 3, 40 << 30, parkable=True),
                SeatPicture("kyb-G01-s3", "Absent"),
            ],
            SwitchPicture(1_000_000.0, B, A, "it waited", {"park": 1.5, "park: checkpoint": 1.4, "wake": 0.5}),
            [Check("driver", True, "580.65.06 can park")],
        ),
        1_000_060.0,
    )  # fmt: skip
    assert (found["phase"], found["active"], found["held"], found["parked"]) == ("Active", A, 2, 1)
    assert (found["requests"], found["parkedBytes"], found["switches"]) == (3, 40 << 30, 7)
    assert (found["since"], found["updated"]) == ("1970-01-12T13:46:40Z", "1970-01-12T13:47:40Z")
    assert found["seats"][0] == {
        "id": A, "phase": "Active", "backend": "cuda-checkpoint", "port": 31000, "wakeMillis": 1250,
        "heldBy": {"namespace": "team", "pod": "llama-0", "container": "server"},
    }  # fmt: skip
    assert found["seats"][2] == {"id": "kyb-G01-s3", "phase": "Absent"}
    assert (found["lastSwitch"]["millis"], found["lastSwitch"]["before"]) == (2000, B)
    assert "simulated" not in found


def test_an_empty_group_says_no_more_than_that() -> None:
    assert status(GroupPicture("G01", "Empty"), 0.0) == {
        "updated": "1970-01-01T00:00:00Z", "phase": "Empty", "requests": 0, "held": 0, "parked": 0, "parkedBytes": 0,
        "switches": 0,
        "conditions": [
            {"type": "Healthy", "status": "True", "reason": "Empty", "message": "Nobody has the slot.",
             "lastTransitionTime": "1970-01-01T00:00:00Z"},
        ],
    }  # fmt: skip


def test_its_name_is_its_nodes_and_its_own() -> None:
    made = document("node-1.example", "uid", "G01")
    assert made["metadata"]["name"] == object_name("node-1.example", "G01") == "node-1.example.g01"
    assert made["spec"] == {"nodeName": "node-1.example", "group": "G01"}


NODE = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?){0,3}", fullmatch=True)
GROUP = st.from_regex(GROUP_PATTERN, fullmatch=True).filter(lambda name: len(name) <= MOST_NAME)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("G01", "n1.g01"),
        ("G00-10", "n1.g00-10"),
        ("7", "n1.7"),
        ("pair-a", "n1.pair-a"),
        ("g01", "n1.g01.14dd221c42"),
        ("Pair-A", "n1.pair-a.cd846f819b"),
        ("PAIR-A", "n1.pair-a.2e8dbafd1b"),
    ],
)
def test_groups_that_differ_in_case_only_have_names_of_their_own(group: str, name: str) -> None:
    assert object_name("n1", group) == name


@given(NODE, GROUP, st.data())
def test_every_name_is_one_of_kubernetes_and_nobody_elses(node: str, group: str, data: st.DataObject) -> None:
    name = object_name(node, group)
    TypeAdapter(ObjectName).validate_python(name)
    other = "".join(data.draw(st.sampled_from([each.lower(), each.upper()])) for each in group)
    assert (object_name(node, other) == name) == (other == group)


def test_the_name_of_a_node_that_leaves_no_room_is_cut() -> None:
    node, group = "a" * 250 + ".b", "G" * MOST_NAME
    TypeAdapter(ObjectName).validate_python(object_name(node, group))
    assert object_name(node, group) != object_name("a" * 250 + ".c", group)


TEXT = st.text(max_size=2000)
PHASES: tuple[GroupPhase, ...] = ("Empty", "Active", "Quarantined")


@given(
    TEXT,
    st.sampled_from(PHASES),
    st.lists(st.tuples(TEXT, st.floats(-1, 1e6)), max_size=40),
    st.lists(st.tuples(TEXT, st.booleans(), TEXT), max_size=40),
    st.integers(0, 100),
)
def test_whatever_an_engine_says_the_status_is_valid(
    text: str,
    phase: GroupPhase,
    stages: list[tuple[str, float]],
    checks: list[tuple[str, bool, str]],
    seats: int,
) -> None:
    picture = GroupPicture(
        "G01", phase, A, text, 1.0, 0,
        [
            SeatPicture(
                f"kyb-G01-s{i % 70}", "Parked", ("team", "p" * 253, "server"), 70_000, -1, -1, float("nan"), text,
                message=text, park=-1.0, expected=float("inf"), error=text, since=-1e300,
            )
            for i in range(seats)
        ],
        SwitchPicture(1.0, text, text, text, dict(stages), "Failed"), [Check(*each) for each in checks],
        oldest=float("inf"), refused=-1, proxy=text, healthy_since=float("nan"),
    )  # fmt: skip
    GPUSeatGroupStatus.model_validate(status(picture, 2.0))


def test_a_group_that_is_ill_says_why_and_since_when() -> None:
    (condition,) = status(GroupPicture("G01", "Quarantined", "", "no room", healthy_since=60.0), 0.0)["conditions"]
    assert (condition["status"], condition["reason"], condition["message"]) == ("False", "Quarantined", "no room")
    assert condition["lastTransitionTime"] == "1970-01-01T00:01:00Z"
    (condition,) = status(GroupPicture("G01", "Active", A, proxy="The proxy is away."), 0.0)["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "ProxyAway")
    (condition,) = status(GroupPicture("G01", "Parking", A), 0.0)["conditions"]
    assert (condition["status"], condition["reason"]) == ("True", "Switching")
