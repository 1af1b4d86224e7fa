"""The kernel's table of mounts, and the paths that a kubelet may name: read as they are, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.csi import mounts
from nodeworkers.csi.mounts import MountPoint
from nodeworkers.csi.targets import TargetError, target_of

ROOT = Path("/var/lib/kubelet")


def test_the_table_is_read_with_its_escapes_and_optional_fields() -> None:
    table = (
        rb"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 propagate_from:2 - ext3 /dev/root rw,errors=continue"
        b"\n"
        rb"66 43 0:40 / /var/lib/kubelet/pods/p/mount rw,nosuid - overlay csi.tkm.io/csi-1?a=b%20c rw,lowerdir=/a:/b"
        b"\n"
        b"nonsense\n36 35 98:0 / /x rw\n"
    )
    assert mounts.parse(table) == [
        MountPoint("/mnt 2", "ext3", "/dev/root", "rw,errors=continue"),
        MountPoint("/var/lib/kubelet/pods/p/mount", "overlay", "csi.tkm.io/csi-1?a=b%20c", "rw,lowerdir=/a:/b"),
    ]


@given(st.binary(max_size=400))
def test_any_table_is_read_without_complaint(table: bytes) -> None:
    for point in mounts.parse(table):
        assert point.place is not None


def test_this_machines_own_table_is_read_whole() -> None:
    table = mounts.TABLE.read_bytes()
    assert len(mounts.parse(table)) == len(table.splitlines())
    assert mounts.here(["/"])[0].place == "/"
    below = mounts.here(below="/proc")
    assert all(point.place.startswith("/proc/") for point in below)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "relative/pods/p/volumes/kubernetes.io~csi/v/mount",
        "/var/lib/kubelet",
        "/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/v",
        "/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/v/mount/",
        "/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/../mount",
        "/var/lib/kubelet/pods/../volumes/kubernetes.io~csi/v/mount",
        "/var/lib/kubelet/pods//volumes/kubernetes.io~csi/v/mount",
        "/var/lib/kubelet/pods/p/volumes/kubernetes.io~empty-dir/v/mount",
        "/var/lib/kubelet2/pods/p/volumes/kubernetes.io~csi/v/mount",
        "/var/lib/kubelet/../kubelet/pods/p/volumes/kubernetes.io~csi/v/mount",
        "/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/v\n/mount",
        "/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/v\0/mount",
        "/etc",
    ],
)
def test_only_a_kubelets_place_for_a_volume_is_a_target(path: str) -> None:
    with pytest.raises(TargetError, match="is none that the kubelet with the root /var/lib/kubelet gives"):
        target_of(ROOT, path)


@given(
    st.text(max_size=300) | st.lists(st.sampled_from(["pods", "..", "p", "volumes", "mount", "", "a:b"])).map("/".join)
)
def test_no_path_leads_out_of_the_kubelets_pods(path: str) -> None:
    for tried in (path, f"/var/lib/kubelet/{path}"):
        try:
            target = target_of(ROOT, tried)
        except TargetError:
            continue
        assert target.path == tried
        assert Path(target.path).resolve().is_relative_to(ROOT / "pods")


def test_a_folder_is_reached_through_plain_folders_only(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "kubelet", tmp_path / "elsewhere"
    (root / "pods" / "p" / "volumes").mkdir(parents=True)
    (elsewhere / "v" / "mount").mkdir(parents=True)
    (root / "pods" / "p" / "volumes" / "kubernetes.io~csi").symlink_to(elsewhere)
    target = target_of(root, f"{root}/pods/p/volumes/kubernetes.io~csi/v/mount")
    with pytest.raises(TargetError, match=r"kubernetes.io~csi is no folder of the kubelet's"), target.created():
        pass
    target.remove()
    assert (elsewhere / "v" / "mount").is_dir()


def test_a_link_in_the_targets_own_place_is_not_followed(tmp_path: Path) -> None:
    parent = tmp_path / "pods" / "p" / "volumes" / "kubernetes.io~csi" / "v"
    parent.mkdir(parents=True)
    (parent / "mount").symlink_to("/etc")
    target = target_of(tmp_path, f"{parent}/mount")
    with pytest.raises(TargetError, match="mount is no folder"), target.created():
        pass


def test_a_target_is_made_once_and_removed_when_empty(tmp_path: Path) -> None:
    parent = tmp_path / "pods" / "p" / "volumes" / "kubernetes.io~csi" / "v"
    parent.mkdir(parents=True)
    target = target_of(tmp_path, f"{parent}/mount")
    assert target.absent()
    for first in (True, False):
        with target.created() as (place, made):
            assert Path(place).is_dir() and made is first
    assert not target.absent()
    (parent / "mount" / "file").touch()
    with pytest.raises(OSError, match="not empty"):
        target.remove()
    (parent / "mount" / "file").unlink()
    target.remove()
    target.remove()
    assert not (parent / "mount").exists()
