"""Holds docs/kernelcaches.md against the code: reasons of conditions, options of the node, attributes of a volume."""

from __future__ import annotations

import re
from typing import get_args

from images.refused import Reason as RefusedReason
from planning.caches.hits import Reason as HitReason
from planning.caches.trust import Reason as TrustReason
from planning.caches.volumes import ATTRIBUTES
from tests.docs.offered import commands, literals
from tests.docs.pages import ROOT, read

CACHES = ROOT / "docs" / "kernelcaches.md"
DEVICES = ROOT / "docs" / "devices.md"
SEATS = ROOT / "docs" / "seats.md"
# Values of other fields than a condition's reason, and conditions themselves.
_NO_CACHE_REASON = {
    "Error", "Outdated", "False", "True", "Unknown", "Always", "Never", "Pending", "Failed", "Normal", "Warning",
    "Prepare", "Changed", "Deleted", "OnTagChange", "NodeKernelCache",
}  # fmt: skip


def cache_reasons() -> set[str]:
    """What the conditions of a cache and of its nodes may give as reasons."""
    modules = [*(ROOT / "nodeworkers" / "caches").glob("*.py")]
    others = ("planning/caches/status.py", "planning/caches/grants.py", "activities/kernel_caches.py")
    modules += [ROOT / name for name in others]
    listed = {*get_args(TrustReason), *get_args(HitReason), *get_args(RefusedReason)}
    return (listed | literals(modules, r"(API)?([A-Z][a-z]+)+")) - _NO_CACHE_REASON


def test_every_reason_of_a_cache_is_told() -> None:
    text = read(CACHES)
    assert {"APIServerAway", "RolledBack", "NotOnNode"} <= cache_reasons(), "the search for reasons has become blind"
    missing = {reason for reason in cache_reasons() if f"`{reason}`" not in text}
    assert not missing, f"docs/kernelcaches.md does not mention {sorted(missing)}"


def test_the_nodes_options_and_attributes_are_all_told() -> None:
    section = re.split(r"^## On a node$", read(CACHES), flags=re.MULTILINE)[1]
    told = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", section, re.MULTILINE))
    devices = re.split(r"^## What is offered, and how$", read(DEVICES), flags=re.MULTILINE)[1]
    told |= dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", devices.split("\n## ")[0], re.MULTILINE))
    switching = re.split(r"^## Switching$", read(SEATS), flags=re.MULTILINE)[1].split("\n## ")[0]
    told |= dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", switching, re.MULTILINE))
    everywhere = {"--help", *(commands()["worker"] - {"--make-current"})}
    assert set(told) == commands()["node"] - everywhere
    attributes = re.split(r"^\| attribute \|", read(CACHES), flags=re.MULTILINE)[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", attributes, re.MULTILINE)) == set(ATTRIBUTES)
