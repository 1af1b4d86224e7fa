"""How a node's NVIDIA GPUs are connected, by NVLink and by PCIe, as NVML tells it: for the provider of NVIDIA's GPUs,
which asks once for each set of GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from nodeworkers.hardware.nvidia_cards import Asker, address
from planning.devices.cards import Connection, Link


@dataclass(frozen=True, slots=True)
class Wiring:
    """`switched`: how many active NVLinks lead from a card (its id) into NVSwitches. `complete`: no GPU failed while it
    was asked; if one did, it is worth asking again.
    """

    links: tuple[Link, ...]
    switched: Mapping[str, int]
    complete: bool


def wiring(nvml: Any, gpus: Mapping[str, tuple[str, Any]]) -> Wiring:
    """The links of every pair of GPUs: id -> PCI address, NVML handle. A GPU that fails costs its own links alone."""
    askers = {name: Asker(nvml) for name in gpus}
    by_address = {where: name for name, (where, _) in gpus.items() if where}
    direct: Counter[tuple[str, str]] = Counter()
    switched: dict[str, int] = {}
    for name, (_, handle) in gpus.items():
        remotes = Counter(_remotes(askers[name], handle, by_address))
        switched[name] = remotes.pop(None, 0)
        # Both ends count the same links; one of them may have failed to.
        for other, lanes in remotes.items():
            if other is not None and other != name:
                pair = (min(name, other), max(name, other))
                direct[pair] = max(direct[pair], lanes)
    links = []
    complete = all(asker.failed is None for asker in askers.values())
    for a, b in combinations(sorted(gpus), 2):
        # Every GPU's links into a switch reach every other GPU on it.
        lanes = direct[a, b] or min(switched[a], switched[b])
        if lanes:
            links.append(Link(a, b, "nvlink", lanes))
        else:
            # Either of the two may be the one that fails, so nothing is held against the first.
            pair_asker = Asker(nvml)
            if over_pcie := _over_pcie(pair_asker, gpus[a][1], gpus[b][1]):
                links.append(Link(a, b, over_pcie))
            complete = complete and pair_asker.failed is None
    return Wiring(tuple(links), switched, complete)


def _remotes(asker: Asker, handle: Any, by_address: Mapping[str, str]) -> list[str | None]:
    """Where a GPU's active NVLinks lead: to the id of a GPU, or None: into a switch."""
    nvml, ask = asker.nvml, asker.ask
    remotes: list[str | None] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if ask(nvml.nvmlDeviceGetNvLinkState, handle, link) != 1:
            continue  # down, or the GPU has not so many
        where = by_address.get(address(ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)))
        if where is not None:
            remotes.append(where)
        elif ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            remotes.append(None)
    return remotes


def _over_pcie(asker: Asker, one: Any, other: Any) -> Connection | None:
    nvml = asker.nvml
    connections: dict[int, Connection] = {
        nvml.NVML_TOPOLOGY_INTERNAL: "same-board",
        nvml.NVML_TOPOLOGY_SINGLE: "single-switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "multi-switch",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "host-bridge",
        nvml.NVML_TOPOLOGY_NODE: "same-cpu",
        nvml.NVML_TOPOLOGY_SYSTEM: "cross-cpu",
    }
    ancestor = asker.ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    return None if ancestor is None else connections.get(ancestor)
