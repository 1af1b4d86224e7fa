"""What tests of the webhooks share: questions as an API server puts them, manifests as installed, and a client that
trusts what the configurations say, at a moment of its own.
"""

from __future__ import annotations

import base64
import io
import ssl
import time
from datetime import UTC, datetime
from typing import Any

import aiohttp
import orjson
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from berth.install import webhook_manifests
from controller.webhooks.issue import made
from controller.webhooks.keeper import CONFIGURATIONS
from controller.webhooks.material import SECRET_NAME, SECRET_NAMESPACE, Material, blocks
from kube.resources import MUTATING_WEBHOOKS, SECRETS, VALIDATING_WEBHOOKS, resource_for
from planning.certificates import Step
from tests.kube.fake_api import FakeApi

HOST = "localhost"
PLAIN: dict[str, Any] = {"modelName": "m", "gpuCount": 1}


def question(spec: object = PLAIN, old: object = None, **more: Any) -> bytes:
    request: dict[str, Any] = {
        "uid": "a-b-c",
        "kind": {"group": "gpu.warp.dev", "version": "v1alpha1", "kind": "GPUWorkload"},
        "namespace": "team-a",
        "operation": "CREATE" if old is None else "UPDATE",
        "object": {"metadata": {"name": "w"}, "spec": spec},
        "oldObject": None if old is None else {"metadata": {"name": "w"}, "spec": old},
    }
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {**request, **more}}
    return orjson.dumps(review)


def quota_question(name: str, spec: object) -> bytes:
    kind = {"group": "gpu.warp.dev", "version": "v1alpha1", "kind": "GPUQuota"}
    return question(kind=kind, namespace="", object={"metadata": {"name": name}, "spec": spec})


def reservation_question(name: str, spec: object) -> bytes:
    kind = {"group": "gpu.warp.dev", "version": "v1alpha1", "kind": "GPUReservation"}
    return question(kind=kind, namespace="", object={"metadata": {"name": name}, "spec": spec})


def cache_question(spec: object, kind: str = "TritonKernelCache", group: str = "tkm.io", old: object = None) -> bytes:
    namespace = "team-a" if kind == "TritonKernelCache" else ""
    return question(spec, old, kind={"group": group, "version": "v1alpha1", "kind": kind}, namespace=namespace)


def fresh(*hosts: str, now: float | None = None) -> Material:
    return made(Step.BEGIN, Material(), hosts or (HOST,), time.time() if now is None else now)


def trusting(authorities: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authorities)


async def post(url: str, body: bytes, context: ssl.SSLContext, **headers: str) -> tuple[int, bytes]:
    connector = aiohttp.TCPConnector(ssl=context)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.post(url, data=io.BytesIO(body), headers=headers) as answer,
    ):
        return answer.status, await answer.read()


def installed(api: FakeApi, address: str = f"https://{HOST}:1") -> None:
    """deploy/webhooks, as `berth up` applies it: what is in the Secret is not its, and stays."""
    for manifest in webhook_manifests(address):
        metadata = manifest.pop("metadata")
        if manifest["kind"] == "Secret":
            manifest["data"] = api.objects(SECRETS).get((SECRET_NAMESPACE, SECRET_NAME), {}).get("data", {})
        api.put(resource_for(manifest), metadata["name"], metadata.get("namespace"), **manifest)


def bundle(api: FakeApi) -> str:
    """What all webhooks trust."""
    found = {
        hook["clientConfig"].get("caBundle", "")
        for resource in (VALIDATING_WEBHOOKS, MUTATING_WEBHOOKS)
        for hook in api.objects(resource)["", CONFIGURATIONS]["webhooks"]
    }
    (same,) = found
    return base64.b64decode(same).decode()


def stored(api: FakeApi) -> dict[str, str]:
    data = api.objects(SECRETS)[SECRET_NAMESPACE, SECRET_NAME].get("data", {})
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def verified(certificate: str, authorities: str, host: str, now: float) -> None:
    """Raises if a client that trusts these would not speak to who serves this."""
    store = Store([x509.load_pem_x509_certificate(block.encode()) for block in blocks(authorities)])
    at = datetime.fromtimestamp(now, UTC)
    PolicyBuilder().store(store).time(at).build_server_verifier(x509.DNSName(host)).verify(
        x509.load_pem_x509_certificate(certificate.encode()), []
    )
