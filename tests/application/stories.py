"""Tests that mostly wait, told side by side: begun together, each awaited by the test that is named after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path

from temporalio.api.enums.v1 import RoutingConfigUpdateState
from temporalio.api.workflowservice.v1 import DescribeWorkerDeploymentRequest
from temporalio.service import RPCError, RPCStatusCode

from berth.cli.application import after_up, application_processes
from berth.process import ProcessOptions, connect_temporal
from berth.version import DEPLOYMENT
from stack import Stack, UpOptions

_TOLD = RoutingConfigUpdateState.ROUTING_CONFIG_UPDATE_STATE_COMPLETED

Begun = dict[str, asyncio.Task[None]]
Stories = dict[str, Coroutine[None, None, None]]


@dataclass(frozen=True)
class Places:
    """Where the stories of modules `test_long_*` happen: in the shared installation, or in one of their own."""

    deployed: Stack
    folder: Callable[[str], Path]
    installing: asyncio.Lock


@contextlib.asynccontextmanager
async def side_by_side(stories: Mapping[str, Coroutine[None, None, None]]) -> AsyncIterator[Begun]:
    """The stories as tasks, by name. What nobody awaited is cancelled in the end, and cleans up."""
    begun = {name: asyncio.create_task(story) for name, story in stories.items()}
    try:
        yield begun
    finally:
        for task in begun.values():
            task.cancel()
        await asyncio.gather(*begun.values(), return_exceptions=True)


@contextlib.asynccontextmanager
async def installation(
    folder: Path,
    settings: Mapping[str, int],
    installing: asyncio.Lock,
    temporal: Mapping[str, int] | None = None,
    *,
    etcd_fsync: bool = False,
) -> AsyncIterator[Stack]:
    """An installation of its own, every revision of which is kept for the judge; `temporal` is dynamic configuration.

    What the judge writes to know where they end upsets the API server's watches, so nobody else should be there.
    """
    stack = Stack(folder)
    options = UpOptions(
        end_with_caller=True, etcd_fsync=etcd_fsync, keep_history=True, temporal_dynamic_config=temporal or {}
    )
    async with installing:  # ports are chosen some time before they are taken
        await asyncio.to_thread(
            stack.up,
            options,
            processes=lambda endpoints: application_processes(endpoints, options),
            after_up=lambda endpoints: after_up(endpoints, dict(settings)),
        )
    try:
        if not temporal:  # with short histories Temporal's own workflow begins anew before it has told that it is done
            await _gets_work(stack)
        yield stack
    finally:
        await asyncio.to_thread(stack.down)


async def _gets_work(stack: Stack) -> None:
    """Waits until a worker has come, and Temporal has told its task queues that it gets work. A workflow of Temporal's
    own does so a moment after the worker's version is the current one; killed then, it tries again only after a minute.
    """
    address, namespace = stack.endpoints.temporal_address, stack.endpoints.temporal_namespace
    temporal = await connect_temporal(ProcessOptions(temporal_address=address, temporal_namespace=namespace))
    asked = DescribeWorkerDeploymentRequest(namespace=namespace, deployment_name=DEPLOYMENT)
    async with asyncio.timeout(150):
        while True:
            try:
                told = (await temporal.workflow_service.describe_worker_deployment(asked)).worker_deployment_info
            except RPCError as refused:
                # It may be asked now and then only, and the worker asks it too.
                if refused.status not in (RPCStatusCode.NOT_FOUND, RPCStatusCode.RESOURCE_EXHAUSTED):
                    raise
            else:
                # Before there is a current version nothing is to be told, and that is complete as well.
                current = told.routing_config.current_deployment_version.build_id
                if current and told.routing_config_update_state == _TOLD:
                    return
            await asyncio.sleep(1.0)
