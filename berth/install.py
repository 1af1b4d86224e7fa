"""Puts berth's own objects into a cluster: CRDs, RBAC, admission policies, the CSI driver, DeviceClasses, settings,
webhooks. For `berth up`, the demo and the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import yaml

from crds.settings import SETTINGS_KEY, SETTINGS_NAME, SETTINGS_NAMESPACE
from kube.client import KubeClient
from kube.errors import AlreadyExists, NotFound, Unavailable
from kube.resources import CONFIGMAPS, CRDS, DEVICECLASSES, GPUMODELPROFILES, GPUWORKLOADS, Resource, resource_for

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
FIELD_MANAGER = "berth-install"
# Not deploy/node: what runs the processes is for the cluster's owner, and the embedded stack needs no DaemonSet.
_FOLDERS = ("crds", "rbac", "policies", "csi")


def manifests(folder: str) -> list[dict[str, Any]]:
    """The manifests of deploy/<folder>, from the checkout or from the installed package, in file order."""
    for root in (_HERE / "_deploy", _HERE.parent / "deploy"):
        if (root / folder).is_dir():
            return [
                document
                for file in sorted((root / folder).glob("*.yaml"))
                for document in yaml.safe_load_all(file.read_text())
                if document
            ]
    raise FileNotFoundError(f"deploy/{folder} is neither in the checkout nor in the installed package")


async def install(
    kube: KubeClient, *, settings: dict[str, Any] | None = None, webhooks: str | None = None, timeout: float = 60.0
) -> None:
    """Applies CRDs, RBAC, policies, the CSIDriver and the DeviceClasses by server-side apply, and waits until the CRDs
    are served. A cluster without resource.k8s.io/v1 gets no DeviceClasses, which a warning says.

    Existing settings are left alone; `settings` replaces them where given. `webhooks` is the address at which the API
    server finds the controller's webhooks, if it does. Raises KubeError with what was refused.
    """
    called = webhook_manifests(webhooks) if webhooks is not None else []
    for manifest in [*(each for folder in _FOLDERS for each in manifests(folder)), *called]:
        metadata = manifest["metadata"]
        await kube.apply(
            resource_for(manifest), metadata["name"], metadata.get("namespace"), manifest, field_manager=FIELD_MANAGER
        )
    await _apply_device_classes(kube)
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SETTINGS_NAME, "namespace": SETTINGS_NAMESPACE},
        "data": {SETTINGS_KEY: yaml.safe_dump(settings or {})},
    }
    if settings is not None:
        await kube.apply(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE, body, field_manager=FIELD_MANAGER)
    else:
        with contextlib.suppress(AlreadyExists):
            await kube.create(CONFIGMAPS, body, SETTINGS_NAMESPACE)
    for kind in (GPUWORKLOADS, GPUMODELPROFILES):
        await _served(kube, kind, timeout)


async def _apply_device_classes(kube: KubeClient) -> None:
    """All else works without them: nodes of such a cluster offer their devices by device plugin."""
    try:
        for manifest in manifests("dra"):
            await kube.apply(DEVICECLASSES, manifest["metadata"]["name"], None, manifest, field_manager=FIELD_MANAGER)
    except NotFound:
        log.warning(
            "the DeviceClasses of deploy/dra are not installed, for this cluster does not serve %s (Kubernetes 1.34 "
            "and newer do): its nodes can offer devices by device plugin only; install again after an upgrade",
            DEVICECLASSES.api_version,
        )


def webhook_manifests(address: str) -> list[dict[str, Any]]:
    """deploy/webhooks for a controller outside the cluster: its webhooks are called at an address, not by a Service."""
    found = [manifest for manifest in manifests("webhooks") if manifest["kind"] != "Service"]
    for manifest in found:
        for hook in manifest.get("webhooks", ()):
            hook["clientConfig"] = {"url": address + hook["clientConfig"]["service"]["path"]}
    return found


async def _served(kube: KubeClient, kind: Resource, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            crd = await kube.get(CRDS, kind.qualified)
            conditions = {c["type"]: c for c in crd.get("status", {}).get("conditions", [])}
            if conditions.get("NonStructuralSchema", {}).get("status") == "True":
                raise RuntimeError(
                    f"the CRD {kind.qualified} is refused: {conditions['NonStructuralSchema']['message']}"
                )
            await kube.list(kind, "default", page_size=1)
            return
        except (NotFound, Unavailable) as not_yet:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the API server does not serve {kind.plural} after {timeout:.0f} s") from not_yet
            await asyncio.sleep(0.1)
