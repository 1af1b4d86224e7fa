"""Which devices the kubelet remembers to have given to pods that it has not cleaned up yet: its own files say so, also
while it cannot know its pods.

For `nodeworkers/devices/holdings.py`. A kubelet that starts while the API server is away lists no pods, and their
containers run on. Its device manager's checkpoint still has their devices, and drops a pod's only once all its sources
of pods have answered (UpdateAllocatedDevices in kubernetes' pkg/kubelet/cm/devicemanager/manager.go); so does it keep
the folder of a pod (HandlePodCleanups in pkg/kubelet/kubelet_pods.go). The checkpoint is written when something is
given or told, and may name pods that are gone by then: their folders are gone as well.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

CHECKPOINT = "kubelet_internal_checkpoint"  # in the folder of device plugins
_LIMIT = 64 * 1024 * 1024  # bytes: each of 10,000 devices has an answer of Allocate of some kilobytes
_log = logging.getLogger(__name__)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Entry(_Strict):
    """PodDevicesEntry of kubernetes' pkg/kubelet/cm/devicemanager/checkpoint; devices by NUMA node."""

    pod: str = Field(alias="PodUID")
    devices: dict[str, list[str]] | None = Field(alias="DeviceIDs")


class _Data(_Strict):
    entries: list[_Entry] | None = Field(alias="PodDeviceEntries")


class _Document(_Strict):
    data: _Data = Field(alias="Data")


class Checkpoint:
    """One kubelet's. Blocks: it reads files."""

    def __init__(self, kubelet_root: Path, plugins: Path) -> None:
        """`kubelet_root` as the kubelet has it as --root-dir; `plugins` is its folder of device plugins."""
        self._pods, self._file = kubelet_root / "pods", plugins / CHECKPOINT

    def kept(self) -> frozenset[str] | None:
        """The ids of the devices that pods have of which the kubelet still keeps a folder; None where its files do not
        tell, which is not that there are none.
        """
        try:
            if self._file.stat().st_size > _LIMIT:
                raise ValueError(f"it has more than {_LIMIT} bytes")
            entries = _Document.model_validate_json(self._file.read_bytes()).data.entries or ()
            pods = set(os.listdir(self._pods))
        except OSError as error:
            _log.debug("What the kubelet remembers of devices cannot be read: %s", error)
            return None
        except ValueError as error:
            _log.warning("%s is not a kubelet's checkpoint as this berth knows it: %s", self._file, error)
            return None
        return frozenset(
            device for each in entries if each.pod in pods for ids in (each.devices or {}).values() for device in ids
        )
