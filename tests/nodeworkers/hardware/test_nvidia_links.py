"""How NVIDIA GPUs are connected, as NVML tells it of simulated machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from planning.devices.cards import Link
from tests.nodeworkers.hardware.nvidia_rig import Rig, gpus, uuid


def links(folder: Path, count: int, topology: Any) -> dict[tuple[int, int], tuple[str, int]]:
    return numbered(Rig(folder, {"gpus": [{"count": count}], "topology": topology}).source.look().links)


def numbered(found: tuple[Link, ...]) -> dict[tuple[int, int], tuple[str, int]]:
    """(a, b) -> connection, lanes; by the numbers of the GPUs."""
    number = {uuid(each): each for each in range(256)}
    assert all(link.a < link.b for link in found)
    return {(number[link.a], number[link.b]): (link.connection, link.lanes) for link in found}


def test_two_sockets(tmp_path: Path) -> None:
    found = links(tmp_path, 4, "pcie-2-sockets")
    assert found == {
        (0, 1): ("single-switch", 0),
        (0, 2): ("cross-cpu", 0),
        (0, 3): ("cross-cpu", 0),
        (1, 2): ("cross-cpu", 0),
        (1, 3): ("cross-cpu", 0),
        (2, 3): ("single-switch", 0),
    }


def test_pairs(tmp_path: Path) -> None:
    found = links(tmp_path, 5, "nvlink-pairs")
    assert found[0, 1] == found[2, 3] == ("nvlink", 4)
    assert found[1, 2] == ("same-cpu", 0) and len(found) == 10


def test_a_switch_connects_all_with_all(tmp_path: Path) -> None:
    found = links(tmp_path, 8, "nvswitch")
    assert len(found) == 28 and set(found.values()) == {("nvlink", 18)}


def test_what_is_written_down(tmp_path: Path) -> None:
    found = links(
        tmp_path,
        3,
        [{"a": 2, "b": 0, "nvlinks": 2}, {"a": 0, "b": 1, "connection": "same-board"}],
    )
    assert found == {(0, 1): ("same-board", 0), (0, 2): ("nvlink", 2), (1, 2): ("cross-cpu", 0)}


@pytest.mark.parametrize("function", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo"])
def test_links_are_counted_from_the_end_that_tells(tmp_path: Path, function: str) -> None:
    rig = Rig(tmp_path, gpus("none", "none", topology="nvlink-pairs"))
    rig.nvml.failing[function, 0] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert numbered(rig.source.look().links) == {(0, 1): ("nvlink", 4)}


def test_links_that_are_down_do_not_count(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpus("none", "none", topology="nvlink-pairs"))
    rig.simulated.nvmlDeviceGetNvLinkState = lambda handle, link: int(link in (1, 3))  # type: ignore[method-assign]
    assert numbered(rig.source.look().links) == {(0, 1): ("nvlink", 2)}


def test_links_to_what_is_neither_gpu_nor_switch_do_not_count(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpus("none", "none", topology="nvswitch"))
    rig.simulated.nvmlDeviceGetNvLinkRemoteDeviceType = (  # type: ignore[method-assign]
        lambda handle, link: pynvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU
    )
    assert numbered(rig.source.look().links) == {(0, 1): ("cross-cpu", 0)}


def test_what_failed_is_asked_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpus("none", "none", "none"))
    rig.nvml.failing["nvmlDeviceGetTopologyCommonAncestor", 1] = pynvml.NVML_ERROR_UNKNOWN
    assert set(numbered(rig.source.look().links)) == {(0, 1), (0, 2)}
    rig.nvml.failing.clear()
    assert set(numbered(rig.source.look().links)) == {(0, 1), (0, 2), (1, 2)}


def test_a_gpu_that_is_lost_meanwhile_costs_its_own_links_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpus("none", "none", "none"))
    told = rig.simulated.nvmlDeviceGetTopologyCommonAncestor

    def lost(one: Any, other: Any) -> int:
        if other.number == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)  # type: ignore[no-untyped-call]
        return told(one, other)

    rig.simulated.nvmlDeviceGetTopologyCommonAncestor = lost  # type: ignore[method-assign]
    assert set(numbered(rig.source.look().links)) == {(0, 2), (1, 2)}
