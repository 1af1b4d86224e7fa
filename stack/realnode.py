"""placeholder"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stack.endpoints import Endpoints
from stack.options import UpOptions
from stack.paths import Layout
from stack.pki import Authority
from stack.process import ProcessSpec

KUBELET = "kubelet"
TOOLS = ("kubelet", "containerd", "containerd-shim-runc-v2", "ctr")
PORTS = ("kubelet", "kubelet-health")


def check(options: UpOptions) -> None:
    pass


def clean(layout: Layout) -> None:
    pass


def end_pods(layout: Layout, endpoints: Endpoints) -> None:
    pass


def specs(
    layout: Layout, programs: Mapping[str, Path], ports: Mapping[str, int], authority: Authority, options: UpOptions
) -> list[ProcessSpec]:
    return []
