"""The files of NVIDIA's driver that a container needs to run CUDA: device nodes that all GPUs share, and libraries,
which must be those of the driver that runs. For the CDI documents.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from planning.devices.cdi import DriverFiles

_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
# What programs load at run time by these names; the toolkit's own libraries are in their images.
_LIBRARIES = re.compile(
    r"lib(cuda|cudadebugger|nvidia-ml|nvidia-nvvm|nvidia-ptxjitcompiler|nvidia-gpucomp|nvidia-opencl|nvcuvid"
    r"|nvidia-encode|nvidia-cfg|nvidia-allocator)\.so\.[0-9.]+"
)
_LINE = re.compile(
    r"\s*(?P<name>\S+) \(libc6,x86-64[^)]*\) => (?P<path>/\S+)|\s*(?P<arm>\S+) \(libc6,AArch64[^)]*\) => (?P<at>/\S+)"
)
_LISTING = ("/sbin/ldconfig", "-p")
_SECONDS = 10.0


def driver_files(dev: Path = Path("/dev"), listing: Callable[[], str] | None = None) -> DriverFiles:
    """What is there now. `listing`: the text of `ldconfig -p`, None for this machine's."""
    nodes = tuple(str(dev / name) for name in _NODES if (dev / name).exists())
    if not nodes:
        return DriverFiles()
    return DriverFiles(nodes, tuple(_libraries((listing or _listed)())))


def _libraries(text: str) -> list[tuple[str, str]]:
    """By the file that each name leads to, in the container at the path of the name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, path = match["name"] or match["arm"], match["path"] or match["at"]
        if _LIBRARIES.fullmatch(name):
            found.setdefault(path, str(Path(path).resolve()))
    return [(host, path) for path, host in sorted(found.items())]


def _listed() -> str:
    try:
        done = subprocess.run(_LISTING, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
