"""The peer: builds Kueue's own performance harness from its pinned module, runs it and reads what it measured.

The harness starts etcd and kube-apiserver itself (envtest) and runs `minimalkueue`, Kueue's core controllers and its
scheduler, against them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kueue.load import BASELINE, Load
from benchmarks.kueue.outcome import Outcome, Usage
from benchmarks.report import progress
from berth.demo import measure
from kube.errors import KubeError
from stack import Lines, StackError
from stack.build import build_environment
from stack.golang import Go, find_go, required_version
from stack.paths import cache_root, locked

MODULE = Path(__file__).parent / "module"
KUEUE = "sigs.k8s.io/kueue"
HARNESS = "test/performance/scheduler"
RUNNER, LIMITED, UNLIMITED = "runner", "minimalkueue", "minimalkueue-unlimited"
# The rate is fixed in the program: another needs another program.
RATE = "kubeConfig.QPS = 50\n"
NO_RATE = "kubeConfig.QPS = -1\n"
# Every look at the API server's metrics costs it some milliseconds.
WRITES_EVERY = 2.0


@dataclass(frozen=True, slots=True)
class Harness:
    """`programs`: the folder of what was built. `source`: Kueue's module, which holds its CRDs and configurations."""

    programs: Path
    source: Path


def build() -> Harness:
    """Builds the harness, or finds it built. The first time takes minutes and needs the network; raises StackError."""
    cache = cache_root()
    go = find_go(required_version(MODULE / "go.mod"), cache, Lines())
    source = Path(json.loads(_go(go, cache, "mod", "download", "-json", KUEUE))["Dir"])
    digest = hashlib.sha256()
    for part in ((MODULE / "go.mod").read_bytes(), (MODULE / "go.sum").read_bytes(), NO_RATE.encode()):
        digest.update(part)
    programs = cache / "tools" / f"kueue-{digest.hexdigest()[:12]}"
    with locked(
        cache / "tools" / ".kueue.lock", lambda: progress("waiting for another run that builds Kueue's harness")
    ):
        if not (programs / UNLIMITED).is_file():
            progress("building Kueue's performance harness, once; that takes minutes …")
            package = f"{KUEUE}/{HARNESS}"
            _go(go, cache, "build", "-trimpath", "-o", f"{programs}/", f"{package}/{RUNNER}", f"{package}/{LIMITED}")
            with tempfile.TemporaryDirectory() as folder:
                changed = Path(folder)
                for name in ("go.mod", "go.sum"):
                    shutil.copy(MODULE / name, changed)
                theirs = (source / HARNESS / LIMITED / "main.go").read_text()
                (changed / "main.go").write_text(without_limit(theirs))
                _go(go, cache, "build", "-trimpath", "-o", str(programs / UNLIMITED), ".", cwd=changed)
    return Harness(programs, source)


def without_limit(program: str) -> str:
    """client-go does not limit where QPS is below zero."""
    if program.count(RATE) != 1:
        raise StackError(
            f"minimalkueue does not set {RATE.strip()!r}.", "Look at its main.go: the harness has changed."
        )
    return program.replace(RATE, NO_RATE)


def _go(go: Go, cache: Path, *arguments: str, cwd: Path = MODULE) -> str:
    result = subprocess.run(
        [str(go.path), *arguments],
        cwd=cwd,
        env=build_environment(cache) | go.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        tail = "\n".join(result.stderr.splitlines()[-15:])
        raise StackError(f"go {' '.join(arguments[:2])} failed in {cwd}:\n{tail}", "A first build needs the network.")
    return result.stdout


def check_baseline(harness: Harness) -> None:
    """Raises StackError where `BASELINE` is not what this version of Kueue calls its baseline."""
    theirs = yaml.safe_load((harness.source / HARNESS / "configs" / "baseline" / "generator.yaml").read_text())
    if theirs != BASELINE.generator():
        raise StackError(
            f"Kueue's baseline has changed: {json.dumps(theirs)}", "Change BASELINE in benchmarks/kueue/load.py."
        )


def run(harness: Harness, load: Load, folder: Path, assets: Path, *, limited: bool, timeout: float) -> Outcome:
    """One run of the harness in `folder`. `assets`: a folder of etcd and kube-apiserver."""
    program = LIMITED if limited else UNLIMITED
    config = folder / "generator.yaml"
    config.write_text(yaml.safe_dump(load.generator(), sort_keys=False))
    with (folder / "runner.log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(harness.programs / RUNNER),
                f"--o={folder}",
                f"--crds={harness.source / 'config' / 'components' / 'crd' / 'bases'}",
                f"--generatorConfig={config}",
                f"--minimalKueue={harness.programs / program}",
                f"--timeout={timeout:.0f}s",
            ],
            cwd=folder,
            env=os.environ | {"KUBEBUILDER_ASSETS": str(assets), "PROJECT_DIR": str(harness.source / "project")},
            stdout=log,
            stderr=log,
        )
        try:
            usage, writes = asyncio.run(_watched(process, folder / "kubeconfig", program))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    if process.returncode != 0:
        tail = "\n".join((folder / "runner.log").read_text(errors="replace").splitlines()[-15:])
        raise StackError(f"Kueue's harness ended with code {process.returncode}:\n{tail}")
    stats, summary = (yaml.safe_load((folder / name).read_text()) for name in (f"{program}.stats.yaml", "summary.yaml"))
    return outcome(stats, summary, usage, writes)


async def _watched(process: subprocess.Popen[bytes], kubeconfig: Path, program: str) -> tuple[Usage, Mapping[str, int]]:
    """Samples until the harness ends and takes its API server along: so the writes are those of seconds before."""
    usage = Usage(lambda: _family(process.pid, program), frozenset({"minimalkueue"}))
    before: Counter[measure.Request] | None = None
    after: Counter[measure.Request] = Counter()
    looked = 0.0
    while process.poll() is None:
        usage.sample()
        if usage.cpu and time.monotonic() - looked >= WRITES_EVERY:
            with suppress(KubeError, OSError, ValueError):
                after = await measure.api_writes(kubeconfig)
                before = after if before is None else before
            looked = time.monotonic()
        await asyncio.sleep(0.5)
    return usage, measure.writes_between(before or Counter(), after)


def _family(runner: int, program: str) -> dict[str, int]:
    """The harness' processes by name, once Kueue itself is among them."""
    found = {"runner": runner}
    with suppress(OSError):
        for thread in Path(f"/proc/{runner}/task").iterdir():  # any of them may have started a process
            for pid in (thread / "children").read_text().split():
                name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
                found[Path(name).name] = int(pid)
    if program not in found:
        return {}
    found["minimalkueue"] = found.pop(program)
    return found


def outcome(stats: Mapping[str, Any], summary: Mapping[str, Any], usage: Usage, writes: Mapping[str, int]) -> Outcome:
    """The harness' own figures, and beside them what was sampled."""
    classes = summary["workloadClasses"]
    cpu = usage.cpu | {"minimalkueue": (stats["userMs"] + stats["sysMs"]) / 1000}
    return Outcome(
        workloads=sum(each["count"] for each in classes.values()),
        wall=stats["wallMs"] / 1000,
        admission={name: each["averageTimeToAdmissionMs"] / 1000 for name, each in classes.items()},
        writes=writes,
        cpu=cpu,
        memory=usage.memory,
        durable_memory=stats["maxrss"] * 1024,
        evictions=sum(each["totalEvictions"] for each in classes.values()),
    )
