"""The worker process: workflows and activities of the control plane, beside a cache of the cluster."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio.api.deployment.v1 import WorkerDeploymentVersion as WireVersion
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import (
    DescribeWorkerDeploymentRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import UnsandboxedWorkflowRunner, Worker, WorkerDeploymentConfig

from activities.cache import ClusterCache
from activities.devices import DeviceShows
from activities.forecasts import Forecasts
from activities.heartbeats import BEAT
from activities.kernel_caches import KernelCaches
from activities.messages import KIND, NAME, NAMESPACE, NODE, PHASE
from activities.migration_signatures import MIGRATION_QUEUE, START_QUEUE
from activities.migrations import Migrations
from activities.nodes import NodeLooks
from activities.placements import Placements
from activities.planner import Planner
from activities.profiles import Profiles
from activities.provisioning import Orders
from activities.rebalancing import Rebalancing
from activities.sampling import SimulatedSampler, Usages, keep_sampling
from activities.signatures import TASK_QUEUE
from activities.workloads import Workloads
from berth.extensions import load_strategies
from berth.forecaster import forecast_aside
from berth.process import (
    ProcessOptions,
    connect_temporal,
    ended,
    run_process,
    serve_http,
    until_one_ends,
    watch_trouble,
)
from berth.version import DEPLOYMENT, build_id
from controller.outage import ANSWER, TEMPORAL_AWAY, reason
from kube.client import KubeClient
from kube.events import EventRecorder
from workflows.devices import Devices
from workflows.gpuworkload import GPUWorkload
from workflows.kernel_cache import KernelCache
from workflows.node import Node
from workflows.node_kernel_cache import NodeKernelCache
from workflows.placement import Placement
from workflows.provisioning import Provisioning
from workflows.seat_group import SeatGroup
from workflows.seat_migration import SeatMigration
from workflows.seat_rebalancing import SeatRebalancing

log = logging.getLogger(__name__)

# A full cache puts out whichever workflow was touched least recently, even one whose look is under way: its writes are
# cut off, its task times out ten seconds later, and it begins again. So the cache holds many times the workflows that
# may be in a task at once. It is seldom full: most workflows end in their first task, and then leave it.
CACHED_WORKFLOWS = 1000
WORKFLOW_TASKS = 32
MIGRATIONS = 256  # at once, each with some requests to the API server every few seconds; others wait
# Together with the spans (berth.process) less than the 25 s after which a supervisor kills.
DRAIN = timedelta(seconds=15)
EVENTS_FLUSH = 3.0
SILENT = (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)


def run_worker(options: ProcessOptions, *, take_over: bool = False) -> None:
    """`take_over`: make this build the current one even if another is (an upgrade); else only if none is."""

    async def main(traced: bool) -> None:
        async with await KubeClient.connect(options.kubeconfig, options.context, user_agent="berth-worker") as kube:
            await serve(kube, options, traced=traced, take_over=take_over)

    run_process("berth-worker", options, main)


async def serve(kube: KubeClient, options: ProcessOptions, *, traced: bool, take_over: bool) -> None:
    load_strategies()
    cache, usages = ClusterCache(kube), Usages()
    events = EventRecorder(kube, "berth-worker", os.uname().nodename)
    background: list[asyncio.Task[None]] = []
    temporal_away = "it was not reached yet"

    def ready() -> str:
        away = f"Temporal cannot be reached: {temporal_away}" if temporal_away else ""
        return "; ".join(filter(None, (watch_trouble(cache.reflectors), away)))

    def hear(trouble: str) -> None:
        nonlocal temporal_away
        temporal_away = trouble

    stop_http = await serve_http(
        options, healthy=lambda: ended(background), ready=ready, note=lambda: cache.settings_problem
    )
    try:
        async with asyncio.TaskGroup() as group:
            background.append(group.create_task(cache.run(), name="cache"))
            background.append(group.create_task(events.run(), name="events"))
            sampling = keep_sampling(cache, SimulatedSampler(cache), usages)
            background.append(group.create_task(sampling, name="samples"))
            try:
                temporal = await _reach_temporal(options, hear, traced=traced)
                migrations = Migrations(kube, events)
                workers = [
                    build_worker(temporal, cache, kube, events, usages), *build_migration_workers(temporal, migrations)
                ]  # fmt: skip
                background.append(group.create_task(_keep_current(temporal, take_over, hear), name="versions"))
                # Cancelled, it takes no more work and lets what runs come to its end, for which the cache goes on.
                await until_one_ends(workers)
            finally:
                await events.flush(EVENTS_FLUSH)
                for task in background:
                    task.cancel()
    finally:
        await stop_http()


def build_worker(
    temporal: Client, cache: ClusterCache, kube: KubeClient, events: EventRecorder, usages: Usages
) -> Worker:
    """Unsandboxed: the sandbox doubles the CPU and memory of every fresh workflow. The replay tests run inside it, so
    what it would catch is caught there.
    """
    planner = Planner(cache, kube, Forecasts(forecast_aside))
    placements = Placements(cache, kube, temporal, events)
    workloads = Workloads(cache, kube, temporal, events)
    profiles = Profiles(cache, kube, usages)
    orders = Orders(cache, kube, temporal, events)
    caches = KernelCaches(cache, kube, temporal, events)
    nodes = NodeLooks(kube, temporal)
    devices = DeviceShows(cache, kube, events)
    rebalancing = Rebalancing(kube, events)
    return Worker(
        temporal,
        task_queue=TASK_QUEUE,
        workflows=[
            Placement,
            GPUWorkload,
            Provisioning,
            KernelCache,
            NodeKernelCache,
            Node,
            Devices,
            SeatGroup,
            SeatMigration,
            SeatRebalancing,
        ],
        activities=[
            planner.decide,
            placements.carry_out,
            workloads.follow,
            workloads.hand_back,
            profiles.learn,
            orders.arrange,
            orders.take_back,
            caches.look,
            caches.tell,
            nodes.look,
            devices.show,
            rebalancing.rebalance,
        ],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_cached_workflows=CACHED_WORKFLOWS,
        max_concurrent_workflow_tasks=WORKFLOW_TASKS,
        max_concurrent_local_activities=16,
        max_heartbeat_throttle_interval=BEAT,
        default_heartbeat_throttle_interval=BEAT,
        graceful_shutdown_timeout=DRAIN,
        deployment_config=WorkerDeploymentConfig(
            version=WorkerDeploymentVersion(DEPLOYMENT, build_id()),
            use_worker_versioning=True,
            default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE,
        ),
    )


def build_migration_workers(temporal: Client, migrations: Migrations) -> list[Worker]:
    """On queues of their own, and unversioned as the nodes': what waits for servers to start takes no place from rounds
    of the ledger, nor from whoever ends or undoes a move. Whoever carries one on later reads how far it came, so nobody
    waits for it when this process ends.
    """
    short: list[Callable[..., Any]] = [migrations.decide, migrations.retire, migrations.roll_back]
    return [
        Worker(
            temporal,
            task_queue=queue,
            activities=activities,
            max_concurrent_activities=MIGRATIONS,
            max_heartbeat_throttle_interval=BEAT,
            default_heartbeat_throttle_interval=BEAT,
            graceful_shutdown_timeout=timedelta(seconds=1),
        )
        for queue, activities in ((MIGRATION_QUEUE, short), (START_QUEUE, [migrations.start]))
    ]


async def _reach_temporal(options: ProcessOptions, hear: Callable[[str], None], *, traced: bool) -> Client:
    """Waits for Temporal, however long that takes, and makes sure that it knows berth's search attributes.

    `hear` is told why it cannot be reached, or '' once it was.
    """
    pause = 0.5
    while True:
        try:
            temporal = await connect_temporal(options, traced=traced, lazy=False)
            await _add_search_attributes(temporal)
            hear("")
            return temporal
        except TEMPORAL_AWAY as away:
            hear(reason(away))
            log.warning("waiting for Temporal: %s", reason(away))
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)


async def _add_search_attributes(temporal: Client) -> None:
    wanted = {key.name: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD for key in (KIND, NAMESPACE, NAME, NODE, PHASE)}
    try:
        known = await temporal.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=temporal.namespace)
        )
        missing = {name: kind for name, kind in wanted.items() if name not in known.custom_attributes}
        if missing:
            await temporal.operator_service.add_search_attributes(
                AddSearchAttributesRequest(namespace=temporal.namespace, search_attributes=missing)
            )
    except RPCError as refused:
        if refused.status == RPCStatusCode.ALREADY_EXISTS:
            return
        if refused.status not in (RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED):
            raise
        log.warning(
            "cannot check Temporal's search attributes (%s); if any of %s is missing, create it as Keyword",
            refused.message,
            ", ".join(wanted),
        )


async def make_current(temporal: Client, *, only_if_none: bool) -> bool:
    """Makes this build the one that gets work. Returns whether it is current now.

    `only_if_none`: an upgrade is somebody's decision (`berth up`, the chart), but a Temporal that has no current
    version at all, because it is new or lost its data, would give nobody any work. RPCError: Temporal is away.
    """
    try:
        described = await temporal.workflow_service.describe_worker_deployment(
            DescribeWorkerDeploymentRequest(namespace=temporal.namespace, deployment_name=DEPLOYMENT), timeout=ANSWER
        )
        current: WireVersion = described.worker_deployment_info.routing_config.current_deployment_version
        if current.build_id == build_id():
            return True
        if current.build_id and only_if_none:
            return False
        await temporal.workflow_service.set_worker_deployment_current_version(
            SetWorkerDeploymentCurrentVersionRequest(
                namespace=temporal.namespace,
                deployment_name=DEPLOYMENT,
                build_id=build_id(),
                version=f"{DEPLOYMENT}.{build_id()}",
                identity="berth",
                ignore_missing_task_queues=True,
            ),
            timeout=ANSWER,
        )
    except RPCError as refused:
        if refused.status not in (RPCStatusCode.NOT_FOUND, RPCStatusCode.FAILED_PRECONDITION):
            raise
        return False
    log.info("worker version %s is now current", build_id())
    return True


async def _keep_current(temporal: Client, take_over: bool, hear: Callable[[str], None]) -> None:
    pause = 0.5
    while True:
        current = False
        try:
            current = await make_current(temporal, only_if_none=not take_over)
            hear("")
        except RPCError as away:
            # What it refuses it has heard; only silence means that this worker gets no work.
            hear(away.message if away.status in SILENT else "")
            log.warning("worker version %s is not current yet: %s", build_id(), away.message)
        take_over = take_over and not current  # an upgrade is made once; a later one is not undone
        pause = 15.0 if current else min(pause * 1.5, 15.0)
        await asyncio.sleep(pause)
