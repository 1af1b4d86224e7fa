"""berth's own part of the embedded stack: what is installed into the cluster, and the processes that then run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from berth.install import install
from berth.version import code_id
from kube.client import KubeClient
from stack import Endpoints, Probe, ProcessSpec, UpOptions


def after_up(endpoints: Endpoints, settings: dict[str, Any] | None = None) -> None:
    """Installs CRDs, RBAC, settings and webhooks as the cluster's admin; berth's own identities could not.

    An existing cluster gets no webhooks: its API server does not find a controller that runs here.
    """
    webhooks = f"https://127.0.0.1:{endpoints.ports['controller-webhook']}" if endpoints.embedded_cluster else None

    async def apply() -> None:
        async with await KubeClient.connect(endpoints.kubeconfig("admin"), user_agent="berth-install") as kube:
            await install(kube, settings=settings, webhooks=webhooks)

    asyncio.run(apply())


def application_processes(endpoints: Endpoints, options: UpOptions) -> list[ProcessSpec]:
    """`berth controller` and `berth worker`, each under its own identity, on ports that the stack chose."""
    webhook = str(endpoints.ports["controller-webhook"])
    return [
        _process("controller", endpoints, "--webhook-port", webhook),
        _process("worker", endpoints, "--make-current"),
    ]


def _process(name: str, endpoints: Endpoints, *arguments: str) -> ProcessSpec:
    ports: Mapping[str, int] = endpoints.ports
    health, metrics = ports[f"{name}-health"], ports[f"{name}-metrics"]
    return ProcessSpec(
        name=name,
        argv=(
            sys.executable, "-m", "berth", name,
            "--kubeconfig", str(endpoints.kubeconfig(f"berth-{name}")),
            "--health-port", str(health),
            "--metrics-port", str(metrics),
            "--bind", "127.0.0.1",
            *arguments,
        ),
        env={
            **endpoints.temporal_environment(),
            # One arena for each of a dozen threads would double what the process holds.
            "MALLOC_ARENA_MAX": "2",
            # Nobody reads it, but a process whose description differs is started anew: new code takes effect.
            "BERTH_CODE": code_id(),
        },
        ready=(Probe("http", f"http://127.0.0.1:{health}/readyz"),),
        port=health,
        stop_timeout=25.0,
    )  # fmt: skip
