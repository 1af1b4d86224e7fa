"""Finds berth's own programs in Rust, or builds them from `native/` into berth's cache, as `tools.py` does for Go.

For whoever starts the seat proxy on this machine, and for its tests and benchmark. `python -m stack.native` builds all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from stack.errors import StackError
from stack.paths import cache_root, locked
from stack.proc import die_with_parent
from stack.progress import Lines, Progress, Silent

SOURCES = Path(__file__).parent.parent / "native"
PROGRAMS = ("seat-proxy", "quick-backend")


def fingerprint(sources: Path = SOURCES) -> str:
    """Names what a build depends on: our sources and the pinned crates."""
    digest = hashlib.sha256()
    for file in sorted(sources.rglob("*")):
        within = file.relative_to(sources)
        if file.is_file() and within.parts[0] != "target" and file.suffix in (".rs", ".toml", ".lock"):
            digest.update(str(within).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def variable(program: str) -> str:
    """The environment variable that names an explicit path."""
    return "BERTH_" + program.upper().replace("-", "_")


def find(program: str, cache: Path | None = None, sources: Path = SOURCES) -> Path | None:
    """A program that is there already: the one that a person named, or one built from these very sources.

    None if it would have to be built. Raises StackError where a person named what is no program.
    """
    named = os.environ.get(variable(program))
    if named:
        path = Path(named).expanduser().absolute()
        if not path.is_file() or not os.access(path, os.X_OK):
            raise StackError(
                f"The path given for {program}, {path}, is not a program.",
                f"Correct or unset {variable(program)}.",
            )
        return path
    path = _folder(cache or cache_root(), sources) / program
    return path if path.is_file() else None


def ensure(program: str, progress: Progress | None = None, cache: Path | None = None, sources: Path = SOURCES) -> Path:
    """Finds a program, or builds it with all others. Raises StackError, which says what is missing.

    A first build takes some minutes and the network; later ones take what has changed.
    """
    found = find(program, cache, sources)
    if found is not None:
        return found
    root, shown = cache or cache_root(), progress or Silent()
    with locked(root / "tools" / ".native.lock", lambda: shown.update(program, "waiting for another run")):
        found = find(program, cache, sources)
        if found is None:
            _build(_folder(root, sources), root, sources, shown)
            found = find(program, cache, sources)
    if found is None:
        raise StackError(f"{sources} builds no program called {program}.", f"Known: {', '.join(PROGRAMS)}.")
    return found


def _folder(cache: Path, sources: Path) -> Path:
    return cache / "tools" / f"native-{fingerprint(sources)}"


def cargo(sources: Path = SOURCES) -> str:
    """The cargo of this machine, of a version that the sources accept. Raises StackError."""
    manifest = sources / "Cargo.toml"
    if not manifest.is_file():
        raise StackError(
            f"The seat proxy cannot be built here, for its sources are not in {sources}.",
            f"Name a built one by {variable('seat-proxy')}=/path.",
        )
    least = re.search(r'^rust-version = "(\d+)\.(\d+)"', manifest.read_text(), re.MULTILINE)
    needed = (int(least[1]), int(least[2])) if least else (1, 0)
    found = shutil.which("cargo")
    version: tuple[int, int] = (0, 0)
    if found is not None:
        asked = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, cwd=sources)
        said = re.search(r"cargo (\d+)\.(\d+)", asked.stdout)
        version = (int(said[1]), int(said[2])) if said else version
    if found is None or version < needed:
        has = "there is no cargo" if found is None else f"cargo is {version[0]}.{version[1]}"
        raise StackError(
            f"The seat proxy is written in Rust and needs cargo {needed[0]}.{needed[1]} or newer, and {has} on PATH.",
            f"Install Rust (rustup does), or name a built proxy by {variable('seat-proxy')}=/path.",
        )
    return found


def _build(place: Path, cache: Path, sources: Path, progress: Progress) -> None:
    """Builds everything and moves it to its place at once, so that a half-written program is never seen."""
    started = time.monotonic()
    target = cache / "native"
    command = [cargo(sources), "build", "--release", "--locked", "--target-dir", str(target)]
    last: deque[str] = deque(maxlen=15)
    progress.update("native", "compiling (a first build downloads its crates)")
    process = subprocess.Popen(
        command,
        cwd=sources,
        env={**os.environ, "CARGO_TERM_COLOR": "never"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent,
    )
    with process:
        try:
            for line in process.stdout or ():
                last.append(line.rstrip())
                progress.update("native", line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        lines = "\n".join(f"  {line}" for line in last)
        raise StackError(
            f"Building the seat proxy from {sources} failed:\n{lines}",
            "A first build downloads crates, and needs the network or a registry that cargo is configured for.",
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-native-", dir=place.parent) as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        for program in PROGRAMS:
            shutil.copy2(target / "release" / program, built)
        os.replace(built, place)
    progress.finish("native", f"built in {time.monotonic() - started:.0f} s")


def main() -> int:
    """Builds all programs and says where they are."""
    try:
        for program in PROGRAMS:
            print(ensure(program, Lines()))
    except StackError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
