"""Seats of a node: what a configuration means there, what is refused and why, and that no pod loses its seat."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.gpuseatprofile import GPUSeatProfileSpec
from planning.devices.cards import Card, Link
from planning.devices.offering import Seat
from planning.devices.seats import SeatPlan, configured, seat_id
from tests.crds.test_gpuseatprofile import PAIR, QUAD, anything
from tests.crds.test_gpuseatprofile import spec as written

ONE: dict[str, Any] = {"name": "one", "resource": "kyb.ai/gpu-1x-seat", "groupSize": 1, "seatsPerGroup": 3}
DEVICE_ID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def spec(*groups: tuple[str, list[Any]], profiles: tuple[dict[str, Any], ...] = (PAIR,)) -> GPUSeatProfileSpec:
    found, refused = GPUSeatProfileSpec.parse(written(*groups, profiles=profiles))
    assert found is not None, refused
    return found


def gpu(index: int, **more: Any) -> Card:
    return replace(Card(f"GPU-{index:04}", "nvidia", "H100", "nvidia.com/gpu", index), **more)


def gpus(count: int) -> list[Card]:
    return [gpu(index) for index in range(count)]


def layout(plan: SeatPlan) -> dict[str, list[int]]:
    """Groups with seats → indices of their GPUs."""
    return {group: [int(card.removeprefix("GPU-")) for card in cards] for group, cards in plan.groups.items()}


def held(plan: SeatPlan, *ids: str) -> list[Seat]:
    return [next(seat for seat in plan.seats if seat.id == each) for each in ids]


NAMED = spec(("G01", [0, 1]), ("G23", [3, 2]))


def test_named_groups_become_seats() -> None:
    plan = configured(NAMED, gpus(4))
    assert [seat.id for seat in plan.seats] == [seat_id(group, n) for group in ("G01", "G23") for n in (1, 2, 3, 4)]
    assert plan.seats[0] == Seat("kyb-G01-s1", "kyb.ai/gpu-2x-seat", "G01", ("GPU-0000", "GPU-0001"))
    assert layout(plan) == {"G01": [0, 1], "G23": [2, 3]}, "in the order of the node, however they were written"
    assert (plan.problems, plan.waiting, plan.accepted) == ((), (), NAMED)
    assert plan.withheld == {card.id for card in gpus(4)}


def test_a_gpu_is_in_a_group_or_whole_never_both() -> None:
    plan = configured(spec(("G01", [0, 1])), gpus(4))
    assert plan.withheld == {"GPU-0000", "GPU-0001"}, "2 and 3 stay nvidia.com/gpu"


def test_gpus_by_uuid_in_either_case() -> None:
    cards = [gpu(0, id="GPU-5170abcd"), gpu(1)]
    assert configured(spec(("mixed", ["GPU-5170ABCD", 1])), cards).groups == {"mixed": ("GPU-5170abcd", "GPU-0001")}


def test_seats_are_counted_not_sorted_as_text() -> None:
    plan = configured(spec(("G0", [0]), profiles=(ONE | {"seatsPerGroup": 12},)), gpus(1))
    assert [seat.id for seat in plan.seats][8:] == ["kyb-G0-s9", "kyb-G0-s10", "kyb-G0-s11", "kyb-G0-s12"]


def test_no_configuration_is_no_seats() -> None:
    assert configured(None, gpus(2)) == SeatPlan()


GROUP_OF_9 = "Group G29 (GPUs 2 and 9) of profile pair is refused: there is no GPU 9; this node has GPUs 0, 1, 2 and 3."


@pytest.mark.parametrize(
    ("wanted", "cards", "told"),
    [
        (spec(("G29", [2, 9])), gpus(4), GROUP_OF_9),
        (spec(("U", [0, "GPU-gone"])), gpus(1), "there is no GPU GPU-gone; this node has GPU 0."),
        (spec(("G01", [0, 1])), [], "this node shows no NVIDIA GPU that can be in a group"),
        (spec(("G01", [0, 1])), [gpu(0, vendor="amd"), gpu(1, vendor="amd")], "this node shows no NVIDIA"),
        (spec(("G01", [0, 1])), [gpu(0), gpu(1, resource="")], "GPU 1 is divided into MIG instances"),
        (spec(("G01", [0, 1])), [gpu(0), gpu(1), gpu(1, id="MIG-1", parent="GPU-0001")], "GPU 1 is divided into MIG"),
        (spec(("G00", [0, "GPU-0000"])), gpus(2), "GPU GPU-0000 is named twice, by index and by UUID"),
        (spec(("A", [0, 1]), ("B", ["GPU-0001", 2])), gpus(3), "refused: GPU 1 is in group A already"),
        (spec(profiles=(QUAD,)), gpus(2), "(quad takes groups of 4): this node has GPUs 0 and 1."),
    ],
)  # fmt: skip
def test_what_a_node_refuses_it_explains(wanted: GPUSeatProfileSpec, cards: list[Card], told: str) -> None:
    plan = configured(wanted, cards)
    assert len(plan.problems) == 1 and told in plan.problems[0] and plan.problems[0].endswith(".")


def test_what_a_node_refuses_leaves_its_other_groups() -> None:
    plan = configured(spec(("G01", [0, 1]), ("G29", [2, 9])), gpus(4))
    assert layout(plan) == {"G01": [0, 1]} and len(plan.problems) == 1
    assert "GPU-0002" not in plan.withheld


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (written(("G01", [0, 1]), ("G12", [1, 2])), "GPU 1 is in G01 and in G12"),
        (written(("G012", [0, 1, 2])), "G012 has 3 GPUs (0, 1, 2)"),
        (written(("G89", [8, 9])), "there is no GPU 8"),
        (spec(("G02", [0, 2]), ("G89", [8, 9])), "there is no GPU 8"),
        ({"profiles": "all"}, "spec.profiles: must be a list"),
        (17, "spec: must be an object"),
    ],
)
def test_a_bad_configuration_leaves_the_one_before_it_whole(bad: Any, told: str) -> None:
    before = configured(NAMED, gpus(4))
    after = configured(bad, gpus(4), last=before.accepted)
    assert (after.seats, after.withheld, after.accepted) == (before.seats, before.withheld, NAMED)
    assert len(after.problems) == 1 and told in after.problems[0]
    assert after.problems[0].endswith("The configuration before it stays in place, whole.")


def test_a_gpu_that_went_takes_only_its_group_with_it() -> None:
    after = configured(NAMED, gpus(3), last=NAMED)
    assert layout(after) == {"G01": [0, 1]} and after.accepted == NAMED
    assert "there is no GPU 3" in after.problems[0] and "before it" not in after.problems[0]


def test_what_was_refused_is_taken_as_soon_as_the_node_can() -> None:
    wanted = spec(("G45", [4, 5]))
    assert configured(wanted, gpus(4), last=NAMED).accepted == NAMED
    assert layout(configured(wanted, gpus(6), last=NAMED)) == {"G45": [4, 5]}


# Hot reload


def test_a_held_seat_stays_though_nothing_configures_it_any_more() -> None:
    before = configured(NAMED, gpus(4))
    (mine,) = held(before, "kyb-G23-s2")
    for wanted in (None, spec(("G01", [0, 1])), spec(("G01", [0, 1]), profiles=(PAIR | {"seatsPerGroup": 1},))):
        after = configured(wanted, gpus(4), (), [mine], last=NAMED)
        assert mine in after.seats and [seat for seat in after.seats if seat.group == "G23"] == [mine]
        assert {"GPU-0002", "GPU-0003"} <= after.withheld
        assert after.waiting == (
            "Seat kyb-G23-s2 (GPUs 2 and 3) is no longer configured: it stays until the pod that holds it ends.",
        )


def test_fewer_seats_a_group_leaves_those_that_are_held() -> None:
    before = configured(NAMED, gpus(4))
    fewer = spec(("G01", [0, 1]), ("G23", [2, 3]), profiles=(PAIR | {"seatsPerGroup": 1},))
    after = configured(fewer, gpus(4), (), held(before, "kyb-G01-s4"), last=NAMED)
    assert [seat.id for seat in after.seats] == ["kyb-G01-s1", "kyb-G01-s4", "kyb-G23-s1"]


def test_a_group_that_conflicts_with_a_held_seat_waits_and_the_others_do_not() -> None:
    mine = held(configured(NAMED, gpus(6)), "kyb-G01-s2")
    wanted = spec(("G12", [1, 2]), ("G34", [3, 4]))
    after = configured(wanted, gpus(6), (), mine, last=NAMED)
    assert layout(after) == {"G01": [0, 1], "G34": [3, 4]} and after.accepted == wanted and not after.problems
    assert after.waiting[0] == (
        "Group G12 (GPUs 1 and 2) of profile pair waits: GPU 1 belongs to seat kyb-G01-s2, which a running pod holds; "
        "it comes when that ends."
    )
    assert "GPU-0002" in after.withheld, "or somebody takes it meanwhile, and the group never comes"
    assert layout(configured(wanted, gpus(6), (), [], last=wanted)) == {"G12": [1, 2], "G34": [3, 4]}


def test_a_groups_name_does_not_go_to_other_gpus_while_a_seat_of_it_is_held() -> None:
    mine = held(configured(NAMED, gpus(4)), "kyb-G01-s1")
    after = configured(spec(("G01", [2, 3])), gpus(4), (), mine, last=NAMED)
    assert after.seats == tuple(mine)
    assert "a running pod holds seat kyb-G01-s1 of the G01 before it" in after.waiting[0]


def test_a_gpu_that_a_pod_holds_whole_is_not_given_to_a_group() -> None:
    after = configured(NAMED, gpus(4), busy={"GPU-0002"})
    assert layout(after) == {"G01": [0, 1]} and {"GPU-0002", "GPU-0003"} <= after.withheld
    assert after.waiting == (
        "Group G23 (GPUs 2 and 3) of profile pair waits: a running pod holds GPU 2 whole, as nvidia.com/gpu; it comes "
        "when that pod ends.",
    )


def test_a_held_seats_cards_stay_when_the_kernel_counts_anew() -> None:
    mine = held(configured(NAMED, gpus(4)), "kyb-G01-s1")
    renumbered = [gpu(1, id="GPU-0000"), gpu(0, id="GPU-0001"), gpu(2), gpu(3)]
    after = configured(NAMED, renumbered, (), mine, last=NAMED)
    assert {seat.cards for seat in after.seats if seat.group == "G01"} == {("GPU-0000", "GPU-0001")}


# Groups that are found


def nvlink(*pairs: tuple[int, int]) -> list[Link]:
    return [Link(f"GPU-{a:04}", f"GPU-{b:04}", "nvlink", 4) for a, b in pairs]


def test_groups_are_found_and_named_after_their_gpus() -> None:
    plan = configured(spec(), gpus(4), nvlink((0, 2), (1, 3)))
    assert layout(plan) == {"G02": [0, 2], "G13": [1, 3]}
    plan = configured(spec(profiles=(ONE, PAIR, QUAD)), gpus(8))
    assert layout(plan) == {"G0123": [0, 1, 2, 3], "G45": [4, 5], "G6": [6], "G7": [7]}


def test_a_node_without_gpus_refuses_nothing_where_groups_are_found() -> None:
    for cards in ([], [gpu(0, vendor="amd")]):
        plan = configured(spec(), cards)
        assert (plan.seats, plan.problems) == ((), ())
    assert configured(spec(), [gpu(0, resource=""), gpu(1)]).problems, "one that is divided is one"


def test_names_of_found_groups_are_never_the_same() -> None:
    plan = configured(spec(profiles=(ONE, PAIR)), gpus(16), nvlink((1, 2)))
    assert {"G01-02", "G12"} <= {*layout(plan)}
    assert len(layout(plan)) == len({frozenset(cards) for cards in plan.groups.values()})
    many = configured(spec(profiles=(PAIR | {"groupSize": 16, "resource": "kyb.ai/gpu-16x-seat"},)), gpus(200))
    assert len(many.groups) == 12 and all(DEVICE_ID.fullmatch(seat.id) for seat in many.seats)


def test_gpus_of_two_products_are_never_found_to_be_a_group() -> None:
    cards = [gpu(n, product="H100" if n % 2 else "L4") for n in range(4)]
    assert layout(configured(spec(), cards, nvlink((0, 1), (2, 3)))) == {"G02": [0, 2], "G13": [1, 3]}


def test_gpus_that_are_left_over_stay_whole() -> None:
    plan = configured(spec(), gpus(5))
    assert len(plan.groups) == 2 and "GPU-0004" not in plan.withheld


def test_found_groups_stay_where_seats_are_held_and_the_rest_is_divided_around_them() -> None:
    mine = held(configured(spec(("odd", [0, 3])), gpus(4)), "kyb-odd-s1")
    after = configured(spec(), gpus(4), nvlink((0, 1), (2, 3)), mine)
    assert layout(after) == {"odd": [0, 3], "G12": [1, 2]} and not after.problems
    assert [seat.id for seat in after.seats if seat.group == "odd"] == [seat_id("odd", n) for n in (1, 2, 3, 4)]
    free = configured(spec(), gpus(4), nvlink((0, 1), (2, 3)))
    assert layout(free) == {"G01": [0, 1], "G23": [2, 3]}


def test_holding_a_found_seat_changes_nothing_for_the_other_groups() -> None:
    links = [Link(f"GPU-{a:04}", f"GPU-{b:04}", "nvlink", (a * b) % 3 + 1) for a, b in combinations(range(12), 2)]
    free = configured(spec(), gpus(12), links)
    for seat in free.seats:
        assert configured(spec(), gpus(12), links, [seat]) == free


# Whatever is written, whatever is held


groups = st.lists(
    st.tuples(st.sampled_from(["G01", "G12", "G23", "A", "b-1"]), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    max_size=4,
)
garbage = (
    anything
    | groups.map(lambda found: written(*found, profiles=(ONE, PAIR, QUAD)))
    | st.tuples(groups, anything).map(lambda both: written(*both[0]) | {"nodeSelector": both[1]})
    | st.sampled_from([spec(), spec(profiles=(ONE, QUAD)), NAMED, spec(("G12", [1, 2])), spec(("G03", [3, 0])), None])
)
cards = st.lists(
    st.builds(
        Card,
        id=st.integers(0, 9).map(lambda n: f"GPU-{n:04}") | st.text("aB._-0", min_size=1, max_size=63),
        vendor=st.sampled_from(["nvidia", "amd", "tenstorrent"]),
        product=st.sampled_from(["H100", "L4"]),
        resource=st.sampled_from(["nvidia.com/gpu", ""]),
        index=st.integers(-2, 300),
        parent=st.sampled_from(["", "", "GPU-0001"]),
    ),
    max_size=9,
)


@given(st.lists(st.tuples(garbage, cards | st.integers(0, 9).map(gpus), st.randoms(use_true_random=False)), max_size=5))
def test_through_any_reloads_no_pod_loses_its_seat_and_no_gpu_is_in_two_groups(changes: list[Any]) -> None:
    present: list[Seat] = []
    last: GPUSeatProfileSpec | None = None
    for raw, now, random in changes:
        plan = configured(raw, now, (), present, busy={card.id for card in now if random.random() < 0.1}, last=last)
        assert {*present} <= {*plan.seats}
        ids = [seat.id for seat in plan.seats]
        assert len(ids) == len({*ids}) and all(DEVICE_ID.fullmatch(each) for each in ids)
        owners: dict[str, str] = {}
        for seat in plan.seats:
            assert plan.groups[seat.group] == seat.cards and len({*seat.cards}) == len(seat.cards)
            assert all(owners.setdefault(card, seat.group) == seat.group for card in seat.cards)
            assert {*seat.cards} <= plan.withheld and seat.resource == f"kyb.ai/gpu-{len(seat.cards)}x-seat"
        parsed = raw if raw is None or isinstance(raw, GPUSeatProfileSpec) else GPUSeatProfileSpec.parse(raw)[0]
        assert parsed is not None or raw is None or plan.problems
        last = plan.accepted
        present = [seat for seat in plan.seats if random.random() < 0.5]


@given(
    st.lists(
        st.builds(
            Seat,
            st.text(max_size=9),
            st.text(max_size=9),
            st.sampled_from(["G01", "x"]),
            st.lists(st.sampled_from(["GPU-0000", "GPU-0001", "gone"])).map(tuple),
        ),
        max_size=5,
    ),
    garbage,
)
def test_whatever_is_said_to_be_held_stays(present: list[Seat], raw: Any) -> None:
    plan = configured(raw, gpus(4), (), present)
    assert {seat.id: seat for seat in reversed(present)}.items() <= {seat.id: seat for seat in plan.seats}.items()
