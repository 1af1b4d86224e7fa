"""The controller process: waits for the lease, leads while it holds it, answers probes all the while."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid

from temporalio.client import Client

from berth.process import ProcessOptions, connect_temporal, ended, run_process, serve_http, watch_trouble
from controller.app import Controller
from crds.settings import SETTINGS_NAMESPACE
from kube.client import KubeClient
from kube.lease import LeaderElector, LeadershipLost

log = logging.getLogger(__name__)

LEASE = "gpu-orchestrator.gpu.warp.dev"


def run_controller(options: ProcessOptions, *, resync: float) -> None:
    async def main(traced: bool) -> None:
        temporal = await connect_temporal(options, traced=traced)
        async with await KubeClient.connect(options.kubeconfig, options.context, user_agent="berth-controller") as kube:
            await serve(kube, temporal, options, resync=resync)

    run_process("berth-controller", options, main)


async def serve(kube: KubeClient, temporal: Client, options: ProcessOptions, *, resync: float) -> None:
    term: Controller | None = None
    elector: LeaderElector | None = None

    def healthy() -> str:
        return ended(term.tasks) if term is not None else ""

    def ready() -> str:
        if term is None:
            return elector.trouble if elector is not None else ""  # a standby that can see who leads is ready
        away = term.temporal_away
        return "; ".join(filter(None, (watch_trouble(term.reflectors), away and f"Temporal cannot be reached: {away}")))

    async def lead() -> None:
        nonlocal term
        log.info("leading")
        term = Controller(kube, temporal, resync=resync)
        try:
            await term.lead()
        finally:
            term = None

    stop_http = await serve_http(options, healthy=healthy, ready=ready)
    try:
        while True:
            elector = LeaderElector(kube, SETTINGS_NAMESPACE, LEASE, f"{os.uname().nodename}_{uuid.uuid4().hex[:8]}")
            try:
                await elector.run(lead)
            except LeadershipLost as lost:
                log.warning("%s; standing by", lost)
                await asyncio.sleep(1)
    finally:
        await stop_http()
