"""berth's own part of the embedded stack: what is installed into the cluster, and the processes that then run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from berth.install import install
from berth.version import code_id
from crds.settings import SETTINGS_NAMESPACE
from kube.client import KubeClient
from kube.resources import NODES
from stack import Endpoints, Probe, ProcessSpec, UpOptions, cdi_folder, kubelet_root
from stack.paths import write_atomic

_NODE = "berth-node"
_TOKEN_SECONDS = 365 * 24 * 3600  # as long as the certificates of the other identities; each `berth up` makes another


def after_up(endpoints: Endpoints, settings: dict[str, Any] | None = None, *, node: str = "") -> None:
    """Installs CRDs, RBAC, settings and webhooks as the cluster's admin; berth's own identities could not. With the
    name of a `node` that there is also writes the kubeconfig of that node's process.

    An existing cluster gets no webhooks: its API server does not find a controller that runs here.
    """
    webhooks = f"https://127.0.0.1:{endpoints.ports['controller-webhook']}" if endpoints.embedded_cluster else None

    async def apply() -> None:
        async with await KubeClient.connect(endpoints.kubeconfig("admin"), user_agent="berth-install") as kube:
            await install(kube, settings=settings, webhooks=webhooks)
            if node:
                await _introduce(kube, endpoints, node)

    asyncio.run(apply())


async def _introduce(kube: KubeClient, endpoints: Endpoints, node: str) -> None:
    """A certificate could not say for which node its owner speaks, and deploy/policies wants that said."""
    about = await kube.get(NODES, node)
    bound = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": str(about["metadata"]["uid"])}
    token = await kube.token(_NODE, SETTINGS_NAMESPACE, bound_to=bound, seconds=_TOKEN_SECONDS)
    config = yaml.safe_load(endpoints.kubeconfig("admin").read_text())
    config["users"] = [{"name": each["name"], "user": {"token": token}} for each in config["users"]]
    write_atomic(_node_kubeconfig(endpoints), yaml.safe_dump(config, sort_keys=False), 0o600)


def _node_kubeconfig(endpoints: Endpoints) -> Path:
    return endpoints.kubeconfig("admin").with_name(f"{_NODE}.yaml")


def application_processes(
    endpoints: Endpoints, options: UpOptions, *, simulated_gpus: str = "", devices: Sequence[str] = ()
) -> list[ProcessSpec]:
    """`berth controller` and `berth worker`, and with a real node `berth node`, each under its own identity, on ports
    that the stack chose. `simulated_gpus`: those that the node's process pretends to find; '': it looks for real ones.
    """
    webhook = str(endpoints.ports["controller-webhook"])
    found = [
        _process("controller", endpoints, endpoints.kubeconfig("berth-controller"), "--webhook-port", webhook),
        _process("worker", endpoints, endpoints.kubeconfig("berth-worker"), "--make-current"),
    ]
    if options.has_real_node:
        found.append(node_process(endpoints, options.node_name, simulated_gpus, devices))
    return found


def node_process(endpoints: Endpoints, node: str, simulated_gpus: str, devices: Sequence[str] = ()) -> ProcessSpec:
    """`berth node` for a node of the stack that `after_up` was told of. `devices`: its options about devices."""
    return _process(
        "node", endpoints, _node_kubeconfig(endpoints),
        "--node-name", node,
        "--root", str(endpoints.data / "node" / "berth"),
        "--kubelet-root", str(kubelet_root(endpoints.data)),
        "--cdi-folder", str(cdi_folder(endpoints.data)),
        *(["--simulated-gpus", simulated_gpus] if simulated_gpus else []),
        *devices,
    )  # fmt: skip


def _process(name: str, endpoints: Endpoints, kubeconfig: Path, *arguments: str) -> ProcessSpec:
    ports: Mapping[str, int] = endpoints.ports
    health, metrics = ports[f"{name}-health"], ports[f"{name}-metrics"]
    return ProcessSpec(
        name=name,
        argv=(
            sys.executable, "-m", "berth", name,
            "--kubeconfig", str(kubeconfig),
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
