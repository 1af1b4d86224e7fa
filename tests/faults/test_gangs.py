"""SIGKILL at each step of a gang's placement: it starts as a whole, once, and no retry is counted.

The steps are those that others can see: nothing yet, its Job, its pods behind their gates, some of the gates lifted,
all of them lifted. That only some are lifted, an admission policy sees to; when it goes, so do the others. Each victim
dies in an installation of its own, side by side.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from crds.gpuworkload import API_VERSION, KIND
from kube.client import KubeClient
from kube.resources import GPUWORKLOADS, NODES
from planning.naming import INDEX_KEY, WORKLOAD_LABEL
from stack import SimulatedNode, Stack, node_manifests
from tests.application.stories import Begun, installation, side_by_side
from tests.faults.checker import Demand, check
from tests.faults.revisions import Revision, history
from tests.faults.test_kills import connected, delete_all, insist
from tests.faults.test_preemption import VICTIMS, Seen, is_in, mine, until

pytestmark = [
    pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")
]  # fmt: skip

PODS, NODES_EACH = 6, 3
HALF = "half-lifted"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def killed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Begun]:
    installing = asyncio.Lock()

    async def time_and_again(victim: str) -> None:
        async with installation(tmp_path_factory.mktemp(victim), {}, installing) as stack:
            await gangs_survive_a_kill_at_each_step(stack, victim)

    async with side_by_side({victim: time_and_again(victim) for victim in VICTIMS}) as begun:
        yield begun


def lifted(pods: list[dict[str, Any]]) -> int:
    return sum(not pod["spec"].get("schedulingGates") for pod in pods)


async def asked(kube: KubeClient, gang: str) -> bool:
    """Nothing was done yet."""
    return True


async def job_made(kube: KubeClient, gang: str) -> bool:
    jobs, _ = await mine(kube, gang)
    return bool(jobs)


async def gated(kube: KubeClient, gang: str) -> bool:
    _, pods = await mine(kube, gang)
    return len(pods) == PODS


async def half_lifted(kube: KubeClient, gang: str) -> bool:
    _, pods = await mine(kube, gang)
    return 0 < lifted(pods) < PODS


async def all_lifted(kube: KubeClient, gang: str) -> bool:
    _, pods = await mine(kube, gang)
    return lifted(pods) == PODS


STEPS: tuple[Seen, ...] = (asked, job_made, gated, half_lifted, all_lifted)


@asynccontextmanager
async def only_some_may_be_lifted(stack: Stack) -> AsyncIterator[None]:
    """Of gangs whose name ends in `half-lifted`, the pods with an even index stay behind their gates."""
    name = f"object.metadata.labels[{WORKLOAD_LABEL!r}].endsWith({HALF!r})"
    even = f"int(object.metadata.labels[{INDEX_KEY!r}]) % 2 == 0"
    ours = f"has(object.metadata.labels) && {WORKLOAD_LABEL!r} in object.metadata.labels && {name} && {even}"
    policy: dict[str, Any] = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "gated"},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["pods"]}
                ]
            },
            "matchConditions": [{"name": "ours", "expression": ours}],
            "validations": [{"expression": "has(object.spec.schedulingGates) || !has(oldObject.spec.schedulingGates)"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "gated"},
        "spec": {"policyName": "gated", "validationActions": ["Deny"]},
    }
    for each in (policy, binding):
        await asyncio.to_thread(stack.kubectl, "create", "-f", "-", stdin=json.dumps(each))
    try:
        yield
    finally:
        for each in (binding, policy):
            await asyncio.to_thread(stack.kubectl, "delete", "-f", "-", stdin=json.dumps(each))


async def submit(kube: KubeClient, gang: str) -> None:
    body = {
        "modelName": "m",
        "gpuCount": 1,
        "replicas": PODS,
        "nodeSelector": {"pool": gang},
        "env": [{"name": "SIMULATED_RUN", "value": "2s"}],
    }
    meta = {"name": gang, "labels": {"demand": "succeeds"}}
    await insist(
        kube.create, GPUWORKLOADS, {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": body}, "default"
    )


@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_gang_survives_a_kill_at_each_step_of_its_placement(killed: Begun, victim: str) -> None:
    await killed[victim]


async def gangs_survive_a_kill_at_each_step(fleet: Stack, victim: str) -> None:
    steps = {step.__name__.replace("_", "-"): step for step in STEPS}
    seen: dict[str, int] = {}
    async with connected(fleet) as kube:
        nodes = [
            SimulatedNode(f"{gang}-{i}", gpus=PODS // NODES_EACH, labels={"pool": gang})
            for gang in steps for i in range(NODES_EACH)
        ]  # fmt: skip
        for manifest in node_manifests(nodes):
            await kube.create(NODES, manifest)
        async with only_some_may_be_lifted(fleet):
            for gang, step in steps.items():
                await submit(kube, gang)
                await until(partial(step, kube, gang), f"{gang} comes to {step.__name__}")
                old = await asyncio.to_thread(fleet.kill, victim)
                seen[gang] = lifted((await mine(kube, gang))[1])
                await asyncio.to_thread(fleet.wait_restarted, victim, old, 60)
            assert {seen[gang] for gang in steps if gang.endswith(HALF)} == {PODS // 2}
            for gang in steps:
                if gang.endswith(HALF):
                    assert not await is_in(kube, gang, "Running"), "half of it waits"
        for gang in steps:
            await until(partial(is_in, kube, gang, "Succeeded"), f"{gang} ends", 60)
        told = {}
        for gang in steps:
            status = (await kube.get(GPUWORKLOADS, gang, "default"))["status"]
            told[gang] = status["retryCount"], status["attempt"], status["placedReplicas"]
        await delete_all(kube, 60)
    revisions = await asyncio.to_thread(history, fleet.endpoints)
    report = check(revisions, {"succeeds": Demand("Succeeded", "Completed")})
    assert report.violations == []
    assert report.left == []
    assert told == dict.fromkeys(steps, (0, 0, PODS)), "each is placed once"
    assert report.jobs_made == len(steps)
    assert ran(revisions) == {gang: list(range(PODS)) for gang in steps}, "each pod ran once"
    assert not too_early(revisions), "a pod was bound before all were there"


def ran(revisions: list[Revision]) -> dict[str, list[int]]:
    """The index of each pod that ran, by its gang's name."""
    found: dict[str, dict[str, int]] = {}
    for revision in revisions:
        if revision.kind == "pod" and revision.value is not None and revision.value["status"]["phase"] == "Running":
            meta = revision.value["metadata"]
            found.setdefault(meta["labels"][WORKLOAD_LABEL], {})[meta["uid"]] = int(meta["labels"][INDEX_KEY])
    return {gang: sorted(pods.values()) for gang, pods in found.items()}


def too_early(revisions: list[Revision]) -> list[str]:
    """Pods that were bound when not all pods of their gang had been created."""
    created: Counter[str] = Counter()
    known: set[str] = set()
    found = []
    for revision in revisions:
        if revision.kind == "pod" and revision.value is not None:
            gang = revision.value["metadata"]["labels"][WORKLOAD_LABEL]
            if revision.key not in known:
                known.add(revision.key)
                created[gang] += 1
            if revision.value["spec"].get("nodeName") and created[gang] < PODS:
                found.append(revision.key)
    return found
