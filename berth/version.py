"""Which berth this is: its version, and the build id under which its workers register with Temporal."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import activities
import crds
import planning
import workflows

VERSION = metadata.version("berth")
DEPLOYMENT = "berth-control-plane"


@cache
def build_id() -> str:
    """The version and a hash of all code that workflows run or exchange, so that two builds never share an id."""
    digest = hashlib.sha256()
    for package in (workflows, planning, crds, activities):
        root = Path(str(package.__file__)).parent
        for source in sorted(root.rglob("*.py")):
            digest.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes())
    return f"{VERSION}-{digest.hexdigest()[:10]}"
