"""Which programs the stack is made of, which versions fit, and where each one is found.

For `Stack.up`, which asks `Toolbox.ensure` for programs by name. A program is taken from an explicit path, from PATH if
its version fits, from berth's cache, or is built from the Go modules pinned in `stack/modules/` (see `build.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stack.errors import StackError
from stack.paths import cache_root
from stack.progress import Progress, Silent

MODULES = Path(__file__).parent / "modules"


@dataclass(frozen=True)
class Tool:
    """One program: what builds it and which version of it may come from elsewhere.

    `fits` is a regular expression for the versions that PATH may serve; `asks` are the arguments that print one.
    """

    name: str
    module: str
    package: str
    version: str
    fits: str
    asks: tuple[str, ...] = ("--version",)
    defines: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    test: bool = False
    """Built by `go test -c`, for upstream ships it as a test package only."""

    @property
    def flags(self) -> list[str]:
        """Flags for go: no machine paths, no symbol tables, the version stamped where the program prints it."""
        stamped = " ".join(["-s", "-w", *(f"-X {define}" for define in self.defines)])
        return ["-trimpath", "-ldflags", stamped, *(["-tags", ",".join(self.tags)] if self.tags else [])]

    @property
    def variable(self) -> str:
        """The environment variable that names an explicit path."""
        return "BERTH_" + self.name.upper().replace("-", "_")


KUBERNETES = "1.36.3"


def _kubernetes(name: str, fits: str = r"1\.36\.\d+", asks: tuple[str, ...] = ("--version",)) -> Tool:
    stamp = "k8s.io/component-base/version"
    defines = (
        f"{stamp}.gitVersion=v{KUBERNETES}",
        f"{stamp}.gitMajor=1",
        f"{stamp}.gitMinor=36",
        f"{stamp}.gitTreeState=clean",
    )
    return Tool(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, fits, asks, defines)


def _containerd(name: str, asks: tuple[str, ...] = ("--version",)) -> Tool:
    root, version = "github.com/containerd/containerd/v2", "2.3.7"
    defines = (f"{root}/version.Version={version}",)
    return Tool(name, "containerd", f"{root}/cmd/{name}", version, r"2\.[3-9]\.\d+", asks, defines, ("no_btrfs",))


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "temporal",
            "temporal",
            "github.com/temporalio/cli/cmd/temporal",
            "1.8.2",
            r"1\.(8\.[2-9]|9\.\d+)",
            defines=("github.com/temporalio/cli/internal/temporalcli.Version=1.8.2",),
        ),
        Tool("etcd", "etcd", ".", "3.6.14", r"3\.6\.\d+"),
        _kubernetes("kube-apiserver"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubectl", fits=r"1\.3[567]\.\d+", asks=("version", "--client")),  # one minor of skew is supported
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        Tool("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", "0.8.0", r"0\.8\.\d+"),
        _containerd("containerd"),
        _containerd("containerd-shim-runc-v2", asks=("-v",)),
        _containerd("ctr"),
        Tool(
            "crictl",
            "critools",
            "sigs.k8s.io/cri-tools/cmd/crictl",
            "1.36.0",
            r"1\.36\.\d+",
            defines=("sigs.k8s.io/cri-tools/pkg/version.Version=1.36.0",),
        ),
        Tool(
            "critest",
            "critools",
            "sigs.k8s.io/cri-tools/cmd/critest",
            "1.36.0",
            r"1\.36\.\d+",
            defines=("sigs.k8s.io/cri-tools/pkg/version.Version=1.36.0",),
            test=True,
        ),
        Tool("registry-referrers", "registry", ".", "0.22.1", r"0\.22\.1"),
        Tool(
            "csi-sanity",
            "csisanity",
            "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity",
            "5.4.0",
            r"5\.[4-9]\.\d+",
            defines=("main.VERSION=5.4.0",),
        ),
        Tool(
            "cosign",
            "sigstore",
            "github.com/sigstore/cosign/v3/cmd/cosign",
            "3.1.2",
            r"3\.1\.\d+",
            asks=("version",),
            defines=("sigs.k8s.io/release-utils/version.gitVersion=v3.1.2",),
        ),
        Tool("virtual-sigstore", "sigstore", "./virtual-sigstore", "1.2.1", r"1\.2\.1"),
    )
}

ORDER = list(TOOLS)
"""The order of builds: Temporal and Kubernetes take the longest, and everything waits for all of them anyway."""


@dataclass(frozen=True)
class Found:
    """A program that can be started: where it is, which version it says it is, and how it was found."""

    tool: Tool
    path: Path
    version: str
    source: str


def fingerprint(tool: Tool, modules: Path = MODULES) -> str:
    """Names what a build depends on: the pinned modules, our own sources and the flags."""
    digest = hashlib.sha256()
    folder = modules / tool.module
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update("\0".join([tool.package, str(tool.test), *tool.flags]).encode())
    return digest.hexdigest()[:12]


def ask_version(tool: Tool, path: Path) -> str:
    """The version a program states, as `1.2.3`; empty if it cannot be run or states none."""
    try:
        result = subprocess.run(
            [str(path), *tool.asks], capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"v?(\d+\.\d+\.\d+)", result.stdout + result.stderr)
    return match.group(1) if match and result.returncode == 0 else ""


@dataclass
class Toolbox:
    """Finds programs, and builds those that are nowhere.

    `explicit` maps names to paths a person gave; they win and their version is that person's business.
    """

    explicit: Mapping[str, Path] = field(default_factory=dict)
    cache: Path = field(default_factory=cache_root)
    registry: Mapping[str, Tool] = field(default_factory=lambda: TOOLS)
    modules: Path = MODULES
    _found: dict[str, Found] = field(default_factory=dict)

    def cached(self, tool: Tool) -> Path:
        """Where a built program lies."""
        return self.cache / "tools" / f"{tool.name}-{tool.version}-{fingerprint(tool, self.modules)}" / tool.name

    def find(self, name: str) -> Found | None:
        """Finds one program without building it; None if it would have to be built."""
        if name in self._found:
            return self._found[name]
        try:
            tool = self.registry[name]
        except KeyError:
            raise StackError(f"There is no tool called {name}.", f"Known: {', '.join(self.registry)}.") from None
        found = self._explicit(tool) or self._on_path(tool) or self._in_cache(tool)
        if found is not None:
            self._found[name] = found
        return found

    def _explicit(self, tool: Tool) -> Found | None:
        named = self.explicit.get(tool.name) or os.environ.get(tool.variable)
        if not named:
            return None
        path = Path(named).expanduser().absolute()
        if not path.is_file() or not os.access(path, os.X_OK):
            raise StackError(
                f"The path given for {tool.name}, {path}, is not a program.",
                f"Correct or unset {tool.variable} (or the option that named it).",
            )
        return Found(tool, path, ask_version(tool, path) or "unknown", "explicit path")

    def _on_path(self, tool: Tool) -> Found | None:
        which = shutil.which(tool.name)
        if which is None:
            return None
        version = ask_version(tool, Path(which))
        if not re.fullmatch(tool.fits, version):
            return None
        return Found(tool, Path(which).absolute(), version, "PATH")

    def _in_cache(self, tool: Tool) -> Found | None:
        path = self.cached(tool)
        return Found(tool, path, tool.version, "cache") if path.is_file() else None

    def ensure(self, names: Iterable[str], progress: Progress | None = None) -> dict[str, Found]:
        """Finds or builds each named program. Needs the network only for what was never built here before."""
        from stack.build import build_module  # what is only needed for a build is only loaded for one

        shown = progress or Silent()
        wanted = sorted(set(names), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
        missing = [self.registry[name] for name in wanted if self.find(name) is None]
        for module in dict.fromkeys(tool.module for tool in missing):
            build_module(self, [tool for tool in missing if tool.module == module], shown)
        result: dict[str, Found] = {}
        for name in wanted:
            found = self.find(name)
            if found is None:  # pragma: no cover - build_module raises before this
                raise StackError(f"{name} was built but is not at {self.cached(self.registry[name])}.")
            result[name] = found
        return result
