"""A pod's Python with berth's listener on its path, and a Triton that compiles nothing but tells its listener."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from nodeworkers import listener
from nodeworkers.csi.reports import make_room

# As Triton 3.4 and newer: an attribute of a class, called with keywords after each kernel.
KNOBS = """
class compilation_knobs:
    listener = None
compilation = compilation_knobs()
"""
TRITON = """
import os
from . import knobs
class Times:
    def __init__(self, total): self.total = total
def find(path):
    tell(path, 40, True)
def compile(path, microseconds=1500):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "w") as file:
        file.write("{}")
    os.replace(path + ".new", path)
    tell(path, microseconds, False)
def tell(path, microseconds, hit):
    listener = knobs.compilation.listener
    if listener:
        group = {"k.cubin": os.path.join(os.path.dirname(path), "k.cubin"), "k.json": path}
        listener(src=None, metadata={}, metadata_group=group, times=Times(microseconds), cache_hit=hit)
"""


def mount_at(folder: Path) -> Path:
    """A folder as a pod has it mounted: two kernels of the cache's, berth's module, and a place for reports."""
    for name in ("OLD1", "OLD2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "k.json").write_text("{}")
    make_room(folder)
    shutil.copytree(Path(listener.__file__).parent / "python", folder / listener.PYTHON)
    return folder


def fake_triton(site: Path, knobs: str | None = KNOBS) -> Path:
    """A folder with the package; None makes it one of before there were knobs."""
    (site / "triton").mkdir(parents=True)
    text = TRITON if knobs is not None else TRITON.replace("from . import knobs", "class knobs: compilation = None")
    (site / "triton" / "__init__.py").write_text(text)
    if knobs is not None:
        (site / "triton" / "knobs.py").write_text(knobs)
    return site


def run(script: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """What a pod runs, with PYTHONPATH as given; it must end well and complain of nothing."""
    command = [sys.executable, "-B", "-W", "error", "-c", script]
    done = subprocess.run(command, env=environment(*path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done


def environment(*path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, path))}


def told(mount: Path) -> list[tuple[int, int, int]]:
    """What the reports in a mount say: hits, misses, microseconds of each."""
    found = [json.loads(path.read_text()) for path in (mount / ".berth" / "reports").glob("*.json")]
    return sorted((each["hits"], each["misses"], each["compile_microseconds"]) for each in found)
