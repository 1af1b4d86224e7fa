"""Tells a gang's pods their nodes and lifts their gates, as a recorded decision says.

For the activity that carries out a round. Each pod gets both in one write, bound to what was seen of it; one that was
lifted before is left alone, so that all of it can be repeated, and what could not be done is decided again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kube.client import KubeClient
from kube.errors import Conflict, NotFound
from kube.resources import PODS
from planning.gates import due
from planning.jobs import lifted
from planning.model import Pin

# Writes at once, for each gang.
_CONCURRENCY = 16


async def lift(kube: KubeClient, pin: Pin) -> None:
    """Lifts the gates of the gang's pods, if all are there. Raises what kept a write from being made, once all others
    were tried.
    """
    # By the Job's UID, which the Job controller writes on its pods: another Job may come to have the name.
    selector = f"batch.kubernetes.io/controller-uid={pin.job_uid}"
    pods, _ = await kube.list(PODS, pin.namespace, label_selector=selector)
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def one(pod: Mapping[str, Any], node: str) -> None:
        async with gate:
            try:
                await kube.merge_patch(PODS, pod["metadata"]["name"], pin.namespace, lifted(pod, node))
            except (Conflict, NotFound):
                return  # it changed meanwhile, or is gone: the next round sees what it is now

    results = await asyncio.gather(*(one(pod, node) for pod, node in due(pin.places, pods)), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
