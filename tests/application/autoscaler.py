"""A simulated autoscaler: it says of ProvisioningRequests what the Cluster Autoscaler would, when a test tells it to.

Its nodes are kwok's. As real ones they come without GPUs first: the driver and the device plugin take their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from kube.client import KubeClient
from kube.reflector import Change, Reflector
from kube.resources import CRDS, NODES, PROVISIONINGREQUESTS
from planning.times import timestamp
from stack import Endpoints, SimulatedNode, node_manifest
from tests.application.tenant import Tenant, eventually

CLASS = "simulated.autoscaling.example"
KIND = Path(__file__).with_name("provisioningrequest.yaml")


def install_kind(endpoints: Endpoints) -> None:
    """Makes the API server serve ProvisioningRequests."""

    async def apply() -> None:
        async with await KubeClient.connect(endpoints.kubeconfig("admin")) as kube:
            await kube.create(CRDS, yaml.safe_load(KIND.read_text()))

            async def established() -> bool:
                raw = await kube.get(CRDS, "provisioningrequests.autoscaling.x-k8s.io")
                conditions = raw.get("status", {}).get("conditions") or []
                return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

            await eventually(established, 20, lambda: "the kind is not served")

    asyncio.run(apply())


class SimulatedAutoscaler:
    """Sees every request of its tenant, in the order in which they were made: `made` keeps those that are gone."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self.made: list[dict[str, Any]] = []
        self.open: list[str] = []
        self._reflector: Reflector[dict[str, Any]] = Reflector(
            tenant.kube,
            PROVISIONINGREQUESTS,
            namespace=tenant.namespace,
            project=lambda raw: raw,
            on_change=self._note,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedAutoscaler]:
        watching = asyncio.create_task(self._reflector.run())
        try:
            await self._reflector.synced.wait()
            yield self
        finally:
            watching.cancel()

    def _note(self, change: Change[dict[str, Any]]) -> None:
        raw = change.new or change.old
        assert raw is not None
        name = raw["metadata"]["name"]
        if change.kind == "added":
            self.made.append(raw)
            self.open.append(name)
        elif change.kind == "deleted":
            self.open.remove(name)

    async def request(self, number: int, seconds: float = 30.0) -> str:
        """The name of the tenant's request of that number, from 1 on, once it was made."""

        async def is_made() -> bool:
            return len(self.made) >= number

        await eventually(is_made, seconds, lambda: f"{len(self.made)} requests were made, not {number}")
        return str(self.made[number - 1]["metadata"]["name"])

    async def says(self, name: str, kind: str, *, ago: float = 0.0) -> None:
        """A condition becomes true of a request."""
        raw = await self._tenant.kube.get(PROVISIONINGREQUESTS, name, self._tenant.namespace)
        told = [each for each in raw.get("status", {}).get("conditions", []) if each["type"] != kind]
        told.append(
            {
                "type": kind, "status": "True", "reason": "Simulated", "message": f"simulated: {kind}",
                "lastTransitionTime": timestamp(time.time() - ago),
            }
        )  # fmt: skip
        body = {"status": {"conditions": told}}
        await self._tenant.kube.merge_patch(
            PROVISIONINGREQUESTS, name, self._tenant.namespace, body, subresource="status"
        )

    async def node(self, name: str, gpus: int) -> str:
        """A node that has just joined: its GPUs are not allocatable yet."""
        full = f"{self._tenant.namespace}-{name}"
        manifest = node_manifest(SimulatedNode(full, gpus=gpus, labels={"pool": self._tenant.namespace}))
        for offered in ("allocatable", "capacity"):
            del manifest["status"][offered]["nvidia.com/gpu"]
        await self._tenant.kube.create(NODES, manifest)
        return full

    async def offers(self, node: str, gpus: int) -> None:
        """The node's device plugin has registered its GPUs."""
        body = {"status": {key: {"nvidia.com/gpu": str(gpus)} for key in ("allocatable", "capacity")}}
        await self._tenant.kube.merge_patch(NODES, node, None, body, subresource="status")

    async def nothing_left(self, seconds: float = 30.0) -> None:
        """Waits until no request is there any more."""

        async def none() -> bool:
            return not self.open

        await eventually(none, seconds, lambda: f"requests are left: {self.open}")
