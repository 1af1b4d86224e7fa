"""Kernel caches on a real kube-apiserver: what is taken and refused, and that a node speaks for itself alone."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.install import manifests
from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from crds.kernelcachepolicy import KernelCachePolicySpec
from kube.client import KubeClient
from kube.errors import AccessDenied, KubeError
from kube.resources import SECRETS, TRITONKERNELCACHENODESTATUSES
from stack import Stack

IMAGE = {"ociImage": {"image": "registry.example/team/cache:v1"}}
KEY = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----\n"
ROOT = {"name": "roots", "key": "trusted_root.json"}


@pytest.fixture(scope="module")
def door(stack: Stack) -> Iterator[str]:
    """A namespace in a cluster with berth's kinds, rights and policies."""
    for manifest in [*manifests("crds"), *manifests("rbac"), *manifests("policies")]:
        stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(manifest))
    stack.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    namespace = f"caches-{uuid.uuid4().hex[:8]}"
    stack.kubectl("create", "namespace", namespace)
    yield namespace
    stack.kubectl("delete", "namespace", namespace, "--wait=false")


def create(stack: Stack, kind: str, name: str, namespace: str | None, spec: object, *args: str) -> str:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    body = {"apiVersion": "tkm.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
    return stack.kubectl("create", "-f", "-", "-o", "json", *args, stdin=json.dumps(body))


def refused(stack: Stack, kind: str, name: str, namespace: str | None, spec: object, *args: str) -> str:
    with pytest.raises(Exception) as caught:
        create(stack, kind, name, namespace, spec, *args)
    return str(caught.value) + str(getattr(caught.value, "stderr", "")) + str(getattr(caught.value, "hint", ""))


@pytest.mark.stack
def test_what_is_left_out_is_filled_in(stack: Stack, door: str) -> None:
    there = json.loads(create(stack, "TritonKernelCache", "plain", door, IMAGE))
    assert there["spec"]["ociImage"]["pullPolicy"] == "IfNotPresent" and there["spec"]["validateSignature"] is True
    assert there["spec"]["updatePolicy"] == {
        "type": "Manual", "intervalSeconds": 600, "maxUnavailable": 1, "automaticRollback": True
    }  # fmt: skip
    spec, wrong = TritonKernelCacheSpec.parse(there["spec"])
    assert spec is not None and not wrong


# The API server's schema says no, or the model does; never neither. `by_model`: only the model can tell.
WRONG: list[tuple[dict[str, Any], str, bool]] = [
    ({}, "ociImage", False),
    ({"ociImage": {"image": ""}}, "ociImage.image", False),
    ({"ociImage": {"image": "a b"}}, "ociImage.image", False),
    ({"ociImage": {"image": "r/x@sha256:12"}}, "ociImage.image", False),
    ({"ociImage": {**IMAGE["ociImage"], "pullPolicy": "Sometimes"}}, "pullPolicy", False),
    ({**IMAGE, "mountPath": "relative"}, "mountPath", True),
    ({**IMAGE, "mountPath": "/a/../b"}, "mountPath", True),
    ({**IMAGE, "mountPath": "/a//b"}, "mountPath", True),
    ({**IMAGE, "mountPath": "/" + "a" * 2000}, "mountPath", False),
    ({**IMAGE, "runtime": {"environment": {"A=B": "1"}}}, "environment", True),
    ({**IMAGE, "updatePolicy": {"intervalSeconds": 1}}, "intervalSeconds", False),
    ({**IMAGE, "updatePolicy": {"maxUnavailable": 0}}, "maxUnavailable", True),
    ({**IMAGE, "updatePolicy": {"maxUnavailable": "0%"}}, "maxUnavailable", True),
    ({**IMAGE, "updatePolicy": {"maxUnavailable": "200%"}}, "maxUnavailable", True),
    ({**IMAGE, "updatePolicy": {"maxUnavailable": "many"}}, "maxUnavailable", False),
    ({**IMAGE, "nodeSelector": {"a b": "c"}}, "nodeSelector", True),
    ({**IMAGE, "validateSignature": "no"}, "validateSignature", False),
]


@pytest.mark.parametrize(("spec", "where", "by_model"), WRONG)
def test_the_model_refuses_what_is_wrong_with_its_place(spec: dict[str, Any], where: str, by_model: bool) -> None:
    parsed, wrong = TritonKernelCacheSpec.parse(spec)
    assert parsed is None and where in wrong


@pytest.mark.stack
@pytest.mark.parametrize(("spec", "where", "by_model"), [each for each in WRONG if not each[2]])
def test_the_api_server_refuses_it_too(
    stack: Stack, door: str, spec: dict[str, Any], where: str, by_model: bool
) -> None:
    assert where in refused(stack, "TritonKernelCache", "wrong", door, spec)


@pytest.mark.parametrize("raw", [None, 1, "x", [], {"ociImage": []}, {"ociImage": {"image": "x" * 10**6}}])
def test_whatever_a_spec_is_nothing_is_raised(raw: object) -> None:
    for model in (TritonKernelCacheSpec, TritonKernelCacheClusterSpec, KernelCachePolicySpec):
        parsed, wrong = model.parse(raw)
        assert parsed is None and wrong.startswith("spec")


@pytest.mark.stack
def test_a_clusters_pull_secret_needs_its_namespace(stack: Stack, door: str) -> None:
    spec = {"ociImage": {**IMAGE["ociImage"], "pullSecret": "s"}}
    assert "go together" in refused(stack, "TritonKernelCacheCluster", f"{door}-c", None, spec)


POLICIES: list[tuple[dict[str, Any], str]] = [
    ({"images": ["r.example/**"], "signers": []}, "signers"),
    ({"images": [], "signers": [{"name": "a", "key": KEY}]}, "images"),
    ({"images": ["r.example/**"], "signers": [{"name": "a"}]}, "exactly one"),
    (
        {"images": ["r.example/**"], "signers": [{"name": "a", "key": KEY, "certificate": {"authorities": KEY}}]},
        "exactly one",
    ),
    (
        {
            "images": ["r.example/**"],
            "signers": [{"name": "a", "keyless": {"issuer": "i", "trustedRoot": ROOT}}],
        },
        "exactly one",
    ),
]


@pytest.mark.stack
@pytest.mark.parametrize(("spec", "why"), POLICIES)
def test_a_policy_that_says_too_little_or_too_much_is_refused(
    stack: Stack, door: str, spec: dict[str, Any], why: str
) -> None:
    assert why in refused(stack, "KernelCachePolicy", f"{door}-p", None, spec)


@pytest.mark.parametrize("pattern", [".*@example.com", "^a", "b$", "^($"])
def test_a_pattern_must_say_the_whole_and_be_one(pattern: str) -> None:
    signer = {"name": "a", "keyless": {"issuer": "i", "identityPattern": pattern, "trustedRoot": ROOT}}
    parsed, wrong = KernelCachePolicySpec.parse({"images": ["r.example/**"], "signers": [signer]})
    assert parsed is None and "identityPattern" in wrong


def account(stack: Stack, file: Path, token: str) -> Path:
    """A kubeconfig of berth-node: by a token, and by nobody's certificate."""
    config = yaml.safe_load(stack.endpoints.kubeconfig("admin").read_text())
    config["users"] = [{"name": each["name"], "user": {"token": token}} for each in config["users"]]
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.stack
async def test_a_node_speaks_for_itself_alone(stack: Stack, door: str, tmp_path: Path) -> None:
    node, kind = f"{door}-node", TRITONKERNELCACHENODESTATUSES
    stack.kubectl(
        "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    )
    uid = json.loads(stack.kubectl("get", "node", node, "-o", "json"))["metadata"]["uid"]
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}", f"--bound-object-uid={uid}")
    asked = ("create", "token", "berth-node", "-n", "berth-system")
    mine = account(stack, tmp_path / "mine", stack.kubectl(*asked, *bound).strip())
    free = account(stack, tmp_path / "free", stack.kubectl(*asked).strip())

    def about(name: str, node_name: str) -> dict[str, Any]:
        spec = {"nodeName": node_name, "kernelCacheRef": {"name": "c", "uid": "u"}}
        return {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": name, "namespace": door},
            "spec": spec,
        }

    stack.kubectl("create", "-f", "-", stdin=json.dumps(about("others", "other")))
    body = {"status": {"digest": "sha256:" + "0" * 64}}
    foreign = "may not speak for node other"
    async with await KubeClient.connect(mine) as kube, await KubeClient.connect(free) as unbound:
        await kube.create(kind, about("mine", node), door)
        with pytest.raises(KubeError, match=foreign):
            await kube.create(kind, about("x", "other"), door)
        with pytest.raises(KubeError, match="names no node"):
            await unbound.create(kind, about("x", node), door)
        with pytest.raises(KubeError, match=foreign):
            await kube.merge_patch(kind, "others", door, body, subresource="status")
        with pytest.raises(KubeError, match=foreign):
            await kube.delete(kind, "others", door)
        with pytest.raises(AccessDenied):
            await kube.get(SECRETS, "s", door)
        await kube.merge_patch(kind, "mine", door, body, subresource="status")
        await kube.delete(kind, "mine", door)
    stack.kubectl("delete", "node", node)


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    since = "2026-11-22T12:00:00Z"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


DIGEST = "sha256:" + "0" * 64
CACHE_STATUS = {
    "rollout": "3/40",
    "counts": {"nodes": 40, "ready": 3, "incompatible": 1, "failed": 2, "outdated": 5, "pods": 7},
    "resolvedDigest": DIGEST,
    "conditions": [
        condition("Verified", "True", "Verified"),
        condition("Ready", "False", "Failing", "2 of 40 nodes cannot prepare it"),
        condition("Outdated", "True", "RollingOut"),
    ],
}
NODE_SPEC = {"nodeName": "node-a", "kernelCacheRef": {"name": "warm", "uid": "u"}}
NODE_STATUS = {
    "gpuType": "NVIDIA-H200",
    "simulated": True,
    "podsUsing": 7,
    "digest": DIGEST,
    "conditions": [
        condition("Verified", "True", "Verified"),
        condition("Compatible", "True", "Compatible"),
        condition("HitPredicted", "Unknown", "RuntimeNotGiven"),
        condition("Ready", "True", "Ready", "it can be mounted"),
    ],
}
POLICY_SPEC = {
    "images": ["r.example/team/**", "r.example/other/*"],
    "namespaces": ["serving", "research"],
    "allowSkipping": True,
    "signers": [{"name": "release", "key": KEY}, {"name": "pipeline", "key": KEY}],
}
CACHE_ROW = {"IMAGE": "registry.example/team/cache:v1", "READY": "3/40", "REASON": "Failing", "VERIFIED": "True",
             "PODS": "7"}  # fmt: skip
CACHE_WIDE = {"INCOMPATIBLE": "1", "FAILED": "2", "OUTDATED": "5", "TAG": "RollingOut", "DIGEST": DIGEST,
              "MESSAGE": "2 of 40 nodes cannot prepare it"}  # fmt: skip
NODE_ROW = {"CACHE": "warm", "NODE": "node-a", "GPU": "NVIDIA-H200", "READY": "True", "REASON": "Ready",
            "VERIFIED": "True", "HITS": "Unknown", "PODS": "7"}  # fmt: skip
NODE_WIDE = {"COMPATIBLE": "True", "SIMULATED": "true", "DIGEST": DIGEST, "MESSAGE": "it can be mounted"}
POLICY_ROW = {"IMAGES": '["r.example/team/**","r.example/other/*"]', "NAMESPACES": '["serving","research"]',
              "MAY SKIP": "true"}  # fmt: skip
POLICY_WIDE = {"FIRST SIGNER": "release"}


@pytest.mark.stack
@pytest.mark.parametrize(
    ("kind", "short", "namespaced", "spec", "status", "row", "wide"),
    [
        ("TritonKernelCache", "tkc", True, IMAGE, CACHE_STATUS, CACHE_ROW, CACHE_WIDE),
        ("TritonKernelCacheCluster", "tkcc", False, IMAGE, CACHE_STATUS, CACHE_ROW, CACHE_WIDE),
        ("TritonKernelCacheNodeStatus", "tkcn", True, NODE_SPEC, NODE_STATUS, NODE_ROW, NODE_WIDE),
        ("TritonKernelCacheNodeStatusCluster", "tkccn", False, NODE_SPEC, NODE_STATUS, NODE_ROW, NODE_WIDE),
        ("KernelCachePolicy", "kcp", False, POLICY_SPEC, None, POLICY_ROW, POLICY_WIDE),
    ],
)
def test_what_kubectl_shows(
    stack: Stack, door: str, kind: str, short: str, namespaced: bool, spec: Any, status: Any,
    row: dict[str, str], wide: dict[str, str],
) -> None:  # fmt: skip
    name = f"{door}-shown"
    where = ("-n", door) if namespaced else ()
    create(stack, kind, name, door if namespaced else None, spec)
    if status is not None:  # nobody reports of a policy
        said = json.dumps({"status": status})
        stack.kubectl("patch", short, name, *where, "--subresource=status", "--type=merge", "-p", said)
    assert columns(stack.kubectl("get", short, name, *where)) == {"NAME": name, **row}
    assert columns(stack.kubectl("get", short, name, *where, "-o", "wide")) == {"NAME": name, **row, **wide}
    stack.kubectl("delete", short, name, *where, "--wait=false")


def columns(printed: str) -> dict[str, str]:
    """The only row by column, but for the age; columns are apart by three spaces or more."""
    head, line = printed.splitlines()
    starts = [(each.start(), each[0]) for each in re.finditer(r"\S+(?: \S+)*", head)]
    ends = [start for start, _ in starts[1:]] + [len(line)]
    return {name: line[start:end].strip() for (start, name), end in zip(starts, ends, strict=True) if name != "AGE"}
