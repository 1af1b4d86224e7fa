"""From a kernel found in a mounted cache to the node's count of it: real mounts, pods' Pythons, and real kernels by
Triton 3.9.0.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nodeworkers.csi.export import Compiled, compiled
from nodeworkers.csi.volumes import Refused, Volumes
from nodeworkers.listener import OURS, lay_out
from planning.caches.hits import Seen
from tests.nodeworkers.csi_rig import CACHE, CAPTURED, DIGEST, Rig, needs_mounts, request, rig_in
from tests.nodeworkers.pod_python import fake_triton, run, told
from tests.nodeworkers.triton_python import triton_python

pytestmark = needs_mounts

DATA = Path(__file__).parents[1] / "images" / "data"
KEY = (CACHE.uid, DIGEST)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Where somebody who is not root reaches a pod's folder; pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="berth-test-") as folder:
        os.chmod(folder, 0o755)
        with rig_in(Path(folder)) as made:
            yield made


@pytest.fixture
def volumes(rig: Rig) -> Iterator[Volumes]:
    opened = rig.open()
    opened.offered = lay_out(rig.folder / "listener")
    yield opened
    opened.ledger.close()


@pytest.mark.parametrize("user", [0, 1234])
def test_what_a_pod_finds_is_counted_and_outlives_it(user: int, rig: Rig, volumes: Volumes, tmp_path: Path) -> None:
    rig.store.add(DIGEST, {"OLD/k.json": b"{}"})
    target, site = rig.target(), fake_triton(tmp_path / "site")
    volumes.publish("csi-1", target, request(), None)
    path, begin = (Path(target, ".berth/python"), site), f"import os, triton; os.setgid({user}); os.setuid({user})"
    script = f"""
{begin}
triton.find("{target}/OLD/k.json")
triton.compile("{target}/NEW/k.json", 250_000)
triton.find("{target}/NEW/k.json")
"""
    run(script, *path)
    assert told(Path(target)) == [(1, 1, 250_000)]
    volumes.reports.look()
    assert volumes.ledger.seen() == {KEY: Seen(1, 1, 0.25)}
    record = volumes.ledger.mount("csi-1")
    assert record is not None and compiled(Path(record.upper)) == [Compiled("NEW/k.json", 2)], "reports are no kernels"
    run(f'{begin}; triton.find("{target}/OLD/k.json")', *path)
    volumes.unpublish("csi-1", target)
    assert volumes.ledger.seen() == {KEY: Seen(2, 1, 0.25)}, "the last words were read before the layer went"
    assert volumes.ledger.seen_by_volume() == {} and rig.left() == []


def test_nobody_but_root_changes_the_module_and_nobody_anothers_report(rig: Rig, volumes: Volumes) -> None:
    target = rig.target()
    volumes.publish("csi-1", target, request(), None)
    report = Path(target, ".berth/reports/another.json")
    report.write_text("{}")
    for script in (
        "echo x >> .berth/python/sitecustomize.py", "touch .berth/python/os.py", "rm -r .berth/python",
        "mv .berth mine", "rm .berth/reports/another.json", "touch .berth/mounted",
    ):  # fmt: skip
        done = subprocess.run(["sh", "-c", script], cwd=target, user=1234, group=1234, capture_output=True, check=False)
        assert done.returncode != 0, script
    assert report.exists()


@pytest.mark.parametrize("read_only", [False, True])
def test_an_image_cannot_put_anything_into_berths_folder(read_only: bool, rig: Rig, volumes: Volumes) -> None:
    hostile: Mapping[str, bytes] = {
        ".berth/python/sitecustomize.py": b"raise SystemExit('theirs')", ".berth/python/json.py": b"evil",
        ".berth/reports/forged.json": b'{"hits": 9, "misses": 0, "compile_microseconds": 0}',
    }  # fmt: skip
    rig.store.add(DIGEST, hostile)
    target = rig.target()
    volumes.publish("csi-1", target, request(read_only=read_only), None)
    found = sorted(str(path.relative_to(target)) for path in Path(target, OURS).rglob("*"))
    modules = [".berth/python", ".berth/python/berth_triton_listener.py", ".berth/python/sitecustomize.py"]
    assert found == (modules if read_only else sorted([*modules, ".berth/mounted", ".berth/reports"]))
    run("import json; json.dumps(1)", Path(target, ".berth/python"))
    volumes.reports.look()
    assert volumes.ledger.seen() == {}


def test_without_a_layer_to_lay_above_it_such_an_image_is_refused(rig: Rig, volumes: Volumes) -> None:
    volumes.offered = None
    volumes.publish("csi-1", rig.target(), request(), None)
    rig.store.add(DIGEST, {".berth/python/json.py": b"evil"})
    with pytest.raises(Refused, match=r"brings a folder \.berth, which is berth's own"):
        volumes.publish("csi-2", rig.target("pod-2"), request("pod-2"), None)


def test_a_read_only_volume_runs_the_module_and_says_nothing(rig: Rig, volumes: Volumes, tmp_path: Path) -> None:
    rig.store.add(DIGEST, {"OLD/k.json": b"{}"})
    target = rig.target()
    volumes.publish("csi-1", target, request(read_only=True), None)
    script = f'import sys, triton; triton.find("{target}/OLD/k.json"); print("berth_triton_listener" in sys.modules)'
    assert run(script, Path(target, ".berth/python"), fake_triton(tmp_path / "site")).stdout == "True\n"
    volumes.reports.look()
    assert volumes.ledger.seen() == {}


def test_the_layer_is_made_whole_again_and_old_ones_go_once_nobody_has_them(rig: Rig, volumes: Volumes) -> None:
    folder, layer = rig.folder / "listener", volumes.offered
    assert layer is not None and lay_out(folder) == layer
    volumes.publish("csi-1", rig.target(), request(), None)
    older = folder / "of-an-older-berth"
    layer.rename(older)  # the mount's table goes on naming the folder as it was mounted
    made = lay_out(folder)
    assert made == layer and not older.exists()
    (layer / ".berth/python/sitecustomize.py").write_text("half")
    (folder / "new").mkdir()
    assert lay_out(folder) == layer and "half" not in (layer / ".berth/python/sitecustomize.py").read_text()
    used = folder / ("0" * 32)
    shutil.copytree(layer, used)
    volumes.offered = used
    target = rig.target("pod-2")
    volumes.publish("csi-2", target, request("pod-2"), None)
    lay_out(folder)
    assert sorted(folder.iterdir()) == sorted([used, layer])
    volumes.unpublish("csi-2", target)
    lay_out(folder)
    assert sorted(folder.iterdir()) == [layer]


def test_real_triton_is_counted_as_it_counts_itself(rig: Rig, volumes: Volumes, tmp_path: Path) -> None:
    """Four kernels of the cache are found; two for another GPU are compiled, and then found where the pod left them."""
    python, target = triton_python(), rig.target()
    packed = DATA / "triton-3.9.0"
    files = {str(path.relative_to(packed)): path.read_bytes() for path in packed.rglob("*") if path.is_file()}
    rig.store.add(
        DIGEST,
        {name: body.replace(CAPTURED.encode(), target.encode()) if "__grp__" in name else body
         for name, body in files.items()},
    )  # fmt: skip
    volumes.publish("csi-1", target, request(), None)
    code = re.search(r"```python\n(.*?)```", (DATA / "README.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "kernels.py").write_text(code[1])
    (tmp_path / "more.py").write_text(code[1].replace('GPUTarget("cuda", 90, 32)', 'GPUTarget("cuda", 80, 32)'))
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": f"{target}/.berth/python", "TRITON_CACHE_DIR": target,
        "TRITON_STORE_BINARY_ONLY": "1", "TRITON_DISABLE_LINE_INFO": "1",
    }  # fmt: skip

    def runs(name: str) -> list[bool]:
        """What the script's own listener, which knows nothing of ours, saw."""
        done = subprocess.run([python, tmp_path / name], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return list(ast.literal_eval(done.stdout.strip()))

    assert runs("kernels.py") == [True] * 4
    assert told(Path(target)) == [(4, 0, 0)]
    assert runs("more.py") == [False, False, True, True]
    assert runs("more.py") == [True] * 4
    reports = told(Path(target))
    assert [each[:2] for each in reports] == [(2, 0), (2, 2), (4, 0)]
    assert reports[1][2] > 1000, "microseconds of two kernels"
    volumes.unpublish("csi-1", target)
    assert volumes.ledger.seen() == {KEY: Seen(8, 2, reports[1][2] / 1e6)}
