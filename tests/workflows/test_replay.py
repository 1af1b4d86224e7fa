"""Recorded histories against today's workflows, inside the sandbox that the worker itself leaves out.

A change that breaks one of these needs a patch marker (`workflow.patched`); histories are recorded anew, beside the old
ones, by `python -m tests.workflows.record`.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.signatures import LEARN
from berth.converter import data_converter
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

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))

# Values and signatures only; the workflows themselves are imported anew, under restrictions, for each run.
PASSED_THROUGH = ("crds", "planning", "activities", "pydantic", "pydantic_core", "annotated_types")


def replayer() -> Replayer:
    return Replayer(
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
        workflow_runner=SandboxedWorkflowRunner(
            restrictions=SandboxRestrictions.default.with_passthrough_modules(*PASSED_THROUGH)
        ),
        data_converter=data_converter,
    )


def load(path: Path) -> WorkflowHistory:
    recorded = json.loads(path.read_text())
    return WorkflowHistory.from_json(recorded["workflowId"], recorded["history"])


@pytest.mark.parametrize("path", HISTORIES, ids=lambda p: p.stem)
async def test_recorded_histories_replay(path: Path) -> None:
    result = await replayer().replay_workflow(load(path))
    assert result.replay_failure is None


def test_every_workflow_and_every_way_through_it_is_recorded() -> None:
    names = {path.stem.split("--")[0] for path in HISTORIES}
    assert {
        "gpuworkload-succeeded",
        "gpuworkload-retried",
        "gpuworkload-no-suitable-node",
        "gpuworkload-suspended",
        "gpuworkload-deleted",
        "gpuworkload-evicted",
        "gpuworkload-gang",
        "placement-rounds",
        "provisioning-used",
        "provisioning-given-up",
        "provisioning-edited",
        "provisioning-cancelled",
        "placement-provisioning",
        "kernelcache-life",
        "kernelcache-retried",
        "nodekernelcache-removed",
        "nodekernelcache-retried",
        "node-changed",
        "devices-shown",
        "seatgroup-switched",
        "seatmigration-completed",
        "seatmigration-undone",
        "seatrebalancing-performed",
    } <= names


def test_that_runs_are_learned_is_recorded() -> None:
    recorded = [path for path in HISTORIES if path.stem.startswith("placement-rounds")]
    assert any(f'"name": "{LEARN}"' in path.read_text() for path in recorded)


def test_that_a_gang_starts_is_recorded() -> None:
    recorded = [path.read_text() for path in HISTORIES if path.stem.startswith("placement-rounds")]
    values = (b64decode(data) for text in recorded for data in re.findall(r'"data": "([^"]+)"', text))
    assert any(b'"pins":[{' in value for value in values)


async def test_a_history_that_does_not_fit_is_refused() -> None:
    """The check can fail: a ledger's history with its first activity renamed is no history of this ledger."""
    path = next(p for p in HISTORIES if p.stem.startswith("placement-rounds"))
    text = path.read_text().replace('"name": "decide"', '"name": "guess"')
    assert text != path.read_text()
    recorded = json.loads(text)
    result = await replayer().replay_workflow(
        WorkflowHistory.from_json(recorded["workflowId"], recorded["history"]), raise_on_replay_failure=False
    )
    assert result.replay_failure is not None
