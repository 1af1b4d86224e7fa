"""SeatRebalancing: looks now and then whether a model server should move to another group of its node, for as long as a
GPUSeatProfile asks for it. One for the whole fleet.

A look is one local activity, which decides and orders SeatMigrations or proposes them; each of those is a workflow of
its own. Five events a look.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.migration_signatures import (
    REBALANCE_SEATS,
    SEAT_REBALANCING_WORKFLOW,
    Rebalanced,
    RebalancingState,
)

PATIENCE = timedelta(hours=1)
RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=30))


@workflow.defn(name=SEAT_REBALANCING_WORKFLOW, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class SeatRebalancing:
    @workflow.run
    async def run(self, state: RebalancingState) -> str:
        while True:
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(state)
            try:
                found: Rebalanced = await workflow.execute_local_activity(
                    REBALANCE_SEATS,
                    state.standing,
                    result_type=Rebalanced,
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
            workflow.set_current_details(found.message)
            if found.within is None:
                return found.message
            state.standing = found.standing
            await workflow.sleep(found.within, summary="look again")
