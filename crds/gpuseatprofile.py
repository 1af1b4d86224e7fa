"""GPUSeatProfile (kyb.ai/v1alpha1): how many seats which groups of GPUs have on which nodes, for whoever reads one.

The same document is what `berth node` takes as a file. What can be known without a node is checked here; which GPUs a
node has, and what pods hold meanwhile, is for `planning/devices/seats.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StrictStr, ValidationInfo, field_validator, model_validator

from crds.gpuworkload import (
    INT_OR_STRING,
    SPEC_LIMIT,
    Condition,
    Count,
    CRDModel,
    Generation,
    Int,
    LabelKey,
    LabelValue,
    Name,
    serialised_size,
)

GROUP = "kyb.ai"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "GPUSeatProfile"
PLURAL = "gpuseatprofiles"

MOST_PROFILES = 8
MOST_GROUPS = 64  # of one node
MOST_GPUS = 16  # of one group
MOST_SEATS = 64  # of one group
MOST_INDEX = 255
MOST_NAME = 48  # characters of a group's name: `kyb-<group>-s<k>` stays below the 63 of a device's id
MOST_SHOWN = 64  # nodes in a status
MOST_WINDOWS = 32  # of a schedule
MOST_NAMED = 64  # seats that a window names
LOST_PERCENT = 10
POLICY_WINDOW = 3600  # seconds
MOST_POLICY_WINDOW = 7 * 86_400
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

UUID_PATTERN = r"^GPU-[A-Za-z0-9._-]{1,59}$"
GROUP_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$"

ProfileName = Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
GroupName = Annotated[StrictStr, Field(min_length=1, max_length=MOST_NAME, pattern=GROUP_PATTERN)]
CLOCK_PATTERN = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"
# Of names such as Europe/Berlin. Which there are, the node's tz data tells.
ZONE_PATTERN = r"^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}$"

Clock = Annotated[StrictStr, Field(min_length=5, max_length=5, pattern=CLOCK_PATTERN)]
SeatName = Annotated[StrictStr, Field(min_length=1, max_length=63)]
Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
Rebalance = Literal["Propose", "Perform"]
GPURef = Annotated[
    Annotated[int, Field(strict=True, ge=0, le=MOST_INDEX)]
    | Annotated[str, Field(strict=True, max_length=63, pattern=UUID_PATTERN)],
    Field(json_schema_extra={**INT_OR_STRING, "pattern": UUID_PATTERN, "maxLength": 63, "maximum": MOST_INDEX}),
]


def seat_resource(size: int) -> str:
    """The extended resource of a seat on a group of so many GPUs."""
    return f"kyb.ai/gpu-{size}x-seat"


_RESOURCES = [seat_resource(size) for size in range(MOST_GPUS + 1)]


class SeatHours(CRDModel):
    """Hours in which seats come first."""

    seats: Annotated[list[SeatName], Field(min_length=1, max_length=MOST_NAMED)] = Field(
        description="Names of seats: those that pods have in the annotation kyb.ai/name.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    days: Annotated[list[Day], Field(min_length=1, max_length=len(DAYS))] | None = Field(
        default=None,
        description="The days on which it begins; left out, every day.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    start: Clock = Field(description="When it begins, by the clock of the policy's time zone, such as 08:00.")
    end: Clock = Field(description="When it ends; if that is not after its start, on the next day.")

    @field_validator("seats", "days")
    @classmethod
    def _each_once(cls, values: list[str] | None) -> list[str] | None:
        if twice := [value for value, count in Counter(values or ()).items() if count > 1]:
            raise ValueError(f"has {twice[0]} twice")
        return values


class SeatPolicy(CRDModel):
    """Who of a group's seats is active."""

    type: Literal["onDemand", "priority", "fair", "schedule"] = Field(
        default="onDemand", description="Who comes first of those who are waited for."
    )
    lost_percent: Annotated[Int, Field(ge=1, le=50, json_schema_extra={"format": "int32"})] = Field(
        default=LOST_PERCENT,
        description="The most of the time that switches may take; from it and from what they are measured to take "
        "follows how long a seat keeps its slot.",
    )
    window_seconds: Annotated[Int, Field(ge=60, le=MOST_POLICY_WINDOW, json_schema_extra={"format": "int32"})] = Field(
        default=POLICY_WINDOW, description="Over how long time is counted: what seats used, and what switches took."
    )
    time_zone: Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=ZONE_PATTERN)] = Field(
        default="UTC", description="Of the schedule, such as Europe/Berlin."
    )
    schedule: Annotated[list[SeatHours], Field(min_length=1, max_length=MOST_WINDOWS)] | None = Field(
        default=None, description="With type schedule, and with no other: hours in which seats come first."
    )

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "(self.type == 'schedule') == has(self.schedule)",
                    "fieldPath": ".schedule",
                    "message": "must be there with type schedule, and with no other",
                }
            ]
        }
    )

    @model_validator(mode="after")
    def _scheduled(self) -> SeatPolicy:
        if (self.type == "schedule") != (self.schedule is not None):
            told = "needs hours in schedule" if self.schedule is None else f"has a schedule, which {self.type} has not"
            raise ValueError(f"is of type {self.type} and {told}")
        return self


