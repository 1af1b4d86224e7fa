"""GPUSeatGroups as a node writes them: valid whatever is in them, and nothing that means nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crds.gpuseatgroup import GPUSeatGroupStatus
from planning.seats.orders import GroupPhase
from planning.seats.status import (
    CheckPicture,
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
            [CheckPicture("driver", True, "580.65.06 can park")],
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
    }  # fmt: skip


def test_its_name_is_its_nodes_and_its_own() -> None:
    made = document("node-1.example", "uid", "G01")
    assert made["metadata"]["name"] == object_name("node-1.example", "G01") == "node-1.example.g01"
    assert made["spec"] == {"nodeName": "node-1.example", "group": "G01"}


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
        [SeatPicture(f"kyb-G01-s{i}", "Parked", message=text, backend=text) for i in range(seats)],
        SwitchPicture(1.0, "", A, text, dict(stages)), [CheckPicture(*each) for each in checks],
    )  # fmt: skip
    GPUSeatGroupStatus.model_validate(status(picture, 2.0))
