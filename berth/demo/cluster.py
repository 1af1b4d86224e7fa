"""Puts simulated nodes and many objects into a cluster, for the demo and the benchmarks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from kube.client import KubeClient
from kube.errors import AlreadyExists, KubeError, Unavailable
from kube.resources import NAMESPACES, NODES, SERVICEACCOUNTS, Resource
from stack import SimulatedNode, Stack, StackError, node_manifest

T = TypeVar("T")

_AT_ONCE = 12
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, None)


async def each(items: Iterable[T], do: Callable[[T], Awaitable[object]], at_once: int = _AT_ONCE) -> None:
    """`do` for every item, begun in order, `at_once` under way; what the API server refuses is a StackError."""
    source = iter(items)

    async def worker() -> None:
        for item in source:
            await do(item)

    refused: KubeError | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())
    except* KubeError as errors:
        refused = next(_leaves(errors))
    if refused is not None:
        raise StackError(f"The API server refused what was to be made: {refused}") from refused


def _leaves(group: BaseExceptionGroup[KubeError]) -> Iterator[KubeError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def patiently(do: Callable[[], Awaitable[object]]) -> None:
    """Asks a busy server again, for a quarter of a minute; only for requests that may safely be made twice."""
    for pause in _PAUSES:
        try:
            await do()
            return
        except AlreadyExists:
            return
        except Unavailable:
            if pause is None:
                raise
            await asyncio.sleep(pause)


async def create_all(kube: KubeClient, resource: Resource, bodies: Iterable[dict[str, Any]]) -> None:
    """Creates objects, a few at once, in order."""
    await each(bodies, lambda body: patiently(lambda: kube.create(resource, body)))


async def prepare(
    kube: KubeClient, stack: Stack, namespaces: Iterable[dict[str, Any]], nodes: Iterable[SimulatedNode]
) -> None:
    """Creates namespaces and nodes and returns when pods can be made in the ones and run on all of the others."""
    namespaces = list(namespaces)
    await create_all(kube, NAMESPACES, namespaces)
    simulated = [node_manifest(node) for node in nodes]
    await create_all(kube, NODES, simulated)
    names = {node["metadata"]["name"] for node in simulated}
    deadline = time.monotonic() + 60.0 + len(simulated) / 10
    while True:
        items, _ = await kube.list(NODES)
        ready = sum(item["metadata"]["name"] in names and is_ready(item) for item in items)
        if ready == len(simulated):
            break
        if time.monotonic() > deadline:
            raise StackError(
                f"Only {ready} of {len(simulated)} simulated nodes became ready in time.",
                f"Look at {stack.log_file('kwok')}.",
            )
        await asyncio.sleep(0.25)
    for namespace in namespaces:
        await _default_account(kube, namespace["metadata"]["name"], deadline)


async def _default_account(kube: KubeClient, namespace: str, deadline: float) -> None:
    """Pods are refused until the controller-manager made their namespace's service account."""
    while time.monotonic() < deadline:
        with suppress(KubeError):
            await kube.get(SERVICEACCOUNTS, "default", namespace)
            return
        await asyncio.sleep(0.1)
    raise StackError(f"The namespace {namespace} got no service account.", "Is kube-controller-manager running?")


def is_ready(node: dict[str, Any]) -> bool:
    """Whether a Node says that it is ready."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