class SeatProfile(CRDModel):
    """What the groups of one size offer."""

    name: ProfileName
    resource: Annotated[StrictStr, Field(min_length=1, max_length=63)] = Field(
        description="What a container asks for: kyb.ai/gpu-<groupSize>x-seat."
    )
    group_size: Annotated[Int, Field(ge=1, le=MOST_GPUS, json_schema_extra={"format": "int32"})] = Field(
        description="GPUs of each group that serves it."
    )
    seats_per_group: Annotated[Int, Field(ge=1, le=MOST_SEATS, json_schema_extra={"format": "int32"})] = Field(
        description="Model servers that may share a group, one of them awake at a time."
    )
    policy: SeatPolicy | None = Field(default=None, description="Who of them is awake; left out, who is asked for.")

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    # A list, for the API server reckons what string(self.groupSize) makes as of any length.
                    "rule": f"self.resource == {_RESOURCES}[self.groupSize]",
                    "fieldPath": ".resource",
                    "message": "must be kyb.ai/gpu-<groupSize>x-seat",
                }
            ]
        }
    )

    @field_validator("group_size")
    @classmethod
    def _named_after_its_size(cls, size: int, info: ValidationInfo) -> int:
        resource = info.data.get("resource")
        if resource is not None and resource != seat_resource(size):
            raise ValueError(f"is {size}, so that resource must be {seat_resource(size)}, not {resource!r:.80}")
        return size


class GPUGroup(CRDModel):
    """GPUs that are one place for seats."""

    name: GroupName = Field(description="Such as G01. Its seats are kyb-<name>-s1 and so on.")
    gpus: Annotated[list[GPURef], Field(min_length=1, max_length=MOST_GPUS)] = Field(
        description="The node's GPUs by index (0 is /dev/nvidia0) or by UUID (nvidia-smi -L)."
    )

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, gpus: list[int | str]) -> list[int | str]:
        if twice := [gpu for gpu, count in Counter(map(_folded, gpus)).items() if count > 1]:
            raise ValueError(f"names GPU {twice[0]} twice")
        return gpus


