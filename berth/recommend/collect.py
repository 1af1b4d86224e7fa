"""Reads profiles from the API server, once, and asks planning what they recommend; for `berth recommend`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from berth.explain.collect import read_settings
from kube.client import KubeClient
from kube.errors import AccessDenied
from kube.resources import GPUMODELPROFILES, GPUWORKLOADS, NODES
from planning import views
from planning.model import WorkloadView
from planning.profile_status import profile_view
from planning.profiles import Gpus, Profile
from planning.recommendation import Ask, GpuType, Recommendation, ask_of, gpu_types, recommend


@dataclass(frozen=True, slots=True)
class Row:
    """A model with one number of GPUs; `recommendation` is None while too little is known of those runs."""

    namespace: str
    model: str
    runs: int
    asked: Ask
    recommendation: Recommendation | None


@dataclass(frozen=True, slots=True)
class Found:
    """`assumed` says what of the installation could not be read, '' if all is known."""

    rows: list[Row]
    assumed: str


async def collect(kubeconfig: Path | None, context: str | None, namespace: str) -> Found:
    """Raises KubeError; its text is for people."""
    async with await KubeClient.connect(kubeconfig, context, user_agent="berth-recommend") as kube:
        (profiles, _), (workloads, _) = await asyncio.gather(
            kube.list(GPUMODELPROFILES, namespace), kube.list(GPUWORKLOADS, namespace)
        )
        settings, assumed = await read_settings(kube)
        types, unknown = await _fleet(kube, settings.gpu_resource)
    known = [profile for raw in profiles if (profile := profile_view(raw)) is not None]
    return Found(
        rows(known, [views.workload_view(raw) for raw in workloads], types, settings.gpu_resource, time.time()),
        "; ".join(filter(None, (assumed, unknown))),
    )


def rows(
    profiles: Iterable[Profile],
    workloads: Iterable[WorkloadView],
    types: tuple[GpuType, ...],
    installed: str,
    now: float,
) -> list[Row]:
    """A row for each number of GPUs of a resource that a model was run with; what else is asked for is the newest
    workload's.
    """
    asked: dict[tuple[str, Gpus], Ask] = {}
    for view in sorted(workloads, key=lambda view: view.created):
        if view.spec is not None:
            ask = ask_of(view.spec, installed)
            asked[view.spec.model_name, Gpus(ask.gpu_count, ask.gpu_resource)] = ask
    found = []
    for profile in sorted(profiles, key=lambda profile: profile.model):
        for gpus in sorted(profile.at):
            ask = asked.get((profile.model, gpus), Ask(gpus.number, gpu_resource=gpus.resource))
            recommended = recommend(profile, ask, types, now)
            found.append(Row(profile.namespace, profile.model, profile.runs, ask, recommended))
    return found


async def _fleet(kube: KubeClient, gpu_resource: str) -> tuple[tuple[GpuType, ...], str]:
    """The fleet's GPU models; none, and why, where nodes may not be read."""
    try:
        nodes, _ = await kube.list(NODES)
    except AccessDenied:
        return (), "you may not list nodes, so no GPU type is proposed"
    return gpu_types(views.node_view(raw, gpu_resource) for raw in nodes), ""
