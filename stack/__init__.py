"""The embedded stack: Temporal, etcd, a Kubernetes control plane and kwok on one machine, built and supervised.

For the command line, tests, the demo and the benchmarks. Knows nothing of berth's other rooms: the application's own
processes are handed to it as `ProcessSpec`s.
"""

from __future__ import annotations

from stack.embedded import Stack
from stack.endpoints import APPLICATION_PORTS, Endpoints
from stack.errors import StackError
from stack.kwok import SimulatedNode, node_manifest, node_manifests
from stack.options import ExistingCluster, ExistingTemporal, UpOptions
from stack.paths import default_data
from stack.process import Probe, ProcessSpec, ProcessStatus
from stack.progress import Lines, Progress, Silent, Terminal
from stack.realnode import cdi_folder, kubelet_root

__all__ = [
    "APPLICATION_PORTS",
    "Endpoints",
    "ExistingCluster",
    "ExistingTemporal",
    "Lines",
    "Probe",
    "ProcessSpec",
    "ProcessStatus",
    "Progress",
    "Silent",
    "SimulatedNode",
    "Stack",
    "StackError",
    "Terminal",
    "UpOptions",
    "cdi_folder",
    "default_data",
    "kubelet_root",
    "node_manifest",
    "node_manifests",
]