class GPUTopology(CRDModel):
    """Which GPUs of a node belong together."""

    groups: Annotated[list[GPUGroup], Field(min_length=1, max_length=MOST_GROUPS)] = Field(
        description="Disjoint; each serves the profile whose groupSize is its size.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )

    @field_validator("groups")
    @classmethod
    def _disjoint(cls, groups: list[GPUGroup]) -> list[GPUGroup]:
        names: dict[str, str] = {}
        owners: dict[int | str, str] = {}
        for group in groups:
            if other := names.get(group.name.lower()):
                raise ValueError(f"have the names {other} and {group.name}, which must differ, and not in case alone")
            names[group.name.lower()] = group.name
            for gpu in group.gpus:
                owner = owners.setdefault(_folded(gpu), group.name)
                if owner != group.name:
                    raise ValueError(
                        f"overlap: GPU {gpu} is in {owner} and in {group.name}, and a GPU may be in one group only"
                    )
        return groups


_TOPOLOGY_RULES: list[JsonValue] = [
    {
        "rule": "self.profiles.all(p, self.profiles.exists_one(q, q.groupSize == p.groupSize))",
        "fieldPath": ".profiles",
        "message": "two profiles have the same groupSize: a group serves the one profile of its size",
    },
    {
        "rule": "!has(self.gpuTopology) || self.gpuTopology.groups.all(g, "
        "self.profiles.exists(p, p.groupSize == size(g.gpus)))",
        "fieldPath": ".gpuTopology",
        "message": "a group has a number of GPUs that is no profile's groupSize",
    },
    {
        "rule": "!has(self.gpuTopology) || self.gpuTopology.groups.all(g, g.gpus.all(x, "
        "self.gpuTopology.groups.exists_one(h, x in h.gpus)))",
        "fieldPath": ".gpuTopology",
        "message": "groups overlap: a GPU may be in one group only",
    },
]


class GPUSeatProfileSpec(CRDModel):
    """What a platform engineer makes of some nodes' GPUs."""

    profiles: Annotated[list[SeatProfile], Field(min_length=1, max_length=MOST_PROFILES)] = Field(
        description="What groups offer, one entry for each size.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    gpu_topology: GPUTopology | None = Field(
        default=None,
        description="Which GPUs are a group; left out, they are found from how the GPUs are connected.",
    )
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(
        default_factory=dict, description="Labels of the nodes that it is for; left out, all."
    )
    rebalance: Rebalance | None = Field(
        default=None,
        description="Whether servers are moved between groups of a node, as requests for them have it. Propose: only "
        "said (an Event, berth explain seats). Perform: done, by SeatMigrations. Left out: neither.",
    )

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-validations": _TOPOLOGY_RULES})

    @field_validator("profiles")
    @classmethod
    def _one_for_each_size(cls, profiles: list[SeatProfile]) -> list[SeatProfile]:
        names, sizes = set[str](), dict[int, str]()
        for profile in profiles:
            if profile.name in names:
                raise ValueError(f"has two profiles of the name {profile.name}")
            names.add(profile.name)
            other = sizes.setdefault(profile.group_size, profile.name)
            if other != profile.name:
                raise ValueError(
                    f"has {other} and {profile.name}, both for groups of {profile.group_size}: a group serves the one "
                    "profile of its size"
                )
        return profiles

    @field_validator("gpu_topology")
    @classmethod
    def _every_group_serves_a_profile(cls, topology: GPUTopology | None, info: ValidationInfo) -> GPUTopology | None:
        profiles = info.data.get("profiles")
        if topology is None or profiles is None:
            return topology
        sizes = {profile.group_size: profile.name for profile in profiles}
        for group in topology.groups:
            if len(group.gpus) not in sizes:
                there = ", ".join(f"{name} takes groups of {size}" for size, name in sorted(sizes.items()))
                raise ValueError(
                    f"group {group.name} has {len(group.gpus)} GPUs ({', '.join(map(str, group.gpus))}), and no "
                    f"profile is for that: {there}"
                )
        return topology

    @classmethod
    def parse(cls, raw: object) -> tuple[GPUSeatProfileSpec | None, str]:
        """The spec, or None and a sentence with path and reason. Never raises, whatever `raw` is."""
        if not isinstance(raw, Mapping):
            return None, "spec: must be an object"
        if serialised_size(raw, SPEC_LIMIT) > SPEC_LIMIT:
            return None, f"spec: must be at most {SPEC_LIMIT // 1024} KiB as JSON"
        return cls.validated(raw, "spec")


class SeatNode(CRDModel):
    """How it stands on one node."""

    name: Name
    groups: Count
    seats: Count
    message: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="What is refused there, or waits, and why."
    )


class GPUSeatProfileStatus(CRDModel):
    """What berth reports."""

    observed_generation: Generation | None = None
    groups: Count | None = Field(default=None, description="Groups that offer its seats, on all nodes.")
    seats: Count | None = Field(default=None, description="Seats that are offered, held ones among them.")
    nodes_serving: Count | None = Field(default=None, description="Nodes with at least one of its seats.")
    nodes_refused: Count | None = Field(
        default=None, description="Nodes that refuse it or a part of it; of such, some serve the rest."
    )
    nodes: Annotated[list[SeatNode], Field(max_length=MOST_SHOWN)] | None = Field(
        default=None,
        description=f"At most {MOST_SHOWN} of them, those with something to tell first.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    conditions: Annotated[list[Condition], Field(max_length=8)] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )


def _folded(gpu: int | str) -> int | str:
    """UUIDs are the same in either case."""
    return gpu.lower() if isinstance(gpu, str) else gpu
