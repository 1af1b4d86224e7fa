"""What cards are offered as: ids and names that the kubelet takes, and the health of what each device stands on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.devices.cards import Card
from planning.devices.health import VANISHED, Health
from planning.devices.offering import MOST_ID, Offering, Seat, Terms, is_resource, offered
from planning.devices.offers import Device

WELL = Health("Healthy")
ILL = Health("Unhealthy", "XID79", "It fell off the bus.")
GPU, SEAT = "nvidia.com/gpu", "kyb.ai/gpu-2x-seat"


def gpu(number: int, **more: Any) -> Card:
    return Card(f"GPU-{number}", "nvidia", "H100", GPU, number, numa=number // 2, **more)


GPUS = [gpu(number) for number in range(4)]
SEATS = [Seat(f"kyb-G01-s{number}", SEAT, "G01", ("GPU-0", "GPU-1")) for number in range(3)]


def offer(
    cards: list[Card], ill: Mapping[str, Health] | None = None, seats: list[Seat] | None = None, shares: int = 1,
    held: Mapping[str, Device] | None = None, known: tuple[str, ...] = (), aliases: Mapping[str, str] | None = None,
) -> Offering:  # fmt: skip
    health = {card.id: WELL for card in cards} | dict(ill or {})
    return offered(cards, health, seats or [], Terms(shares, aliases or {}), held or {}, known)


def ids(found: Offering, resource: str) -> list[str]:
    return [device.id for device in found.devices.get(resource, ())]


def test_a_gpu_is_in_a_group_or_offered_whole_and_never_both() -> None:
    found = offer(GPUS, seats=SEATS)
    assert ids(found, GPU) == ["GPU-2", "GPU-3"] and ids(found, SEAT) == [seat.id for seat in SEATS]
    assert found.devices[SEAT][0].group == "G01" and found.devices[GPU][0].numa == (1,)


def test_a_gpu_that_a_group_waits_for_is_not_offered_meanwhile() -> None:
    found = offered(GPUS, {card.id: WELL for card in GPUS}, [], Terms(), {}, (), ["GPU-0"])
    assert ids(found, GPU) == ["GPU-1", "GPU-2", "GPU-3"]


def test_a_cards_trouble_is_that_of_all_that_stands_on_it() -> None:
    found = offer(GPUS, {"GPU-1": ILL, "GPU-2": ILL}, SEATS, shares=3)
    assert [device.healthy for device in found.devices[SEAT]] == [False] * 3
    assert found.devices[SEAT][0].message == "GPU-1: It fell off the bus."
    assert [(each.id, each.healthy) for each in found.devices[GPU]] == [
        *((f"GPU-2-r{number}", False) for number in range(3)), *((f"GPU-3-r{number}", True) for number in range(3))
    ]  # fmt: skip
    assert found.devices[GPU][0].reason == "XID79"


def test_a_gpus_trouble_is_that_of_its_instances() -> None:
    whole = gpu(0)
    mig = Card("MIG-1", "nvidia", "1g.10gb", "nvidia.com/mig-1g.10gb", 0, parent="GPU-0")
    cards = [Card(**{**{name: getattr(whole, name) for name in Card.__slots__}, "resource": ""}), mig]
    found = offer(cards, {"GPU-0": ILL})
    assert list(found.devices) == ["nvidia.com/mig-1g.10gb"]
    assert not found.devices["nvidia.com/mig-1g.10gb"][0].healthy


def test_an_unknown_card_is_given_out_for_a_while() -> None:
    assert offer(GPUS, {"GPU-0": Health("Unknown", "ProviderSilent", "x")}).devices[GPU][0].healthy


def test_what_somebody_holds_stays_listed_as_ill_when_its_card_is_gone() -> None:
    before = {device.id: device for device in offer(GPUS).devices[GPU]}
    found = offer(GPUS[1:], held={"GPU-0": before["GPU-0"]})
    (gone, *others) = found.devices[GPU]
    assert (gone.id, gone.healthy, gone.reason) == ("GPU-0", False, VANISHED) and all(each.healthy for each in others)
    assert ids(offer(GPUS[1:]), GPU) == ["GPU-1", "GPU-2", "GPU-3"]


def test_a_resource_that_was_offered_stays_with_no_devices() -> None:
    assert offer([], known=(GPU,)).devices == {GPU: ()}


def test_families_are_offered_under_one_name() -> None:
    cards = [Card(f"tt-{kind}", "tenstorrent", kind, f"tenstorrent.com/{kind}", 0) for kind in ("p150a", "p150b")]
    aliases = {"tenstorrent.com/p150a": "tenstorrent.com/p150", "tenstorrent.com/p150b": "tenstorrent.com/p150"}
    assert ids(offer(cards, aliases=aliases), "tenstorrent.com/p150") == ["tt-p150a", "tt-p150b"]


def test_what_the_kubelet_would_not_take_is_told() -> None:
    odd = Card("tt-1", "tenstorrent", "?", "tenstorrent.com/a b", 0)
    long = Card("x" * (MOST_ID + 1), "tenstorrent", "n150", "tenstorrent.com/n150", 1)
    found = offer([odd, long, GPUS[0]])
    assert list(found.devices) == [GPU] and len(found.problems) == 2
    assert "cannot be the name of a resource" in found.problems[0]


@pytest.mark.parametrize(
    "name",
    ["nvidia.com/gpu", "tenstorrent.com/n150", "nvidia.com/mig-1g.10gb", "a/b", f"{'a' * 244}/{'b' * 63}"],
)  # fmt: skip
def test_names_that_the_kubelet_takes(name: str) -> None:
    assert is_resource(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "gpu", "/gpu", "nvidia.com/", "a/b/c", "A.com/x", "a..b/x", ".a/x", "a-/x", "a.com/-x", "a.com/x y",
        "kubernetes.io/gpu", "node.kubernetes.io/gpu", "requests.nvidia.com/gpu", f"{'a' * 245}/b", f"a/{'b' * 64}",
        "a.com/x\n",
    ],
)  # fmt: skip
def test_names_that_the_kubelet_does_not_take(name: str) -> None:
    assert not is_resource(name)


def test_a_gpu_that_is_divided_is_not_offered_whole() -> None:
    mig = Card("MIG-1", "nvidia", "1g.10gb", "nvidia.com/mig-1g.10gb", 0, parent="GPU-0")
    assert list(offer([gpu(0), mig]).devices) == ["nvidia.com/mig-1g.10gb"]


def held_of(found: Offering, *ids: str) -> dict[str, Device]:
    return {device.id: device for each in found.devices.values() for device in each if device.id in ids}


def test_a_gpu_that_is_held_whole_is_not_shared_out_meanwhile() -> None:
    found = offer(GPUS[:2], shares=2, held=held_of(offer(GPUS), "GPU-0"))
    assert ids(found, GPU) == ["GPU-0", "GPU-1-r0", "GPU-1-r1"]
    assert found.problems == (
        "GPU-0 is not offered as nvidia.com/gpu yet: a container holds GPU-0 of nvidia.com/gpu. It will be when that "
        "ends.",
    )


def test_a_gpu_of_which_a_share_is_held_is_not_offered_whole_nor_as_seats() -> None:
    held = held_of(offer(GPUS, shares=4), "GPU-0-r3")
    assert ids(offer(GPUS[:2], held=held), GPU) == ["GPU-0-r3", "GPU-1"]
    assert ids(offer(GPUS[:2], shares=2, held=held), GPU) == [
        "GPU-0-r0", "GPU-0-r1", "GPU-0-r3", "GPU-1-r0", "GPU-1-r1",
    ], "fewer shares are shares all the same"  # fmt: skip
    found = offer(GPUS, seats=SEATS, held=held)
    assert ids(found, SEAT) == [] and ids(found, GPU) == ["GPU-0-r3", "GPU-2", "GPU-3"]
    assert "Group G01 is not offered as kyb.ai/gpu-2x-seat yet: a container holds GPU-0-r3" in found.problems[0]


def test_seats_beside_a_seat_that_is_held_are_offered() -> None:
    found = offer(GPUS, seats=SEATS, held=held_of(offer(GPUS, seats=SEATS), SEATS[1].id))
    assert ids(found, SEAT) == [seat.id for seat in SEATS] and found.problems == ()


def test_a_card_that_is_held_under_one_name_is_not_offered_under_another() -> None:
    card = Card("tt-1", "tenstorrent", "p150a", "tenstorrent.com/p150a", 0)
    held = held_of(offer([card]), "tt-1")
    found = offer([card], held=held, aliases={"tenstorrent.com/p150a": "tenstorrent.com/p150"})
    assert list(found.devices) == ["tenstorrent.com/p150a"] and len(found.problems) == 1


def test_instances_of_a_gpu_that_is_held_whole_wait_and_the_other_way_round() -> None:
    mig = Card("MIG-1", "nvidia", "1g.10gb", "nvidia.com/mig-1g.10gb", 0, parent="GPU-0")
    found = offer([gpu(0), mig], held=held_of(offer([gpu(0)]), "GPU-0"))
    assert list(found.devices) == [GPU] and len(found.problems) == 1
    seat = Seat("kyb-G0-s1", "kyb.ai/gpu-1x-seat", "G0", ("GPU-0",))
    found = offer([gpu(0), mig], seats=[seat], held=held_of(offer([mig]), "MIG-1"))
    assert list(found.devices) == ["nvidia.com/mig-1g.10gb"] and len(found.problems) == 1


def test_a_device_that_is_held_keeps_its_place_when_its_card_is_gone() -> None:
    (gone,) = offer([], held=held_of(offer(GPUS), "GPU-2")).devices[GPU]
    assert gone.numa == (1,)


names = st.text("GPUtt-01ab", max_size=70)
cards = st.builds(
    Card, id=names, vendor=st.sampled_from(["nvidia", "tenstorrent"]), product=names,
    resource=st.sampled_from([GPU, "tenstorrent.com/n150", "", "bad name"]), index=st.integers(0, 9),
    numa=st.none() | st.integers(0, 1), parent=names,
)  # fmt: skip
seats = st.builds(
    Seat, id=names, resource=st.sampled_from([SEAT, GPU]), group=names, cards=st.lists(names, max_size=2).map(tuple)
)
healths = st.dictionaries(names, st.sampled_from([WELL, ILL]), max_size=5)


@given(st.lists(cards, max_size=6), healths, st.lists(seats, max_size=6), st.integers(-1, 100))
def test_ids_are_unique_over_all_resources_and_the_ill_say_why(
    cards: list[Card], health: dict[str, Health], seats: list[Seat], shares: int
) -> None:
    found = offered(cards, health, seats, Terms(shares), {}, ())
    every = [device for each in found.devices.values() for device in each]
    assert len({device.id for device in every}) == len(every)
    assert all(0 < len(device.id) <= MOST_ID for device in every)
    assert all(device.healthy != bool(device.reason) for device in every)
    grouped = {card for seat in seats for card in seat.cards}
    assert not any(device.cards[0] in grouped for device in found.devices.get("tenstorrent.com/n150", ()))


few = [gpu(number) for number in range(3)] + [Card("MIG-0", "nvidia", "1g", "nvidia.com/mig-1g", 2, parent="GPU-2")]
groupings = st.lists(
    st.sampled_from([
        Seat(f"kyb-{group}-s{number}", f"kyb.ai/gpu-{len(cards)}x-seat", group, cards)
        for group, cards in {"G0": ("GPU-0",), "G01": ("GPU-0", "GPU-1"), "G1": ("GPU-1",)}.items()
        for number in (1, 2)
    ]), unique=True,
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 3), groupings, st.randoms(use_true_random=False)), max_size=5))
def test_however_it_is_configured_anew_no_card_is_given_out_in_two_ways(
    story: list[tuple[int, list[Seat], Any]],
) -> None:
    held: dict[str, Device] = {}
    for shares, seats, dice in story:
        groups: dict[str, str] = {}
        seats = [
            each for each in seats if all(groups.setdefault(card, each.group) == each.group for card in each.cards)
        ]
        found = offer(few, seats=seats, shares=shares, held=held)
        listed = {device.id: device for each in found.devices.values() for device in each}
        assert set(held) <= set(listed), "what is held stays listed"
        free = [device for device in listed.values() if device.id not in held]
        for device in dice.sample(free, min(2, len(free))):
            for other in held.values():
                if not set(device.cards) & set(other.cards):
                    continue
                alike = device.resource == other.resource and set(device.cards) == set(other.cards)
                assert alike and device.id not in device.cards and other.id not in other.cards, (device, other)
            held[device.id] = device
