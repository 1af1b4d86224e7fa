"""`berth cache export`: from what a pod compiled to a folder that becomes an image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from berth.cli import command_line
from nodeworkers.csi.reports import make_room
from nodeworkers.ledger import Ledger
from tests.images import caches
from tests.nodeworkers.csi_rig import KERNEL, needs_mounts, request, rig_in
from tests.nodeworkers.test_mounted import MOUNT

AT = "/srv/kernels"


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command_line(), ["cache", *map(str, arguments)], env={"COLUMNS": "400"})


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A node on which pod team-a/b has two volumes of its own, and team-a/c one that is read-only."""
    ledger = Ledger(tmp_path / "berth")
    for number, seeds in enumerate((("one", "two"), ()), 1):
        upper = tmp_path / f"upper{number}"
        upper.mkdir()
        make_room(upper)
        for seed in seeds:
            caches.kernel(upper, seed, at=AT)
        ledger.put_mount(replace(MOUNT, volume_id=f"v{number}", upper=str(upper), mount_path=AT))
    ledger.put_mount(replace(MOUNT, volume_id="v3", pod_name="c", upper=""))
    ledger.put_mount(replace(MOUNT, volume_id="v4", pod_name="d", upper=str(tmp_path / "gone")))
    yield tmp_path / "berth"
    ledger.close()


def test_what_there_is_is_listed(root: Path) -> None:
    found = called("export", "--root", root, "--list")
    assert found.exit_code == 0, found.output
    size = sum(path.stat().st_size for path in (root.parent / "upper1").rglob("*") if path.is_file())
    lines = {line.split()[1]: line for line in found.output.splitlines()}
    assert f"8 files, {size:,} bytes" in lines["v1"] and "team-a/b" in lines["v1"] and "llama" in lines["v1"]
    assert "0 files, 0 bytes" in lines["v2"], "berth's own folder is no part of it"
    assert "mounted readOnly" in lines["v3"] and "cannot be seen from here" in found.output
    assert "v3" not in called("export", "--root", root, "--list", "--pod", "team-a/b").output
    assert "No such volume" in called("export", "--root", root, "--list", "--pod", "team-a/x").output


def test_an_export_is_a_folder_that_build_takes(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = called("export", "--root", root, "--pod", "team-a/b", "--volume", "v1", out)
    assert found.exit_code == 0 and "8 files" in found.output and "v1 of pod team-a/b" in found.output, found.output
    built = called("build", out, "--out", tmp_path / "image", "--json")
    assert built.exit_code == 0, built.output
    (told,) = json.loads(called("inspect", tmp_path / "image", "--json").output)
    assert told["extracted"]["kernels"] == 2 and told["capturePath"] == AT and told["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pod", "team-a/b"), "has 2 volumes of kernel caches: v1 (llama), v2 (llama). Say which with --volume."),
        (("--pod", "team-a/x"), "No volume of pod team-a/x is mounted on this node."),
        (("--pod", "team-a/b", "--volume", "v3"), "No volume of pod team-a/b with the id v3 is mounted"),
        ((), "--pod NAMESPACE/NAME"),
        (("--pod", "team-a/c"), "mounted readOnly"),
        (("--volume", "v4"), "cannot be seen from here"),
        (("--volume", "v1", "--most", "1Ki"), "has more than 1024 bytes"),
    ],
)
def test_refusals_are_sentences(root: Path, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    found = called("export", "--root", root, *arguments, tmp_path / "out")
    assert found.exit_code == 1 and words in " ".join(found.output.split()), found.output
    assert "error:" in found.output and "Traceback" not in found.output


def test_other_refusals(root: Path, tmp_path: Path) -> None:
    one = ("--pod", "team-a/b", "--volume", "v1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty" in called("export", "--root", root, *one, tmp_path / "full").output
    assert "File exists" in called("export", "--root", root, *one, tmp_path / "full" / "x").output
    assert "no ledger in" in " ".join(called("export", "--root", tmp_path, *one, tmp_path / "out").output.split())
    for wrong in (one, (*one, "--list", tmp_path / "out"), (*one, "--most", "much", tmp_path / "out")):
        assert called("export", "--root", root, *wrong).exit_code == 2


class TestMounted:
    pytestmark = needs_mounts

    def test_from_a_pod_that_compiles_to_an_image(self, tmp_path: Path) -> None:
        """The ledger is open for writing meanwhile, and the pod has the cache at a path of its own."""
        with rig_in(tmp_path) as rig:
            volumes = rig.open()
            target = rig.target()
            volumes.publish("csi-1", target, request(mount_path=AT), None)
            caches.kernel(Path(target), "new", at=AT)
            found = called("export", "--root", rig.folder, "--pod", "team-a/name-of-pod-1", tmp_path / "out")
            assert found.exit_code == 0, found.output
            assert not (tmp_path / "out" / KERNEL).exists() and not (tmp_path / "out" / ".berth").exists()
            assert called("build", tmp_path / "out", "--out", tmp_path / "image").exit_code == 0
            (told,) = json.loads(called("inspect", tmp_path / "image", "--json").output)
            assert told["extracted"]["kernels"] == 1 and told["capturePath"] == AT
            volumes.ledger.close()
