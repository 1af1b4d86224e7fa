"""The module that berth offers to pods, in Pythons of their own: what it counts, and that nobody notices it."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeworkers import listener
from tests.nodeworkers.pod_python import environment, fake_triton, mount_at, run, told

SOURCE = Path(listener.__file__).parent / "python"


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    return mount_at(tmp_path / "cache")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return fake_triton(tmp_path / "site")


def until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_kernels_of_the_cache_are_hits_and_compiled_ones_misses(mount: Path, site: Path, tmp_path: Path) -> None:
    script = f"""
import triton
triton.find("{mount}/OLD1/k.json")
triton.find("{mount}/OLD2/k.json")
triton.compile("{mount}/NEW/k.json", 2_000_000)
triton.find("{mount}/NEW/k.json")
triton.compile("{tmp_path}/elsewhere/k.json", 500_000)
triton.find("{tmp_path}/elsewhere/k.json")
"""
    run(script, mount / ".berth/python", site)
    assert told(mount) == [(2, 2, 2_500_000)], "what the pod compiled itself, or has elsewhere, is no hit of the cache"
    run(f'import triton; triton.find("{mount}/NEW/k.json"); triton.find("{mount}/OLD1/k.json")',
        mount / ".berth/python", site)  # fmt: skip
    assert told(mount) == [(1, 0, 0), (2, 2, 2_500_000)], "also when another process of the pod compiled it"
    assert [path.name for path in (mount / ".berth" / "reports").iterdir() if path.suffix != ".json"] == []


def test_the_mount_may_be_reached_by_a_link(mount: Path, site: Path, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(mount)
    run(f'import triton; triton.find("{tmp_path}/home/OLD1/k.json")', tmp_path / "home/.berth/python", site)
    assert told(mount) == [(1, 0, 0)]


def test_without_triton_nothing_is_loaded_or_written(mount: Path) -> None:
    script = (
        "import sys; print(sorted({'threading', 'typing', 'importlib.util'} & sys.modules.keys()), len(sys.meta_path))"
    )
    loaded, bare = run(script, mount / ".berth/python").stdout, run(script).stdout
    assert loaded.split("]")[0] == bare.split("]")[0] and told(mount) == []
    assert int(loaded.split()[-1]) == int(bare.split()[-1]) + 1


def test_listeners_of_the_application_are_called_whenever_they_are_set(mount: Path, site: Path) -> None:
    script = f"""
import sys, triton
knobs, heard = triton.knobs.compilation, []
assert not [each for each in sys.meta_path if hasattr(each, "berths_folders")]
class One:
    def __call__(self, **told): heard.append(("one", told["cache_hit"]))
knobs.listener = One()
triton.find("{mount}/OLD1/k.json")
previous = knobs.listener
def wraps(**told):
    heard.append("wraps")
    previous(**told)
knobs.listener = wraps
triton.compile("{mount}/NEW/k.json")
knobs.listener = One()
for _ in range(2000):  # as a context manager around each call does
    previous, knobs.listener = knobs.listener, wraps
    knobs.listener = previous
triton.find("{mount}/OLD1/k.json")
def fails(**told): raise ValueError("the application's")
knobs.listener = fails
try:
    triton.find("{mount}/OLD1/k.json")
except ValueError as error:
    heard.append(str(error))
knobs.listener = None
triton.find("{mount}/OLD1/k.json")
del knobs.listener
triton.find("{mount}/OLD1/k.json")
print(heard)
"""
    done = run(script, mount / ".berth/python", site)
    assert ast.literal_eval(done.stdout) == [
        ("one", True), "wraps", ("one", False), ("one", True), "the application's",
    ]  # fmt: skip
    assert told(mount) == [(5, 1, 1500)], "whoever wraps what it found calls it as well, for the same kernel"


@pytest.mark.parametrize(
    "knobs", [None, "class old_knobs: pass\ncompilation = old_knobs()", "", "raise ImportError('no libtriton')"]
)
def test_other_tritons_are_left_alone(knobs: str | None, mount: Path, tmp_path: Path) -> None:
    site = fake_triton(tmp_path / "site", knobs)
    script = "try:\n    import triton\n    print(triton.__name__)\nexcept ImportError as error: print(error)"
    assert run(script, mount / ".berth/python", site).stdout == run(script, site).stdout
    assert told(mount) == []


def test_what_triton_tells_otherwise_is_not_counted(mount: Path, site: Path) -> None:
    calls = "; ".join(
        f"triton.knobs.compilation.listener({arguments})"
        for arguments in (
            "", "1, 2", "cache_hit=True", "cache_hit=False, metadata_group={}, times=None",
            "cache_hit=False, metadata_group={'k.json': '/x'}, times=None",
        )
    )  # fmt: skip
    run(f'import triton; {calls}; triton.find("{mount}/OLD1/k.json")', mount / ".berth/python", site)
    assert told(mount) == [(1, 0, 0)]


def test_where_it_cannot_write_it_is_silent(mount: Path, site: Path, tmp_path: Path) -> None:
    (mount / ".berth" / "reports").rmdir()
    run(f'import triton; triton.find("{mount}/OLD1/k.json")', mount / ".berth/python", site)
    (mount / ".berth" / "reports").write_text("no folder")
    run(f'import triton; triton.find("{mount}/OLD1/k.json")', mount / ".berth/python", site)
    other = mount_at(tmp_path / "other")
    script = f'import triton; triton.find("{mount}/OLD1/k.json"); triton.find("{other}/OLD1/k.json")'
    run(script, mount / ".berth/python", other / ".berth/python", site)
    assert told(other) == [(1, 0, 0)]


def test_a_process_that_is_killed_has_told_all_but_its_last_second(mount: Path, site: Path) -> None:
    script = f"""
