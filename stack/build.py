"""Builds programs from the pinned Go modules: one `go build` per module, counted package by package.

For `Toolbox.ensure`. Go's own caches live in berth's cache, so that an interrupted build goes on where it stopped and a
second one needs no network. Two runs that need the same module wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from stack.errors import StackError
from stack.golang import Go, find_go, required_version
from stack.paths import locked
from stack.proc import die_with_parent
from stack.progress import Progress

if TYPE_CHECKING:
    from stack.tools import Tool, Toolbox

_PACKAGE = re.compile(r"[\w.~-]+(/[\w.~+-]+)*(\.test)?")


def build_environment(cache: Path) -> dict[str, str]:
    """The environment of every go command: pinned modules, no toolchain downloads, static programs.

    A person's own GOCACHE and GOMODCACHE are used where set; GOPROXY and the like pass through untouched.
    """
    return os.environ | {
        "GOCACHE": os.environ.get("GOCACHE") or str(cache / "go" / "build"),
        "GOMODCACHE": os.environ.get("GOMODCACHE") or str(cache / "go" / "mod"),
        "GOFLAGS": "-mod=readonly -buildvcs=false -modcacherw",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        "GO111MODULE": "on",
        "CGO_ENABLED": "0",
    }


def build_module(box: Toolbox, tools: list[Tool], progress: Progress) -> None:
    """Builds all the given tools, which are of one module, into the cache. Raises StackError with the log's end."""
    module = tools[0].module
    folder = box.cache / "tools"
    folder.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        for tool in tools:
            progress.update(tool.name, f"waiting for another run that builds {module}")

    with locked(folder / f".{module}.lock", waiting):
        left = [tool for tool in tools if not box.cached(tool).is_file()]
        for tool in tools:
            if tool not in left:
                progress.finish(tool.name, "built by another run")
        for test in (False, True):
            batch = [tool for tool in left if tool.test == test]
            # Tools with the same flags share one go command, which links one program while it compiles the next.
            for flags in dict.fromkeys(tuple(tool.flags) for tool in batch):
                _Build(box, [tool for tool in batch if tuple(tool.flags) == flags], progress).run()


class _Build:
    """One go command and its counters."""

    def __init__(self, box: Toolbox, tools: list[Tool], progress: Progress) -> None:
        self.box = box
        self.tools = tools
        self.progress = progress
        self.source = box.modules / tools[0].module
        self.environment = build_environment(box.cache)
        self.log = box.cache / "log" / f"build-{tools[0].name}.log"

    def run(self) -> None:
        """Builds beside the final places and renames into them, so that a half-written program is never seen."""
        started = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        root = self.box.cache / "tools"
        for stale in root.glob(".build-*"):  # left by a run that was killed; the lock says that nobody uses it now
            if stale.name.startswith(f".build-{self.tools[0].module}-"):
                shutil.rmtree(stale, ignore_errors=True)
        go = find_go(required_version(self.source / "go.mod"), self.box.cache, self.progress)
        packages = self._packages(go)
        scratch = Path(tempfile.mkdtemp(prefix=f".build-{self.tools[0].module}-", dir=root))
        try:
            self._compile(go, scratch, packages)
            for tool in self.tools:
                place = self.box.cached(tool).parent
                place.mkdir(exist_ok=True)
                os.replace(self._output(scratch, tool), place / tool.name)
                self.progress.finish(tool.name, f"{tool.version} built in {time.monotonic() - started:.0f} s")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _output(self, scratch: Path, tool: Tool) -> Path:
        return scratch / tool.name

    def _packages(self, go: Go) -> dict[str, set[str]]:
        """For each tool the packages it is made of, which also downloads the modules that are not here yet."""
        result: dict[str, set[str]] = {}
        for tool in self.tools:
            self.progress.update(tool.name, "reading modules (downloads what is missing)")
            tags = ["-tags", ",".join(tool.tags)] if tool.tags else []
            test = ["-test"] if tool.test else []
            output = self._list(go, ["list", "-deps", *test, *tags, "-f", "{{.ImportPath}}", tool.package], tool)
            result[tool.name] = {line.split(" ")[0] for line in output.splitlines() if line}
        return result

    def _list(self, go: Go, arguments: list[str], tool: Tool) -> str:
        process = subprocess.Popen(
            [str(go.path), *arguments],
            cwd=self.source,
            env=self.environment | go.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        with process:
            try:
                out, err = process.communicate()
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            self.log.write_text(err)
            raise self._failure(tool.name, err.splitlines()[-15:])
        return out

    def _compile(self, go: Go, scratch: Path, packages: dict[str, set[str]]) -> None:
        """Runs go and counts: with -v it prints every package that was not in its cache when it compiles it."""
        tool = self.tools[0]
        if tool.test:
            command = ["test", "-c", "-v", *tool.flags, "-o", str(self._output(scratch, tool)), tool.package]
        elif len(self.tools) == 1:
            command = ["build", "-v", *tool.flags, "-o", str(self._output(scratch, tool)), tool.package]
        else:
            command = ["build", "-v", *tool.flags, "-o", f"{scratch}/", *(each.package for each in self.tools)]
        done = {each.name: 0 for each in self.tools}
        last: deque[str] = deque(maxlen=15)
        for each in self.tools:
            self.progress.update(each.name, "compiling", 0, len(packages[each.name]))
        # Its own process group: an interrupt reaches go once, from us, and its compilers end with it.
        process = subprocess.Popen(
            [str(go.path), *command],
            cwd=self.source,
            env=self.environment | go.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        with process, self.log.open("w", buffering=1) as log:
            try:
                for line in process.stdout or ():
                    log.write(line)
                    text = line.strip()
                    if not _PACKAGE.fullmatch(text):
                        last.append(line.rstrip())
                        continue
                    for each in self.tools:
                        if text in packages[each.name]:
                            done[each.name] += 1
                            self.progress.update(each.name, "compiling", done[each.name], len(packages[each.name]))
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode != 0:
            raise self._failure(", ".join(each.name for each in self.tools), list(last))

    def _failure(self, what: str, lines: list[str]) -> StackError:
        text = "\n".join(f"  {line}" for line in lines)
        return StackError(
            f"Building {what} from {self.source} failed:\n{text}",
            f"The whole log is {self.log}. A first build downloads Go modules and needs the network (or GOPROXY);\n"
            f"a program you have can be named by {self.tools[0].variable}=/path.",
        )
