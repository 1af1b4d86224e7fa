"""What berth offers inside every mounted kernel cache: the folder `.berth`, with a Python module that pods may use.

For the CSI driver, which lays it above a cache's own files. The module is in `python/` as data: it runs in pods, under
their Python, when a person says so (docs/kernelcaches.md), and is never imported here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

from nodeworkers.csi.mounts import TABLE

OURS = ".berth"
PYTHON = f"{OURS}/python"
_FILES = ("berth_triton_listener.py", "sitecustomize.py")
# Nothing below this folder shows through: an image must not add modules to a path of Python's.
_OPAQUE = "trusted.overlay.opaque"
_SOURCE = Path(__file__).parent / "python"


def lay_out(folder: Path) -> Path:
    """The layer, in a folder below `folder` that is named by what is in it, made if it is not there whole. What an
    older berth left is removed unless it is mounted. Raises OSError.

    Only root may write in it: unlike kernels, it is nobody's to change.
    """
    content = {name: (_SOURCE / name).read_bytes() for name in _FILES}
    digest = hashlib.sha256(b"\0".join(part for name in _FILES for part in (name.encode(), content[name])))
    layer = folder / digest.hexdigest()[:32]
    if not _whole(layer, content):
        fresh = folder / "new"
        for left in (fresh, layer):
            shutil.rmtree(left, ignore_errors=True)
        (fresh / PYTHON).mkdir(parents=True)
        for name, body in content.items():
            (fresh / PYTHON / name).write_bytes(body)
            (fresh / PYTHON / name).chmod(0o644)
        for path in (fresh / PYTHON, fresh / OURS, fresh):
            path.chmod(0o755)
        os.setxattr(fresh / OURS, _OPAQUE, b"y")
        fresh.rename(layer)
    mounted = TABLE.read_text(errors="surrogateescape")
    for other in folder.iterdir():
        if other != layer and other.name not in mounted:
            shutil.rmtree(other, ignore_errors=True)
    return layer


def _whole(layer: Path, content: dict[str, bytes]) -> bool:
    """A machine may have lost its power before what was renamed was written."""
    try:
        return (
            {name: (layer / PYTHON / name).read_bytes() for name in content} == content
            and os.getxattr(layer / OURS, _OPAQUE) == b"y"
            and all(stat.S_IMODE(os.stat(layer / name).st_mode) == 0o755 for name in (".", OURS, PYTHON))
        )
    except OSError:
        return False
