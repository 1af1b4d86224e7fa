"""What the kubelet's own files tell of devices: the real format, and whatever else may lie there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.device_plugin import checkpoint
from nodeworkers.device_plugin.checkpoint import CHECKPOINT, Checkpoint

UIDS = ("6d4d6a1e-7f2b-4d0e-9d63-000000000001", "6d4d6a1e-7f2b-4d0e-9d63-000000000002")


def entry(pod: str, container: str, devices: dict[str, list[str]] | None) -> dict[str, Any]:
    """PodDevicesEntry of pkg/kubelet/cm/devicemanager/checkpoint, as encoding/json writes it."""
    return {
        "PodUID": pod,
        "ContainerName": container,
        "ResourceName": "tenstorrent.com/n150",
        "DeviceIDs": devices,
        "AllocResp": "CgsKAUESBg==",
    }


def document(*entries: dict[str, Any]) -> bytes:
    data = {"PodDeviceEntries": list(entries) or None, "RegisteredDevices": {"tenstorrent.com/n150": ["tt-1"]}}
    return json.dumps({"Data": data, "Checksum": 1234567890}).encode()


class Kubelet:
    def __init__(self, root: Path) -> None:
        self.pods, self.plugins = root / "pods", root / "device-plugins"
        for uid in UIDS:
            (self.pods / uid).mkdir(parents=True)
        self.plugins.mkdir()
        self.checkpoint = Checkpoint(root, self.plugins)

    def writes(self, content: bytes) -> None:
        (self.plugins / CHECKPOINT).write_bytes(content)


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    return Kubelet(tmp_path)


def test_the_devices_of_pods_that_the_kubelet_has_not_cleaned_up(kubelet: Kubelet) -> None:
    kubelet.writes(
        document(
            entry(UIDS[0], "init", {"-1": ["tt-1"]}),
            entry(UIDS[0], "main", {"0": ["tt-1", "tt-2"], "1": ["tt-3"]}),
            entry(UIDS[1], "main", None),
            entry("gone", "main", {"-1": ["tt-4"]}),
        )
    )
    assert kubelet.checkpoint.kept() == frozenset(("tt-1", "tt-2", "tt-3"))
    (kubelet.pods / UIDS[0]).rmdir()
    assert kubelet.checkpoint.kept() == frozenset()
    kubelet.writes(document())
    assert kubelet.checkpoint.kept() == frozenset()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"{}", b'{"Data": null}', b'{"Data": {"PodDeviceEntries": 7}}', b"\xff\xfe",
        b'{"Data": {"PodDeviceEntries": [{"PodUID": "a"}]}}', b'{"Data": {"PodDeviceEntries": ["a"]}}',
        document(entry(UIDS[0], "main", {"-1": [7]})),  # type: ignore[list-item]
        document({**entry(UIDS[0], "main", {}), "DeviceIDs": ["tt-1"]}), b" " * 2000,
    ],
)  # fmt: skip
def test_what_cannot_be_read_tells_nothing_which_is_not_that_all_is_free(
    kubelet: Kubelet, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_LIMIT", 1000)
    kubelet.writes(content)
    assert kubelet.checkpoint.kept() is None


def test_files_that_are_not_there_tell_nothing(kubelet: Kubelet) -> None:
    assert kubelet.checkpoint.kept() is None
    kubelet.writes(document(entry(UIDS[0], "main", {"-1": ["tt-1"]})))
    for uid in UIDS:
        (kubelet.pods / uid).rmdir()
    kubelet.pods.rmdir()
    assert kubelet.checkpoint.kept() is None
