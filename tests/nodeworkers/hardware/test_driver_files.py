"""The driver's files are the host's, wherever its root is to be seen, of the driver that runs, and never others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.hardware.driver_files import driver_files, resolved
from planning.devices.cdi import DriverFiles

LIB = "usr/lib/x86_64-linux-gnu"
VERSION = "580.65.06"


@dataclass
class Host:
    """A made-up host, with its root in a folder, and the node's own /dev and /sys."""

    folder: Path

    def __post_init__(self) -> None:
        self.root = self.folder / "host"
        self.node("nvidiactl")
        self.node("nvidia-uvm")
        self.runs(VERSION)

    def node(self, name: str) -> None:
        (self.folder / "dev").mkdir(exist_ok=True)
        (self.folder / "dev" / name).touch()

    def runs(self, version: str) -> None:
        folder = self.folder / "sys/module/nvidia"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version").write_text(f"{version}\n")

    def file(self, path: str, begin: bytes = b"\x7fELF\x02 and so on", mode: int = 0o644) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(begin)
        (self.root / path).chmod(mode)

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(target)

    def found(self) -> DriverFiles:
        return driver_files(self.root, self.folder / "dev", self.folder / "sys")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_paths_are_those_of_the_host_and_looked_up_below_its_root(host: Host) -> None:
    host.file(f"{LIB}/libcuda.so.{VERSION}")
    host.link(f"{LIB}/libcuda.so.1", f"libcuda.so.{VERSION}")
    host.file(f"{LIB}/libcudart.so.13")
    host.file("usr/bin/nvidia-smi", mode=0o755)
    host.file("usr/local/nvidia/toolkit/nvidia-cdi-hook", mode=0o755)
    host.file("usr/bin/nvidia-ctk", mode=0o755)
    found = host.found()
    assert found.nodes == (str(host.folder / "dev/nvidiactl"), str(host.folder / "dev/nvidia-uvm"))
    assert found.libraries == (
        ("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"),
        (f"/{LIB}/libcuda.so.{VERSION}", f"/{LIB}/libcuda.so.1"),
        (f"/{LIB}/libcuda.so.{VERSION}", f"/{LIB}/libcuda.so.{VERSION}"),
    )
    assert found.hook == "/usr/local/nvidia/toolkit/nvidia-cdi-hook"


def test_a_hook_that_cannot_be_run_is_none(host: Host) -> None:
    host.file("usr/bin/nvidia-cdi-hook")
    host.link("usr/bin/nvidia-ctk", "/nowhere")
    assert host.found().hook == ""


def test_links_lead_where_they_lead_on_the_host(host: Host) -> None:
    """As Debian has it: by /etc, and with absolute links; and a distribution whose /lib64 is a link."""
    host.file(f"{LIB}/nvidia/current/libcuda.so.{VERSION}")
    host.link("etc/alternatives/glx--libcuda.so.1", f"/{LIB}/nvidia/current/libcuda.so.{VERSION}")
    host.link(f"{LIB}/libcuda.so.1", "/etc/alternatives/glx--libcuda.so.1")
    host.file("usr/lib64/libnvidia-ml.so.1")
    host.file(f"usr/lib64/libnvcuvid.so.{VERSION}")
    host.link("lib64", "usr/lib64")
    host.link(f"{LIB}/libnvcuvid.so.1", f"../../../../../../../lib64/libnvcuvid.so.{VERSION}")
    pairs = {inside: path for path, inside in host.found().libraries}
    assert pairs[f"/{LIB}/libcuda.so.1"] == f"/{LIB}/nvidia/current/libcuda.so.{VERSION}"
    assert pairs[f"/{LIB}/libnvcuvid.so.1"] == f"/usr/lib64/libnvcuvid.so.{VERSION}"
    assert "/lib64/libnvcuvid.so." + VERSION not in pairs, "once is enough"


def test_nothing_outside_the_root_is_looked_at(host: Host, tmp_path: Path) -> None:
    """An absolute link of the host names a file of the host; here it may be another's."""
    mine = tmp_path / f"libcuda.so.{VERSION}"
    mine.write_bytes(b"\x7fELF\x02")
    host.link(f"{LIB}/libcuda.so.1", str(mine))
    up = "/".join([".."] * 30)
    host.link(f"{LIB}/libnvidia-ml.so.1", f"{up}{mine}")
    assert host.found().libraries == ()


