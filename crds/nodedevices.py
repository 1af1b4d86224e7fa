"""NodeDevices (gpu.warp.dev/v1alpha1): the accelerators of one node, what they are offered as, and who holds them.

The node's own process writes it, under the node's name, and nobody else; people read it (`berth devices`), and the
control plane adds up what nodes say of seats. It goes with the node's object.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StrictBool, StrictStr

from crds.gpuseatprofile import MOST_GROUPS, MOST_SEATS
from crds.gpuworkload import Count, CRDModel, Int, LabelKey, LabelValue, ObjectName, Time

KIND = "NodeDevices"
PLURAL = "nodedevices"
MOST_CARDS = 256  # shown; a node that had more would show the first, those with trouble before others
MOST_DEVICES = 512  # shown, those that are held or have trouble before others
MOST_RESOURCES = 32
MOST_PROBLEMS = 16
MOST_LABELS = 64
MOST_TOPOLOGY = 16  # cards between which it is drawn

Short = Annotated[StrictStr, Field(max_length=128)]
Sentence = Annotated[StrictStr, Field(max_length=512)]
DeviceID = Annotated[StrictStr, Field(max_length=128)]
_int32: dict[str, JsonValue] = {"format": "int32"}


def _keyed(key: str) -> dict[str, JsonValue]:
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class NodeDevicesSpec(CRDModel):
    """What this object is about."""

    node_name: ObjectName


class CardStatus(CRDModel):
    """An accelerator, or a MIG instance of one."""

    id: DeviceID = Field(description="Its name for ever: its UUID, its ASIC's number, or its PCI address.")
    vendor: Short
    product: Short
    resource: Short | None = Field(default=None, description="What it counts as.")
    index: Annotated[Int, Field(ge=0, json_schema_extra=_int32)] = Field(description="The kernel's number for it now.")
    address: Short | None = Field(default=None, description="Its PCI address.")
    numa: Annotated[Int, Field(ge=0, json_schema_extra=_int32)] | None = None
    memory_mib: Annotated[Int, Field(ge=0, json_schema_extra=_int32)] | None = Field(default=None, alias="memoryMiB")
    driver: Short | None = None
    health: Literal["Healthy", "Unhealthy", "Unknown"]
    reason: Short | None = Field(default=None, description="Why it is not healthy.")
    message: Sentence | None = None
    since: Time | None = Field(default=None, description="When its health became what it is.")


class HeldBy(CRDModel):
    """The container that has a device."""

    namespace: Short
    pod: Short
    container: Short


class DeviceStatus(CRDModel):
    """What can be had under a resource's name: a card, a share of one, or a seat."""

    id: DeviceID
    resource: Short
    cards: Annotated[list[DeviceID], Field(max_length=64)]
    group: Short | None = Field(default=None, description="Of a seat: its group of GPUs.")
    healthy: StrictBool
    held_by: HeldBy | None = None


class ResourceStatus(CRDModel):
    """How the node offers one resource."""

    name: Short
    front_end: Literal["device-plugin", "dra", "none"] = Field(
        description="By what the kubelet or the scheduler knows it; none where neither is to."
    )
    devices: Count
    healthy: Count
    held: Count
    offered: StrictBool = Field(description="Whether the kubelet, or the API server, has it as the node says.")
    message: Sentence | None = Field(default=None, description="Why it is not offered.")


class TopologyRow(CRDModel):
    """How one card is connected to each of them."""

    card: DeviceID
    links: Annotated[list[Short], Field(max_length=MOST_TOPOLOGY)]


class SeatConfiguration(CRDModel):
    """Which seats were asked for here, and what stands against them."""

    source: Short = Field(description="The GPUSeatProfile, or the file.")
    generation: Count | None = None
    groups: Annotated[Count, Field(le=MOST_GROUPS)]
    seats: Annotated[Count, Field(le=MOST_GROUPS * MOST_SEATS)]
    problems: Annotated[list[Sentence], Field(max_length=MOST_PROBLEMS)] | None = None
    waiting: Annotated[list[Sentence], Field(max_length=MOST_PROBLEMS)] | None = Field(
        default=None, description="What waits for pods that run."
    )


class NodeDevicesStatus(CRDModel):
    """What the node has."""

    updated: Time | None = None
    simulated: StrictBool | None = Field(default=None, description="True: its cards are pretended.")
    count: Count | None = Field(default=None, description="Cards.")
    unhealthy: Count | None = Field(default=None, description="Cards that are not healthy.")
    held: Count | None = Field(default=None, description="Devices that containers have.")
    summary: Short | None = Field(default=None, description="What it has, in words.")
    problems: Annotated[list[Sentence], Field(max_length=MOST_PROBLEMS)] | None = Field(
        default=None, description="What the node's process could not do or see."
    )
    cards: Annotated[list[CardStatus], Field(max_length=MOST_CARDS)] | None = Field(
        default=None, json_schema_extra=_keyed("id")
    )
    devices: Annotated[list[DeviceStatus], Field(max_length=MOST_DEVICES)] | None = Field(
        default=None, json_schema_extra=_keyed("id")
    )
    resources: Annotated[list[ResourceStatus], Field(max_length=MOST_RESOURCES)] | None = Field(
        default=None, json_schema_extra=_keyed("name")
    )
    topology: Annotated[list[TopologyRow], Field(max_length=MOST_TOPOLOGY)] | None = Field(
        default=None, description="Of up to 16 cards: such as NV4, SYS.", json_schema_extra=_keyed("card")
    )
    seats: SeatConfiguration | None = None
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=MOST_LABELS)] | None = Field(
        default=None, description="What the labels of its Node are to tell of its devices; berth's worker writes them."
    )
