"""What a node says of its devices: always valid, and of too much what somebody would ask about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crds.nodedevices import MOST_CARDS, MOST_DEVICES, NodeDevicesStatus
from planning.devices.cards import Card, Link
from planning.devices.offers import Device
from planning.devices.report import CardHealth, Holder, Offer, Picture, Seats, status, summary

NOW = 1_800_000_000.0


def card(number: int, **more: Any) -> Card:
    values = {"id": f"GPU-{number}", "vendor": "nvidia", "product": "H100", "resource": "nvidia.com/gpu", **more}
    return Card(index=number, **values)


def device(number: int, **more: Any) -> Device:
    return replace(Device(f"GPU-{number}", "nvidia.com/gpu", (f"GPU-{number}",)), **more)


def test_a_card_that_is_not_well_says_why_and_since_when() -> None:
    ill = CardHealth("Unhealthy", "XID79", "It fell off the bus.", NOW - 60)
    told = status(Picture([card(0)], {"GPU-0": ill}), NOW)
    (shown,) = told["cards"]
    assert (shown["health"], shown["reason"], shown["message"]) == ("Unhealthy", "XID79", "It fell off the bus.")
    assert shown["since"] == "2027-01-15T07:59:00Z" and told["unhealthy"] == 1


def test_a_card_that_nobody_judged_is_not_called_healthy() -> None:
    (shown,) = status(Picture([card(0)]), NOW)["cards"]
    assert (shown["health"], shown["reason"]) == ("Unknown", "NotSeen")


def test_of_too_many_cards_and_devices_those_in_question_are_shown() -> None:
    cards = [card(number) for number in range(MOST_CARDS + 100)]
    health = {each.id: CardHealth("Healthy") for each in cards}
    ill = cards[-1].id
    health[ill] = CardHealth("Unhealthy", "Lost", "It is lost.")
    devices = {"nvidia.com/gpu": [device(number) for number in range(MOST_DEVICES + 100)]}
    last = devices["nvidia.com/gpu"][-1].id
    picture = Picture(cards, health, devices, {last: Holder("ns", "p", "c")})
    told = status(picture, NOW)
    assert len(told["cards"]) == MOST_CARDS and ill in {each["id"] for each in told["cards"]}
    assert len(told["devices"]) == MOST_DEVICES and told["held"] == 1
    assert [each["id"] for each in told["devices"] if "heldBy" in each] == [last]
    assert told["count"] == MOST_CARDS + 100, "the count is of all"


def test_a_resource_says_whether_the_kubelet_has_it() -> None:
    devices = {"a.example/x": [device(0)], "b.example/y": [device(1)]}
    offers = {"a.example/x": Offer("dra"), "b.example/y": Offer("device-plugin", "the kubelet refuses it")}
    shown = status(Picture([], {}, devices, {}, offers), NOW)["resources"]
    assert [(each["frontEnd"], each["offered"], each.get("message")) for each in shown] == [
        ("dra", True, None), ("device-plugin", False, "the kubelet refuses it")
    ]  # fmt: skip


def test_the_topology_is_drawn_as_nvidia_smi_does() -> None:
    cards = [card(number) for number in range(3)]
    links = (Link("GPU-0", "GPU-1", "nvlink", 18), Link("GPU-0", "GPU-2", "cross-cpu"))
    rows = status(Picture(cards, links=links), NOW)["topology"]
    assert [row["links"] for row in rows] == [["X", "NV18", "SYS"], ["NV18", "X", "?"], ["SYS", "?", "X"]]


def test_instances_are_no_cards_of_their_own_in_the_summary() -> None:
    assert summary([card(0), card(1), card(2, parent="GPU-0", product="MIG 1g.10gb")]) == "2 × H100"
    assert summary([]) == "none"


texts = st.text(max_size=20) | st.integers(0, 700).map("x".__mul__)
cards = st.builds(
    Card, id=texts, vendor=st.sampled_from(["nvidia", "amd", "tenstorrent"]), product=texts, resource=texts,
    index=st.integers(-5, 300), address=texts, numa=st.none() | st.integers(-3, 9),
    memory_mib=st.integers(0, 10**6), driver=texts,
)  # fmt: skip
healths = st.builds(
    CardHealth, state=st.sampled_from(["Healthy", "Unhealthy", "Unknown"]), reason=texts, message=texts,
    since=st.floats(-1e12, 1e18, allow_nan=False),
)  # fmt: skip
devices = st.builds(
    Device, id=texts, resource=texts, cards=st.lists(texts, max_size=3).map(tuple), group=texts,
    healthy=st.booleans(),
)  # fmt: skip
links = st.builds(
    Link, a=texts, b=texts, connection=st.sampled_from(["nvlink", "single-switch", "cross-cpu"]),
    lanes=st.integers(0, 18),
)  # fmt: skip


@given(
    st.lists(cards, max_size=8),
    healths,
    st.lists(devices, max_size=8),
    st.lists(links, max_size=5),
    st.lists(texts, max_size=20),
    st.none() | st.builds(Seats, texts, st.integers(0, 10), st.just(2), st.just(6), st.just(("x",) * 20)),
)
def test_whatever_drivers_say_the_status_is_valid(
    cards: list[Card], health: CardHealth, devices: list[Device], links: list[Link], problems: list[str],
    seats: Seats | None,
) -> None:  # fmt: skip
    by_resource: dict[str, list[Device]] = {}
    for each in devices:
        by_resource.setdefault(each.resource, []).append(each)
    picture = Picture(cards, {each.id: health for each in cards}, by_resource, {}, {}, links, problems, seats)
    told = status(picture, NOW)
    assert NodeDevicesStatus.model_validate(told).count == len(cards)
    for kind, key in (("cards", "id"), ("devices", "id"), ("resources", "name"), ("topology", "card")):
        keys = [each[key] for each in told.get(kind, ())]
        assert len(set(keys)) == len(keys), kind


def test_labels_and_what_waits_are_told_and_no_labels_are_not_the_same_as_none_known() -> None:
    seats = Seats("GPUSeatProfile pairs", 1, 1, 4, waiting=("Group G01 waits.",))
    told = status(Picture(seats=seats, labels={"b": "2", "a": "1"}), 0.0)
    assert told["seats"]["waiting"] == ["Group G01 waits."] and told["labels"] == {"a": "1", "b": "2"}
    assert status(Picture(labels={}), 0.0)["labels"] == {} and "labels" not in status(Picture(), 0.0)
    assert len(status(Picture(labels={f"k{number}": "" for number in range(99)}), 0.0)["labels"]) == 64


def test_more_groups_than_a_profile_may_name_are_written_all_the_same() -> None:
    seats = Seats("GPUSeatProfile pairs", 1, 200, 12_800)
    told = NodeDevicesStatus.model_validate(status(Picture((), {}, {}, seats=seats), 0.0)).seats
    assert told is not None and (told.groups, told.seats) == (64, 4096)
