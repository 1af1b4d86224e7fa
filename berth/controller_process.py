"""The controller process: waits for the lease, leads while it holds it, answers probes and admission reviews all the
while.
"""

from __future__ import annotations

import asyncio
import logging

from opentelemetry import metrics
from opentelemetry.metrics import Observation
from temporalio.client import Client

from berth.candidate import candidate_name, has_ended
from berth.extensions import load_strategies
from berth.process import ProcessOptions, connect_temporal, ended, run_process, serve_http, watch_trouble
from controller.app import Controller
from controller.webhooks.keeper import Keeper
from controller.webhooks.service import Webhooks
from crds.settings import SETTINGS_NAMESPACE
from kube.client import KubeClient
from kube.lease import LeaderElector, LeadershipLost

log = logging.getLogger(__name__)

LEASE = "gpu-orchestrator.gpu.warp.dev"

_meter = metrics.get_meter("berth.controller")


def run_controller(options: ProcessOptions, *, resync: float, webhook_port: int) -> None:
    async def main(traced: bool) -> None:
        temporal = await connect_temporal(options, traced=traced)
        async with await KubeClient.connect(options.kubeconfig, options.context, user_agent="berth-controller") as kube:
            await serve(kube, temporal, options, resync=resync, webhook_port=webhook_port)

    run_process("berth-controller", options, main)


async def serve(
    kube: KubeClient, temporal: Client, options: ProcessOptions, *, resync: float, webhook_port: int
) -> None:
    load_strategies()
    term: Controller | None = None
    elector: LeaderElector | None = None
    webhooks = Webhooks(kube, options.bind, webhook_port)
    keeper = Keeper(kube, webhooks)
    admission: list[asyncio.Task[None]] = []

    def healthy() -> str:
        return ended([*admission, *(term.tasks if term is not None else ())])

    def ready() -> str:
        if term is None:
            return elector.trouble if elector is not None else ""  # a standby that can see who leads is ready
        away = term.temporal_away
        return "; ".join(filter(None, (watch_trouble(term.reflectors), away and f"Temporal cannot be reached: {away}")))

    def note() -> str:
        """What the webhooks lack: without them the controller's own work goes on, and so does everybody's."""
        said = (watch_trouble(webhooks.reflectors), webhooks.trouble, keeper.trouble)
        told = "; ".join(filter(None, said))
        return told and f"admission webhooks: {told}"

    async def lead() -> None:
        nonlocal term
        log.info("leading")
        term = Controller(kube, temporal, resync=resync)
        keeping = asyncio.create_task(keeper.run(), name="webhook certificates")
        admission.append(keeping)
        try:
            await term.lead()
        finally:
            term = None
            admission.remove(keeping)
            await _stop(keeping)
            keeper.trouble = ""

    _meter.create_observable_gauge(
        "berth_leading", [lambda _: [Observation(int(term is not None))]], description="1 while this controller leads"
    )
    _meter.create_observable_gauge(
        "berth_webhooks_trouble",
        [lambda _: [Observation(int(bool(note())))]],
        description="1 while the webhooks lack something; /readyz says what",
    )
    stop_http = await serve_http(options, healthy=healthy, ready=ready, note=note)
    try:
        admission.append(asyncio.create_task(webhooks.run(), name="admission webhooks"))
        # Of all its terms: when one was lost its work had ended, so the next need not wait for it.
        name = candidate_name()
        while True:
            elector = LeaderElector(kube, SETTINGS_NAMESPACE, LEASE, name, has_ended=has_ended)
            try:
                await elector.run(lead)
            except LeadershipLost as lost:
                log.warning("%s; standing by", lost)
                await asyncio.sleep(1)
    finally:
        await _stop(*admission)
        await stop_http()


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
