"""What the workflow of devices may ask of its activity, and how controller and workflow find each other: names and
values, and nothing that does the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from temporalio.common import SearchAttributePair, TypedSearchAttributes

from activities.messages import KIND, NAME
from activities.signatures import Versions

DEVICES_WORKFLOW = "Devices"
SHOW_DEVICES = "show_devices"


@dataclass
class DevicesState:
    """What the workflow carries over continue-as-new: how new the news is that it heard of."""

    pool: str = "default"
    seen: Versions = field(default_factory=dict)


@dataclass(frozen=True)
class DevicesLook:
    fresh: Versions


@dataclass(frozen=True)
class DevicesShown:
    """`message`: what was written, for people. `within`: look again after so many seconds; None: when poked."""

    message: str
    within: float | None = None


def devices_id(pool: str) -> str:
    return f"devices/{pool}"


def devices_attributes(pool: str) -> TypedSearchAttributes:
    return TypedSearchAttributes([SearchAttributePair(KIND, DEVICES_WORKFLOW), SearchAttributePair(NAME, pool)])
