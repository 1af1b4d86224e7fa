"""Which berth this is: its version, and the build id under which its workers register with Temporal."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import activities
import berth
import controller
import crds
import kube
import planning
import workflows

VERSION = metadata.version("berth")
DEPLOYMENT = "berth-control-plane"


@cache
def build_id() -> str:
    """The version and a hash of all code that workflows run or exchange, so that two builds never share an id."""
    return f"{VERSION}-{_hash(workflows, planning, crds, activities)}"


@cache
def code_id() -> str:
    """The same of all code that the controller and the worker run, by which `berth up` knows that it changed."""
    return f"{VERSION}-{_hash(workflows, planning, crds, activities, controller, kube, berth)}"


def _hash(*packages: ModuleType) -> str:
    digest = hashlib.sha256()
    for package in packages:
        root = Path(str(package.__file__)).parent
        for source in sorted(root.rglob("*.py")):
            digest.update(source.relative_to(root).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:10]
