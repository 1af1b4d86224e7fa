"""Node: what a node's process says of its hardware and store, for as long as there is the node.

When that changes, every cache that is prepared there is checked anew. When the node is deleted, whoever waits for it is
told so.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.cache_signatures import LOOK_AT_NODE, NodeLook, NodeLooked, NodeState
from planning.caches.orders import NODE_WORKFLOW, Inventory

RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))


@workflow.defn(name=NODE_WORKFLOW, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class Node:
    @workflow.init
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._changed = False
        self._poked = False

    @workflow.signal(description="What the node's process found")
    def inventory(self, found: Inventory) -> None:
        self._changed |= self._state.fingerprint not in ("", found.fingerprint)
        self._state.fingerprint = found.fingerprint

    @workflow.signal(description="The node came or went: look")
    def poke(self) -> None:
        self._poked = True

    @workflow.run
    async def run(self, state: NodeState) -> str:
        while True:
            # Only while there is nothing to do: what is due is not carried over.
            if workflow.info().is_continue_as_new_suggested() and not (self._changed or self._poked):
                workflow.continue_as_new(self._state)
            await workflow.wait_condition(lambda: self._changed or self._poked)
            changed, self._changed, self._poked = self._changed, False, False
            try:
                looked: NodeLooked = await workflow.execute_local_activity(
                    LOOK_AT_NODE,
                    NodeLook(self._state.node, changed),
                    result_type=NodeLooked,
                    schedule_to_close_timeout=timedelta(hours=1),
                    start_to_close_timeout=timedelta(seconds=60),
                    local_retry_threshold=timedelta(seconds=4),
                    retry_policy=RETRY,
                    summary="tell the caches" if changed else "look",
                )
            except ActivityError as failed:
                if is_cancelled_exception(failed):
                    raise
                self._changed, self._poked = changed, True
                continue
            workflow.set_current_details(looked.message)
            if looked.next == "end":
                return looked.message
