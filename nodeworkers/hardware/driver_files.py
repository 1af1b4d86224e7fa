"""The files of NVIDIA's driver that a container needs to run CUDA: device nodes that all GPUs share, and libraries and
programs, which must be those of the driver that runs. For the CDI documents.

They lie on the host, whose root need not be this process's: it is looked into as NVIDIA's container toolkit looks into
a driver root. What comes out are paths of the host, and no link leads out of its root.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from planning.devices.cdi import DriverFiles

_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
# What programs load at run time by these names; the toolkit's own libraries are in their images.
_LIBRARIES = re.compile(
    r"lib(cuda|cudadebugger|nvidia-ml|nvidia-nvvm|nvidia-ptxjitcompiler|nvidia-gpucomp|nvidia-opencl|nvcuvid"
    r"|nvidia-encode|nvidia-cfg|nvidia-allocator)\.so\.[0-9.]+"
)
# Where distributions and NVIDIA's installer put them.
_PLACES = tuple(f"{arch}-linux-gnu{sub}" for arch in ("x86_64", "aarch64") for sub in ("", "/nvidia/current"))
_FOLDERS = ("usr/lib64", *(f"usr/lib/{place}" for place in _PLACES), "lib64", *(f"lib/{place}" for place in _PLACES))
_PROGRAMS = ("usr/bin/nvidia-smi",)
_HOOKS = tuple(
    f"{folder}/{name}"
    for name in ("nvidia-cdi-hook", "nvidia-ctk")
    for folder in ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit")
)
_LINE = re.compile(
    r"\s*(?P<name>\S+) \(libc6,x86-64[^)]*\) => (?P<path>/\S+)|\s*(?P<arm>\S+) \(libc6,AArch64[^)]*\) => (?P<at>/\S+)"
)
_LDCONFIG, _CACHE = "/sbin/ldconfig", "etc/ld.so.cache"
_SECONDS = 10.0
_MOST_LINKS = 40  # of one path, as the kernel follows
_ELF64 = b"\x7fELF\x02"


def driver_files(root: Path = Path("/"), dev: Path = Path("/dev"), sys: Path = Path("/sys")) -> DriverFiles:
    """What is there now. `root`: where the host's root is to be seen, also if no more of it than its /usr is; `dev` and
    `sys` are the host's own in any case.
    """
    nodes = tuple(str(dev / name) for name in _NODES if (dev / name).exists())
    if not nodes:
        return DriverFiles()
    base, version = str(root).rstrip("/"), _version(sys)
    found: dict[str, tuple[str, str]] = {}
    for path in (*_cached(base), *_listed(base)):
        name = path.rpartition("/")[2]
        if name in found or not _LIBRARIES.fullmatch(name):
            continue
        file = resolved(base, path)
        if file and _starts(base + file, _ELF64) and (not version or file.endswith(f".so.{version}")):
            found[name] = file, path
    programs = [(file, f"/{path}") for path in _PROGRAMS if (file := resolved(base, f"/{path}")) and _runs(base + file)]
    hook = next((f"/{path}" for path in _HOOKS if (file := resolved(base, f"/{path}")) and _runs(base + file)), "")
    return DriverFiles(nodes, tuple(sorted([*found.values(), *programs], key=lambda pair: pair[1])), hook)


def resolved(base: str, path: str) -> str:
    """The path of the host to which the path `path` of the host leads, by whatever links, '' if that is nothing. `base`
    is its root here without a slash at its end. A link is the host's: an absolute one begins at its root, and `..` ends
    there.
    """
    parts, done, links = [each for each in reversed(path.split("/")) if each], list[str](), 0
    while parts:
        part = parts.pop()
        if part in (".", ".."):
            del done[len(done) - (part == "..") :]
            continue
        here = "/".join([base, *done, part])
        try:
            if stat.S_ISLNK(os.lstat(here).st_mode):
                links += 1
                target = os.readlink(here)
                if links > _MOST_LINKS:
                    return ""
                done = [] if target.startswith("/") else done
                parts += [each for each in reversed(target.split("/")) if each]
                continue
        except (OSError, ValueError):
            return ""
        done.append(part)
    return "/" + "/".join(done)


def _version(sys: Path) -> str:
    """Of the driver that runs; '' if it does not tell."""
    try:
        text = (sys / "module" / "nvidia" / "version").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if re.fullmatch(r"[0-9]+(\.[0-9]+)*", text) else ""


def _listed(base: str) -> Iterator[str]:
    """What lies in the folders for libraries: paths of the host."""
    for folder in _FOLDERS:
        there = resolved(base, f"/{folder}")
        try:
            names = sorted(os.listdir(base + there)) if there else []
        except OSError:
            continue
        yield from (f"/{folder}/{name}" for name in names)


def _cached(base: str) -> list[str]:
    """What the host's loader knows, where its cache is to be seen: paths of the host."""
    cache = f"{base}/{_CACHE}"
    if not os.path.isfile(cache):
        return []
    try:
        done = subprocess.run(
            [_LDCONFIG, "-p", "-C", cache], capture_output=True, text=True, errors="replace", check=False,
            timeout=_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [match["path"] or match["at"] for line in done.stdout.splitlines() if (match := _LINE.match(line))]


def _starts(path: str, begin: bytes) -> bool:
    """Whether a plain file begins so; one that is none is not opened, for that might hang."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(begin)) == begin
    except OSError:
        return False


def _runs(path: str) -> bool:
    try:
        found = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(found) and bool(found & 0o111)
