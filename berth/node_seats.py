"""Tells the workflow of each group of seats on this node that there is something to look at there, and begins it where
there is none. For the node's process; what is told has no content.

While Temporal is away nothing is switched: whoever has a slot keeps it, and what was to be told is told later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy

from activities.seat_signatures import GroupState, group_attributes
from activities.signatures import TASK_QUEUE
from controller.outage import ANSWER, TEMPORAL_AWAY, reason
from planning.seats.orders import NEWS, SEAT_GROUP_WORKFLOW, group_id

log = logging.getLogger(__name__)

AGAIN = 60.0  # seconds after which each group is told anyway: Temporal may have lost its data, and come back without it
_PAUSES = (0.2, 5.0)  # seconds between attempts: the first, and the longest


class SeatNews:
    """`poke` says that a group is to be looked at; `run` tells until cancelled. `temporal`: the client, None while
    there is none; `groups`: all that the node has.
    """

    def __init__(self, node: str, temporal: Callable[[], Client | None], groups: Callable[[], Collection[str]]) -> None:
        self._node, self._temporal, self._groups = node, temporal, groups
        self._due: dict[str, None] = {}
        self._wake = asyncio.Event()
        self.trouble = ""
        """Why Temporal does not take what is told; '' while it does."""

    def poke(self, group: str) -> None:
        """Told soon, and once for all that was said meanwhile."""
        self._due[group] = None
        self._wake.set()

    async def run(self) -> None:
        pause, all_at = _PAUSES[0], 0.0
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= all_at:
                self._due.update(dict.fromkeys(self._groups()))
                all_at = loop.time() + AGAIN
            self._wake.clear()
            if await self._tell_all():
                pause = _PAUSES[0]
                try:
                    async with asyncio.timeout_at(all_at):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])

    async def _tell_all(self) -> bool:
        temporal = self._temporal()
        if temporal is None:
            self._hear("it was not reached yet")
            return not self._due
        due, self._due = list(self._due), {}
        told = await asyncio.gather(*(self._tell(temporal, group) for group in due))
        self._due = dict.fromkeys(group for group, fine in zip(due, told, strict=True) if not fine) | self._due
        if all(told):
            self._hear("")
        return all(told)

    async def _tell(self, temporal: Client, group: str) -> bool:
        try:
            await temporal.start_workflow(
                SEAT_GROUP_WORKFLOW,
                GroupState(self._node, group),
                id=group_id(self._node, group),
                task_queue=TASK_QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                search_attributes=group_attributes(self._node, group),
                static_summary=f"The slot of group {group} on node {self._node}",
                start_signal=NEWS,
                rpc_timeout=ANSWER,
            )
        except TEMPORAL_AWAY as away:
            self._hear(reason(away))
            return False
        return True

    def _hear(self, trouble: str) -> None:
        if trouble and not self.trouble:
            log.warning("nothing is switched on this node: %s", trouble)
        self.trouble = trouble