@pytest.mark.parametrize("version", ["570.10", ""])
def test_they_are_those_of_the_driver_that_runs(host: Host, version: str) -> None:
    """What an update left, or has put there before its driver runs, is of no use."""
    host.file(f"usr/lib64/libcuda.so.{VERSION}")
    host.link("usr/lib64/libcuda.so.1", f"libcuda.so.{VERSION}")
    host.file(f"{LIB}/libcuda.so.570.10")
    host.link(f"{LIB}/libcuda.so.1", "libcuda.so.570.10")
    host.runs(version)
    pairs = {inside: path for path, inside in host.found().libraries}
    if version:
        assert pairs == dict.fromkeys(
            (f"/{LIB}/libcuda.so.1", f"/{LIB}/libcuda.so.570.10"), f"/{LIB}/libcuda.so.570.10"
        )
    else:
        assert f"/usr/lib64/libcuda.so.{VERSION}" in pairs, "one that does not tell has the first that is found"


def test_what_is_no_library_of_this_machine_is_left_out(host: Host) -> None:
    host.file(f"usr/lib64/libcuda.so.{VERSION}", b"\x7fELF\x01 of 32 bits")
    host.file(f"usr/lib64/libnvcuvid.so.{VERSION}", b"")
    (host.root / f"usr/lib64/libnvidia-cfg.so.{VERSION}").mkdir()
    os.mkfifo(host.root / f"usr/lib64/libnvidia-ml.so.{VERSION}")
    host.link("usr/lib64/libnvidia-opencl.so.1", "libnvidia-opencl.so.1")
    assert host.found().libraries == ()


def test_without_a_driver_or_a_root_there_is_nothing(host: Host, tmp_path: Path) -> None:
    assert driver_files(tmp_path / "none", tmp_path / "dev", tmp_path / "sys").libraries == ()
    assert driver_files(host.root, tmp_path / "none", tmp_path / "sys") == DriverFiles()


def test_what_the_hosts_loader_knows_comes_first(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.file(f"opt/nvidia/lib/libcuda.so.{VERSION}")
    host.file(f"usr/lib64/libcuda.so.{VERSION}")
    host.file("etc/ld.so.cache", b"")
    listing = f"\tlibcuda.so.{VERSION} (libc6,x86-64) => /opt/nvidia/lib/libcuda.so.{VERSION}\n\todd line\n"
    ldconfig = host.folder / "ldconfig"
    ldconfig.write_text(f"#!/bin/sh\n[ \"$3\" = {host.root}/etc/ld.so.cache ] && printf '%s' '{listing}'\n")
    ldconfig.chmod(0o755)
    monkeypatch.setattr("nodeworkers.hardware.driver_files._LDCONFIG", str(ldconfig))
    assert host.found().libraries == ((f"/opt/nvidia/lib/libcuda.so.{VERSION}",) * 2,)
    ldconfig.unlink()
    assert host.found().libraries == ((f"/usr/lib64/libcuda.so.{VERSION}",) * 2,)


def test_this_machines_own_can_be_looked_into() -> None:
    assert all(Path(host).is_file() for host, _ in driver_files().libraries)


_names = st.sampled_from(["a", "b", "c"])
_paths = st.lists(_names, min_size=1, max_size=3).map("/".join)
_targets = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=4).map("/".join)


@given(
    st.dictionaries(
        st.lists(_names, min_size=1, max_size=3).map("/".join), st.none() | _targets | _targets.map("/".__add__)
    ),
    st.lists(st.sampled_from(["a", "b", "c", "..", "."]), max_size=5).map("/".join),
)
def test_a_path_is_resolved_as_in_the_root_alone(
    tmp_path_factory: pytest.TempPathFactory, made: dict[str, str | None], asked: str
) -> None:
    """Whatever links there are, and loops: it ends, below the root, at something that is no link."""
    root = tmp_path_factory.mktemp("root")
    for path, target in made.items():
        place = root / path
        if not any(each.is_symlink() or each.is_file() for each in place.parents) and not os.path.lexists(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch() if target is None else place.symlink_to(target)
    found = resolved(str(root), f"/{asked}")
    if found:
        assert ".." not in found.split("/") and os.path.lexists(f"{root}{found}")
        assert os.path.realpath(f"{root}{found}") == os.path.realpath(root) + found.rstrip("/"), "a link is left"
