"""Devices: what all nodes say of their devices, shown where people and schedulers look: in the statuses of
GPUSeatProfiles and in the labels of nodes. One for the whole fleet.

A look is one local activity, however many nodes said something since the last, and costs five events with its poke.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.device_signatures import DEVICES_WORKFLOW, SHOW_DEVICES, DevicesLook, DevicesShown, DevicesState
from activities.messages import Poke
from workflows.placement import newest

PATIENCE = timedelta(hours=1)
RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))


@workflow.defn(name=DEVICES_WORKFLOW, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class Devices:
    @workflow.init
    def __init__(self, state: DevicesState) -> None:
        self._state = state
        self._poked = False

    @workflow.signal(description="A node's devices, its labels or a GPUSeatProfile changed: look")
    def poke(self, poke: Poke) -> None:
        self._poked = True
        self._state.seen = newest(self._state.seen, poke.seen)

    @workflow.run
    async def run(self, state: DevicesState) -> None:
        while True:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(self._state)  # it begins with a look, so no poke is lost
            self._poked = False
            try:
                shown: DevicesShown = await workflow.execute_local_activity(
                    SHOW_DEVICES,
                    DevicesLook(self._state.seen),
                    result_type=DevicesShown,
                    schedule_to_close_timeout=PATIENCE,
                    start_to_close_timeout=timedelta(seconds=60),
                    local_retry_threshold=timedelta(seconds=4),
                    retry_policy=RETRY,
                    summary="look",
                )
            except ActivityError as failed:
                if is_cancelled_exception(failed):
                    raise
                workflow.set_current_details(f"**No answer for {PATIENCE}**: {failed.cause}; it is tried again")
                continue
            workflow.set_current_details(shown.message)
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: self._poked, timeout=shown.within, timeout_summary="write again what was refused"
                )
