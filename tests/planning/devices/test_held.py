"""What a device was, from what its container got."""

from __future__ import annotations

import pytest

from planning.devices.cards import Card
from planning.devices.held import device_of, replaced, seat_of
from planning.devices.offering import Seat
from planning.devices.offers import Injection

GPU, SEAT = "nvidia.com/gpu", "kyb.ai/gpu-2x-seat"


@pytest.mark.parametrize(
    "injection",
    [
        Injection(cdi=("berth.dev/nvidia=GPU-a", "berth.dev/nvidia=GPU-b")),
        Injection({"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}),
        Injection({"NVIDIA_VISIBLE_DEVICES": "void"}),
        None,
    ],
)
def test_a_share_is_of_its_own_card(injection: Injection | None) -> None:
    assert device_of("GPU-a-r3", GPU, injection).cards == ("GPU-a",)
    assert device_of("GPU-a", GPU, injection).cards == ("GPU-a",)


def test_a_seat_is_of_all_cards_of_its_group() -> None:
    given = Injection({"KYB_GPU_GROUP": "G01"}, cdi=("berth.dev/nvidia=GPU-a", "berth.dev/nvidia=GPU-b"))
    device = device_of("kyb-G01-s1", SEAT, given)
    assert seat_of(device) == Seat("kyb-G01-s1", SEAT, "G01", ("GPU-a", "GPU-b"))
    assert seat_of(device_of("kyb-G01-s1", SEAT, None)) is None, "nobody knows on which cards it is"


def gpu(id: str, index: int, address: str = "", parent: str = "") -> Card:
    return Card(id, "nvidia", "H100", GPU, index, address, parent=parent)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ([gpu("GPU-b", 7, "0000:01:00.0")], True),
        ([gpu("GPU-b", 1, "0000:02:00.0")], False),  # the kernel has counted anew
        ([gpu("GPU-b", 1)], True),
        ([gpu("GPU-b", 2)], False),
        ([gpu("GPU-a", 1, "0000:01:00.0")], False),  # itself
        ([gpu("MIG-b", 1, "0000:01:00.0", parent="GPU-b")], False),
        ([Card("tt-1", "tenstorrent", "n150", "tenstorrent.com/n150", 1, "0000:01:00.0")], False),
        ([], False),
    ],
)
def test_a_card_is_replaced_by_another_whole_one_in_its_place(there: list[Card], expected: bool) -> None:
    assert replaced(gpu("GPU-a", 1, "0000:01:00.0"), there) is expected
