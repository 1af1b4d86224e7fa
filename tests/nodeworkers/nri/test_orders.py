"""The node's side of seat-init: what a container gets of it, its orders, and who else is in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeworkers.nri import seat_init
from nodeworkers.nri.values import Container


def test_a_container_gets_both_mounts_and_its_command_line_behind(tmp_path: Path) -> None:
    container = Container("id", "pod", "server", args=("vllm", "serve"))
    adjustment = seat_init.behind(container, tmp_path / "seat-init", tmp_path / "orders")
    assert adjustment.args == (seat_init.INSIDE, seat_init.ORDERS_INSIDE, "vllm", "serve")
    assert [(mount.host, mount.container, mount.read_only) for mount in adjustment.mounts] == [
        (str(tmp_path / "seat-init"), seat_init.INSIDE, True),
        (str(tmp_path / "orders"), seat_init.ORDERS_INSIDE, True),
    ]
    again = seat_init.behind(Container("id", "pod", "server", args=adjustment.args), tmp_path, tmp_path)
    assert again.args == adjustment.args


@pytest.mark.parametrize("grace", [-1, seat_init.MOST_GRACE + 1])
def test_a_grace_that_cannot_be_is_refused(tmp_path: Path, grace: int) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        seat_init.down(tmp_path, grace)
    assert not (tmp_path / "order").exists()


def test_orders_can_be_read_by_every_user(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        seat_init.run(tmp_path / "slots" / "id")
    finally:
        os.umask(before)
    assert (tmp_path / "slots" / "id").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "slots" / "id" / "order").stat().st_mode & 0o777 == 0o644


def process(proc: Path, pid: int, cgroups: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(cgroups)


def test_others_are_those_of_the_container_by_all_of_its_cgroups(tmp_path: Path) -> None:
    process(tmp_path, 10, "4:memory:/pods/a\n3:cpu:/pods/a\n2:freezer:/\n0::/\n")
    process(tmp_path, 11, "4:memory:/pods/a\n3:cpu:/pods/a\n2:freezer:/\n0::/\n")
    process(tmp_path, 9, "4:memory:/pods/a/inner\n3:cpu:/pods/a\n2:freezer:/x\n0::/\n")
    process(tmp_path, 12, "4:memory:/pods/ab\n3:cpu:/pods/ab\n2:freezer:/\n0::/\n")
    process(tmp_path, 13, "4:memory:/pods/b\n3:cpu:/pods/a\n2:freezer:/\n0::/\n")
    (tmp_path / "14").mkdir()  # it ended meanwhile
    (tmp_path / "self").mkdir()
    assert seat_init.others(10, tmp_path) == (9, 11)
    with pytest.raises(ProcessLookupError, match="no process has the pid 99"):
        seat_init.others(99, tmp_path)


def test_nothing_is_told_of_a_process_without_a_cgroup(tmp_path: Path) -> None:
    process(tmp_path, 10, "0::/\n")
    with pytest.raises(ProcessLookupError, match="no cgroup"):
        seat_init.others(10, tmp_path)
