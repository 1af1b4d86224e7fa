"""The numbers by which it is decided whether a seat may be parked, from simulated and from this machine's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.seats.cgroups import Cgroup, CgroupError, of_container, usage
from nodeworkers.seats.limits import LimitsError, levels, node_memory
from planning.seats.host_memory import Level, NumaNode, Parking, refusal
from tests.nodeworkers.seats.simulated_cri import UID, Node

GIB = 2**30
ID = "a" * 64


def container(folder: Path, unified: bool, path: str = Node.path(ID)) -> tuple[Node, Cgroup]:
    node = Node(folder, unified)
    node.group(path, 11)
    node.process(11, path)
    return node, of_container(11, ID, node.proc, node.mounted)


@pytest.mark.parametrize("unified", [True, False], ids=["cgroup v2", "cgroup v1"])
def test_the_limits_of_a_container_and_of_what_it_is_in_are_read(tmp_path: Path, unified: bool) -> None:
    node, cgroup = container(tmp_path, unified)
    node.memory(node.path(ID), 80 * GIB, 5 * GIB, idle=GIB)
    node.memory(f"/kubepods/pod{UID}", None, 6 * GIB)
    node.memory("/kubepods", 100 * GIB, 90 * GIB)
    assert levels(cgroup, UID) == (
        Level("container", 80 * GIB, 4 * GIB),
        Level("pod", None, 6 * GIB),
        Level("control group /kubepods", 100 * GIB, 90 * GIB),
    )
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:    {400 * 2**20} kB\n")
    told = refusal(Parking("s1", 40 * GIB, levels=levels(cgroup, UID)), node_memory(node.proc, tmp_path / "sys"))
    assert "the control group /kubepods has 90 GiB in use and a limit of 100 GiB" in told


def test_a_slice_of_systemd_is_a_pods(tmp_path: Path) -> None:
    pod = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a0a_1.slice"
    node, cgroup = container(tmp_path, True, f"{pod}/cri-containerd-{ID}.scope")
    node.memory(f"{pod}/cri-containerd-{ID}.scope", GIB, 5)
    node.memory(pod, 2 * GIB, 6)
    assert [each.name for each in levels(cgroup, UID)] == ["container", "pod"]


def test_more_idle_pages_than_are_used_count_as_nothing_used(tmp_path: Path) -> None:
    node, cgroup = container(tmp_path, True)
    node.memory(node.path(ID), None, 5, idle=9)
    assert levels(cgroup)[0] == Level("container", None, 0)


def test_a_container_that_is_gone_has_no_limits(tmp_path: Path) -> None:
    _, cgroup = container(tmp_path, True)
    with pytest.raises(LimitsError, match="has no memory that is counted, or is gone"):
        levels(cgroup)


@pytest.mark.parametrize("text", ["", "-", "many", "1e9", "max max", "1 2"])
def test_numbers_that_are_none_are_told(tmp_path: Path, text: str) -> None:
    node, cgroup = container(tmp_path, True)
    node.memory(node.path(ID), 1, 1)
    (cgroup.folder / "memory.max").write_text(text)
    with pytest.raises(CgroupError, match=r"memory\.max or the files beside it have no numbers"):
        levels(cgroup)


@given(texts=st.lists(st.binary(max_size=80), min_size=3, max_size=3), unified=st.booleans())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_in_these_files_are_told_or_make_sense(tmp_path: Path, texts: list[bytes], unified: bool) -> None:
    names = (
        ("memory.max", "memory.current", "memory.stat")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    )
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_bytes(text)
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc" / "meminfo").write_bytes(texts[0])
    try:
        found = usage(tmp_path, unified)
        assert found is not None and found.used >= 0 and found.idle >= 0
    except CgroupError:
        pass
    with pytest.raises(LimitsError):
        node_memory(tmp_path / "proc", tmp_path)


def test_a_container_in_another_namespace_is_told(tmp_path: Path) -> None:
    node, _ = container(tmp_path, True)
    node.process(12, f"/../../kubepods/{ID}")
    with pytest.raises(CgroupError, match="seen from a namespace of cgroups"):
        of_container(12, ID, node.proc, node.mounted)
    node.process(13, f"/elsewhere/{ID}")
    with pytest.raises(CgroupError, match="needs the host's"):
        of_container(13, ID, node.proc, node.mounted)


def test_the_memory_of_numa_nodes_is_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       100 kB\nMemFree:  1 kB\nMemAvailable:   50 kB\n")
    for number, free in ((0, 10), (1, 20), (10, 30)):
        place = tmp_path / "devices" / "system" / "node" / f"node{number}"
        place.mkdir(parents=True)
        (place / "meminfo").write_text(
            f"Node {number} MemTotal:  99 kB\nNode {number} MemFree:  {free} kB\n"
            f"Node {number} Active(file):  77 kB\nNode {number} Inactive(file):  2 kB\n"
        )
    (tmp_path / "devices" / "system" / "node" / "node7").mkdir()  # its file is not there
    found = node_memory(tmp_path, tmp_path)
    assert found.available == 50 * 1024
    assert found.numa == (NumaNode(0, 12 * 1024), NumaNode(1, 22 * 1024), NumaNode(10, 32 * 1024))


def test_this_machine_tells_its_memory() -> None:
    found = node_memory()
    assert 2**20 < found.available < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert all(0 <= each.available < 2**50 for each in found.numa)
