"""`berth explain` reads where kernel caches are Ready, no more of that than it needs, and shows what it means."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from berth.explain.collect import Collected, collect
from berth.explain.report import show
from kube.client import KubeClient
from kube.errors import AccessDenied
from kube.resources import (
    GPUWORKLOADS,
    NODES,
    TRITONKERNELCACHENODESTATUSCLUSTERS,
    TRITONKERNELCACHENODESTATUSES,
    Resource,
)
from planning.explanation import explain
from tests.kube.fake_api import FakeApi

READY = {"conditions": [{"type": "Ready", "status": "True"}]}
ROOM = {"nvidia.com/gpu": "4", "cpu": "64", "memory": "256Gi", "pods": "110"}


def cluster(api: FakeApi) -> None:
    """Two nodes; the cache k of namespace ns is Ready on b, the cluster's l on none."""
    for name in "ab":
        api.put(NODES, name, status={"allocatable": ROOM, **READY})
    volumes = [
        {"name": name, "csi": {"driver": "csi.tkm.io", "volumeAttributes": {"kernel-name": name, "scope": scope}}}
        for name, scope in (("k", "namespace"), ("l", "cluster"))
    ]
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in "kl"]
    pod = {"containers": [{"name": "c", "image": "i", "volumeMounts": mounts}], "volumes": volumes}
    status = {"phase": "Scheduling"}
    spec = {"modelName": "m", "gpuCount": 1, "template": {"spec": pod}}
    api.put(GPUWORKLOADS, "w", "ns", spec=spec, status=status)
    api.put(GPUWORKLOADS, "plain", "other", spec={"modelName": "m", "gpuCount": 1}, status=status)
    for namespace, cache, node in (("ns", "k", "b"), ("ns", "unasked", "a"), ("other", "k", "a")):
        about = {"nodeName": node, "kernelCacheRef": {"name": cache, "uid": f"uid-{namespace}-{cache}"}}
        api.put(TRITONKERNELCACHENODESTATUSES, f"{cache}-{node}", namespace, spec=about, status=READY)


async def collected(api: FakeApi, folder: Path) -> Collected:
    cluster(api)
    return await collect(api.kubeconfig(folder), None, "ns", "w")


def shown(found: Collected) -> str:
    told = explain(found.snapshot, found.settings, "ns", "w")
    assert told is not None
    text = io.StringIO()
    show(told, [], Console(width=300, file=text))
    return " ".join(text.getvalue().split())


def asked(api: FakeApi) -> list[str]:
    return [path.partition("?")[0] for _, path, _ in api.requests if "nodestatus" in path]


async def test_it_says_where_they_are_and_that_the_next_round_prefers_that(tmp_path: Path) -> None:
    async with FakeApi() as api:
        found = await collected(api, tmp_path)
        paths = asked(api)
    assert found.snapshot.warm == {("ns", "k"): {"b"}}
    assert len(paths) == 2 and paths[1].endswith("/namespaces/ns/tritonkernelcachenodestatuses"), "others' are not read"
    text = shown(found)
    assert "caches k (Ready on 1 node), l of the cluster (Ready on no node)" in text
    assert "the next round places it on node b, as things are; 1 of its 2 kernel caches is ready there" in text
    assert "1 of its 2 caches" in text and "0 of its 2 caches" in text


async def test_where_nobody_mounts_any_nothing_is_read(tmp_path: Path) -> None:
    async with FakeApi() as api:
        cluster(api)
        api.remove(GPUWORKLOADS, "w", "ns")
        found = await collect(api.kubeconfig(tmp_path), None, "other", "plain")
        assert asked(api) == [] and found.snapshot.warm == {} and found.assumed == ""


async def test_who_may_not_read_them_is_told_that_they_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = KubeClient.list_pages

    async def denied(self: KubeClient, resource: Resource, *rest: Any, **more: Any) -> AsyncIterator[Any]:
        if "nodestatus" in resource.plural:
            raise AccessDenied("forbidden", reason="Forbidden", request=f"GET {resource.plural}")
        async for page in pages(self, resource, *rest, **more):
            yield page

    monkeypatch.setattr(KubeClient, "list_pages", denied)
    async with FakeApi() as api:
        found = await collected(api, tmp_path)
    assert found.assumed == "you may not read the kernel caches' node statuses: they are left out"
    assert "node a, as things are; its 2 kernel caches are ready on no node yet" in shown(found)


async def test_an_installation_without_caches_is_explained_too(tmp_path: Path) -> None:
    async with FakeApi() as api:
        api.fail(status=404, reason="NotFound", contains=TRITONKERNELCACHENODESTATUSCLUSTERS.plural, count=9)
        found = await collected(api, tmp_path)
    assert found.assumed == "" and found.snapshot.warm == {("ns", "k"): {"b"}}
