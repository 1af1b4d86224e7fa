"""Simulated nodes: the Node objects that kwok keeps alive, and kwok's configuration.

For the demo, tests and benchmarks, which create the manifests with a client of their own, and for `control_plane.py`.
What a simulated node does with pods is in `stages/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

STAGES = Path(__file__).parent / "stages"
ANNOTATION = "kwok.x-k8s.io/node"


@dataclass(frozen=True)
class SimulatedNode:
    """One node to simulate. `cpu` in cores, `memory` in GiB, `gpu_model` as in the label nvidia.com/gpu.product."""

    name: str
    gpus: int = 0
    gpu_model: str = ""
    cpu: int = 64
    memory: int = 256
    pods: int = 110
    labels: Mapping[str, str] = field(default_factory=dict)


def node_manifest(node: SimulatedNode) -> dict[str, Any]:
    """The Node object; created with its status, which kwok then keeps."""
    resources = {"cpu": str(node.cpu), "memory": f"{node.memory}Gi", "pods": str(node.pods), "ephemeral-storage": "1Ti"}
    labels = {
        "kubernetes.io/hostname": node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "node.kubernetes.io/instance-type": "kwok",
        "type": "kwok",
        "gpu.warp.dev/simulated": "true",
    }
    if node.gpus:
        resources["nvidia.com/gpu"] = str(node.gpus)
        labels["nvidia.com/gpu.present"] = "true"
        labels["nvidia.com/gpu.count"] = str(node.gpus)
        if node.gpu_model:
            labels["nvidia.com/gpu.product"] = node.gpu_model
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.name,
            "labels": labels | dict(node.labels),
            "annotations": {ANNOTATION: "fake", "node.alpha.kubernetes.io/ttl": "0"},
        },
        "status": {"allocatable": resources, "capacity": dict(resources), "phase": "Running"},
    }


def node_manifests(nodes: Iterable[SimulatedNode]) -> list[dict[str, Any]]:
    """The Node objects for a fleet."""
    return [node_manifest(node) for node in nodes]


def configuration(lease_seconds: int) -> str:
    """kwok's configuration file: the stages, and enough parallelism that kwok never is what a benchmark measures."""
    options = {
        "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
        "kind": "KwokConfiguration",
        "options": {
            "enableCRDs": [],
            "manageAllNodes": False,
            "manageNodesWithAnnotationSelector": f"{ANNOTATION}=fake",
            "podPlayStageParallelism": 64,
            "nodePlayStageParallelism": 32,
            "nodeLeaseParallelism": 16,
            "podsOnNodeSyncParallelism": 16,
            "nodeLeaseDurationSeconds": lease_seconds,
            "enablePodsOnNodeSyncStreamWatch": True,
        },
    }
    parts = [yaml.safe_dump(options, sort_keys=False)]
    parts += [file.read_text() for file in sorted(STAGES.glob("*.yaml"))]
    return "---\n".join(parts)