import sys, triton
for number in range(5):
    triton.compile("{mount}/NEW%d/k.json" % number, 1000)
print("done", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-B", "-c", script]
    process = subprocess.Popen(
        command, env=environment(mount / ".berth/python", site), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"done\n"
        assert told(mount) in ([(0, 1, 1000)], [(0, 5, 5000)]), "the first is told at once"
        until(lambda: told(mount) == [(0, 5, 5000)], "the rest was never told")
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_it_writes_once_a_second_at_most(mount: Path, site: Path) -> None:
    script = f"""
import os, triton
wrote, replace = [], os.replace
def counting(old, new):
    wrote.append("reports" in new)
    replace(old, new)
os.replace = counting
import berth_triton_listener as listener
clock = [100.0]
class time:
    monotonic = staticmethod(lambda: clock[0])
class Timer:
    def __init__(self, left, act): print("in", left)
    def start(self): pass
class threading: pass
threading.Timer = Timer
listener.time, listener.threading, listener._writer._next = time, threading, 0.0
for second in (0.0, 0.25, 0.5):
    clock[0] = 100 + second
    triton.find("{mount}/OLD1/k.json")
print(sum(wrote))
"""
    assert run(script, mount / ".berth/python", site).stdout == "in 0.75\n1\n"
    assert told(mount) == [(3, 0, 0)], "and at exit"


def test_a_forked_child_tells_its_own(mount: Path, site: Path) -> None:
    script = f"""
import os, sys, triton
triton.compile("{mount}/NEW/k.json", 1000)
child = os.fork()
triton.find("{mount}/OLD%d/k.json" % (1 if child else 2))
if child:
    assert os.waitpid(child, 0)[1] == 0
    triton.find("{mount}/OLD2/k.json")
"""
    run(script, mount / ".berth/python", site)
    assert told(mount) == [(1, 0, 0), (2, 1, 1000)]


def test_a_pod_may_have_several_caches(mount: Path, site: Path, tmp_path: Path) -> None:
    other = mount_at(tmp_path / "other")
    script = f"""
import triton
triton.find("{mount}/OLD1/k.json")
triton.find("{other}/OLD1/k.json")
triton.find("{other}/OLD2/k.json")
triton.compile("{other}/NEW/k.json", 7)
triton.compile("{tmp_path}/elsewhere/k.json", 100)
"""
    run(script, mount / ".berth/python", other / ".berth/python", site)
    assert told(mount) == [(1, 1, 100)] and told(other) == [(2, 2, 107)]


def test_the_sitecustomize_behind_it_is_run_as_if_it_were_alone(mount: Path, site: Path, tmp_path: Path) -> None:
    other = mount_at(tmp_path / "other")
    (site / "sitecustomize.py").write_text("import sys; sys.path.append('/added'); mine = 1\n")
    script = f"""
import sitecustomize, sys, triton
triton.find("{mount}/OLD1/k.json")
print(sitecustomize.__file__, sitecustomize.mine, sys.path[1:4] + sys.path[-1:])
"""
    first, second = mount / ".berth/python", other / ".berth/python"
    said = f"{site}/sitecustomize.py 1 {[str(first), str(second), str(site), '/added']}\n"
    assert run(script, first, second, site).stdout == said
    assert told(mount) == [(1, 0, 0)]


@pytest.mark.parametrize("wrong", ["raise ValueError('theirs')", "import nowhere"])
def test_what_the_sitecustomize_behind_it_raises_is_told_by_python(wrong: str, mount: Path, site: Path) -> None:
    (site / "sitecustomize.py").write_text(wrong)
    last = []
    for path in ((mount / ".berth/python", site), (site,)):
        command = [sys.executable, "-B", "-c", "print('runs')"]
        done = subprocess.run(command, env=environment(*path), capture_output=True, text=True, check=True)
        assert done.stdout == "runs\n"
        last.append(done.stderr.splitlines()[-1:])
    assert last[0] == last[1] != []


@pytest.mark.parametrize("name", ["sitecustomize.py", "berth_triton_listener.py"])
def test_it_is_python_3_8(name: str) -> None:
    ast.parse((SOURCE / name).read_text(), feature_version=(3, 8))
