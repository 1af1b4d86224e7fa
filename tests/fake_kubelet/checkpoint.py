"""The file that the kubelet's device manager keeps: `kubelet_internal_checkpoint`, byte for byte, with its checksum.

pkg/kubelet/cm/devicemanager/checkpoint and pkg/kubelet/checkpointmanager/checksum of Kubernetes 1.36.3.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "kubelet_internal_checkpoint"


class Corrupt(Exception):
    """The file cannot be believed. The kubelet goes on without it."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """The devices of one resource that one container has. `devices` by NUMA node; -1 for those without.
    `response`: the ContainerAllocateResponse, serialized.
    """

    pod_uid: str
    container: str
    resource: str
    devices: Mapping[int, Sequence[str]]
    response: bytes


def encode(allocated: Sequence[Allocated], registered: Mapping[str, Sequence[str]]) -> bytes:
    """The file's content. `registered`: the healthy devices of each resource."""
    entries = [
        {
            "PodUID": each.pod_uid,
            "ContainerName": each.container,
            "ResourceName": each.resource,
            "DeviceIDs": {
                str(node): list(ids) for node, ids in sorted(each.devices.items(), key=lambda it: str(it[0]))
            },
            "AllocResp": base64.b64encode(each.response).decode(),
        }
        for each in allocated
    ]
    data = {
        "PodDeviceEntries": entries or None,  # Go's nil slice
        "RegisteredDevices": {name: list(registered[name]) for name in sorted(registered)},
    }
    text = json.dumps({"Data": data, "Checksum": checksum(data)}, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


def decode(blob: bytes) -> tuple[list[Allocated], dict[str, list[str]]]:
    """What `encode` was given. Raises Corrupt."""
    try:
        read = json.loads(blob)
        data = read["Data"]
        if (found := checksum(data)) != read["Checksum"]:
            raise Corrupt(f"checkpoint is corrupted: its checksum is {read['Checksum']} and should be {found}")
        allocated = [
            Allocated(
                each["PodUID"],
                each["ContainerName"],
                each["ResourceName"],
                {int(node): list(ids or ()) for node, ids in (each["DeviceIDs"] or {}).items()},
                base64.b64decode(each["AllocResp"] or ""),
            )
            for each in data["PodDeviceEntries"] or ()
        ]
        return allocated, {name: list(ids or ()) for name, ids in (data["RegisteredDevices"] or {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"checkpoint cannot be read: {error!r}") from error


def checksum(data: Mapping[str, Any]) -> int:
    """FNV-1a, 32 bits, of the data as go-spew prints them by %#v with sorted keys (dump.ForHash)."""
    value = 2166136261
    for byte in _spew(data).encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def write(folder: Path, blob: bytes) -> None:
    """Whole or not at all, as the kubelet's file store does."""
    scratch = folder / f".{FILE}.new"
    scratch.write_bytes(blob)
    os.replace(scratch, folder / FILE)


def _spew(data: Mapping[str, Any]) -> str:
    entries = data["PodDeviceEntries"]
    shown = "<nil>" if entries is None else f"[{' '.join(_spew_entry(each) for each in entries)}]"
    registered = _spew_map(data["RegisteredDevices"], sorted)
    return (
        "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)"
        f"{shown} RegisteredDevices:(map[string][]string){registered}}}"
    )


def _spew_entry(entry: Mapping[str, Any]) -> str:
    response = entry["AllocResp"]
    octets = "<nil>" if response is None else f"[{' '.join(map(str, base64.b64decode(response)))}]"
    devices = _spew_map(entry["DeviceIDs"], lambda keys: sorted(keys, key=int))
    return (
        f"{{PodUID:(string){entry['PodUID']} ContainerName:(string){entry['ContainerName']}"
        f" ResourceName:(string){entry['ResourceName']} DeviceIDs:(checkpoint.DevicesPerNUMA){devices}"
        f" AllocResp:([]uint8){octets}}}"
    )


def _spew_map(values: Mapping[str, Sequence[str] | None] | None, order: Any) -> str:
    if values is None:
        return "<nil>"
    shown = {key: "<nil>" if ids is None else f"[{' '.join(ids)}]" for key, ids in values.items()}
    return f"map[{' '.join(f'{key}:{shown[key]}' for key in order(shown))}]"
