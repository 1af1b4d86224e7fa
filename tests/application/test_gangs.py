"""Gangs on a real cluster: they start as a whole or not at all, near to each other where they must be, and give way and
are made way for as a whole. All wait side by side.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import pytest_asyncio

from kube.errors import Invalid
from kube.resources import JOBS
from planning.naming import GATE, INDEX_KEY, PLACES_ANNOTATION, WORKLOAD_LABEL
from stack import Stack
from tests.application.stories import Begun, side_by_side
from tests.application.tenant import Tenant, condition, eventually, tenancy
from tests.application.test_quotas import explain

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

Story = Callable[[Tenant], Coroutine[None, None, None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(deployed: Stack) -> AsyncIterator[Begun]:
    async def tell(story: Story) -> None:
        async with tenancy(deployed, story.__name__) as tenant:
            try:
                await story(tenant)
            finally:
                await tenant.leave()

    async with side_by_side({story.__name__: tell(story) for story in STORIES}) as begun:
        yield begun


async def members(tenant: Tenant, gang: str) -> list[dict[str, Any]]:
    """The gang's pods, by index."""
    pods = [pod for pod in await tenant.pods() if pod["metadata"]["labels"].get(WORKLOAD_LABEL) == gang]
    return sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][INDEX_KEY]))


async def a_gang_runs_on_the_nodes_that_its_pods_were_told(tenant: Tenant) -> None:
    nodes = [await tenant.node(name, 2) for name in "abc"]
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]}
    env = [{"name": "SIMULATED_RUN", "value": "8s"}]
    template = {
        "spec": {
            "containers": [{"name": "a", "image": "b", "env": env}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        }
    }
    await tenant.apply("gang", 1, replicas=5, template=template)
    running = await tenant.until("gang", phase="Running", placedReplicas=5)
    status = running["status"]
    assert status["message"] == f"running on 3 nodes ({', '.join(nodes)}), 5 of 5 pods"
    assert status["assignedNode"] == nodes[0]
    assert sum(each["pods"] for each in status["nodes"]) == 5
    pods = await members(tenant, "gang")
    job = await tenant.kube.get(JOBS, status["jobName"], tenant.namespace)
    places = json.loads(job["metadata"]["annotations"][PLACES_ANNOTATION])
    assert [{"name": node, "pods": count} for node, count in places] == status["nodes"]
    assert [pod["spec"]["nodeName"] for pod in pods] == [node for node, count in places for _ in range(count)]
    assert job["spec"]["template"]["spec"]["schedulingGates"] == [{"name": GATE}]
    for pod in pods:
        assert {"name": "REPLICAS", "value": "5"} in pod["spec"]["containers"][0]["env"]
        assert "schedulingGates" not in pod["spec"]
        (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert term["matchExpressions"] == required["nodeSelectorTerms"][0]["matchExpressions"]
        assert term["matchFields"][0]["values"] == [pod["spec"]["nodeName"]]
    done = await tenant.until("gang", phase="Succeeded")
    assert (done["status"]["attempt"], done["status"]["retryCount"], done["status"]["placedReplicas"]) == (0, 0, 5)


async def a_gang_that_cannot_fit_is_told_so_at_once(tenant: Tenant) -> None:
    for name in "ab":
        await tenant.node(name, 8)
    await tenant.node("small", 4)
    began = time.monotonic()
    await tenant.apply("never", 8, replicas=10)
    told = await tenant.until("never", phase="Pending")
    assert time.monotonic() - began < 10
    assert condition(told, "Scheduled")["reason"] == "NoSuitableNode"
    assert told["status"]["message"].startswith(
        "needs 10 pods with 8 GPUs each; all nodes together could hold 2 even if empty"
    )
    assert not await tenant.jobs()
    with pytest.raises(Invalid, match=r"spec\.minReplicas.*must be at most replicas"):
        await tenant.apply("wrong", 1, replicas=2, minReplicas=3)


async def a_gang_stays_within_one_rack(tenant: Tenant) -> None:
    near: dict[str, Any] = {"level": "rack", "mode": "Required"}
    await tenant.node("a", 2, rack="a")
    for name in "bc":
        await tenant.node(name, 2, rack="b")
    await tenant.apply("gang", 1, run="300s", replicas=4, topology=near)
    running = await tenant.until("gang", phase="Running")
    assert {each["name"][-1] for each in running["status"]["nodes"]} == {"b", "c"}
    await tenant.apply("never", 1, replicas=5, topology=near)
    told = await tenant.until("never", phase="Pending")
    assert "needs 5 pods with 1 GPU each in one rack; the largest, b, could hold 4" in told["status"]["message"]
    await tenant.apply("later", 1, run="1s", replicas=3, topology=near)
    waiting = await tenant.until("later", phase="Scheduling")
    assert waiting["status"]["message"] == ("needs 3 pods with 1 GPU each in one rack: 2 would fit now in a, 2 in all")
    explained = await asyncio.to_thread(explain, tenant, "later")
    assert [(each["name"], each["fits"], each["empty"]) for each in explained["domains"]] == [("a", 2, 2), ("b", 0, 4)]
    assert explained["helps"] == ["minReplicas: 2 or less: so many of its pods fit now"]
    await tenant.delete("gang")
    await tenant.until_gone("gang")
    await tenant.until("later", phase="Succeeded")
    await tenant.delete("never")


async def a_gang_may_start_with_fewer(tenant: Tenant) -> None:
    await tenant.node("a", 4)
    await tenant.apply("single", 1, run="300s")
    await tenant.until("single", phase="Running")
    await tenant.apply("gang", 1, run="3s", replicas=4, minReplicas=2)
    running = await tenant.until("gang", phase="Running")
    assert running["status"]["placedReplicas"] == 3 and running["status"]["message"].endswith(", 3 of 4 pods")
    await tenant.until("gang", phase="Succeeded")


async def a_failed_pod_fails_the_gang_and_all_begin_anew(tenant: Tenant) -> None:
    await tenant.node("a", 4)
    await tenant.apply("gang", 1, run="1s", exit_code=3, replicas=3, retryPolicy={"maxRetries": 1, "backoffSeconds": 1})
    await tenant.until("gang", retryCount=1, seconds=30)
    failed = await tenant.until("gang", phase="Failed", seconds=60)
    assert (failed["status"]["attempt"], failed["status"]["retryCount"]) == (1, 1)
    assert "exit code 3" in failed["status"]["message"]


async def a_gang_that_is_deleted_leaves_nothing(tenant: Tenant) -> None:
    for name in "ab":
        await tenant.node(name, 2)
    await tenant.apply("gang", 1, run="300s", replicas=4)
    await tenant.until("gang", phase={"Scheduled", "Running"})
    await tenant.delete("gang")
    await tenant.until_gone("gang")
    await tenant.empty()


async def a_gang_whose_node_takes_none_of_its_pods_is_placed_anew(tenant: Tenant) -> None:
    """The kube-scheduler refuses one of its pods: all go back, and the node is avoided."""
    bad = await tenant.node("a", 4, kubelet=False)
    for name in "bc":
        await tenant.node(name, 2)
    # Somebody's pod takes the node's place behind berth's back: a host port that the gang wants too.
    port = {"containerPort": 80, "hostPort": 18080}
    taken = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "taken", "namespace": tenant.namespace},
        "spec": {"nodeName": bad, "containers": [{"name": "a", "image": "b", "ports": [port]}]},
    }
    await asyncio.to_thread(tenant.stack.kubectl, "create", "-f", "-", stdin=json.dumps(taken))
    env = [{"name": "SIMULATED_RUN", "value": "3s"}]
    template = {"spec": {"containers": [{"name": "a", "image": "b", "env": env, "ports": [port]}]}}
    await tenant.apply("gang", 1, replicas=2, template=template)
    again = await tenant.until("gang", attempt=1, seconds=60)
    assert again["status"]["retryCount"] == 0
    done = await tenant.until("gang", phase="Succeeded", seconds=60)
    assert done["status"]["retryCount"] == 0 and {each["name"][-1] for each in done["status"]["nodes"]} == {"b", "c"}
    withdrawn = [event for event in await tenant.events("gang") if event["reason"] == "Withdrawn"]
    assert withdrawn and f"found no place on node {bad}" in withdrawn[0]["note"]


async def gangs_give_way_and_are_made_way_for_as_a_whole(tenant: Tenant) -> None:
    for name in "ab":
        await tenant.node(name, 2)
    await tenant.apply("low", 1, run="20s", priority="low", replicas=3)
    await tenant.until("low", phase="Running")
    await tenant.apply("high", 2, run="2s", priority="high", replicas=2)
    stopped = await tenant.until("low", phase="Scheduling", attempt=1, seconds=60)
    assert f"goes to {tenant.namespace}/high" in stopped["status"]["message"]
    await tenant.until("high", phase="Succeeded", seconds=60)
    done = await tenant.until("low", phase="Succeeded", seconds=90)
    assert (done["status"]["attempt"], done["status"]["retryCount"]) == (1, 0)
    reasons = Counter(event["reason"] for event in await tenant.events("low"))
    assert reasons["Preempted"] == 1 and reasons["Scheduled"] == 2


async def a_gangs_own_row_tells_its_pods(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    await tenant.apply("gang", 1, run="60s", replicas=2)
    await tenant.until("gang", phase="Running")

    async def shown() -> bool:
        head, row = tenant.stack.kubectl("get", "gpuw", "gang", "-n", tenant.namespace, "-o", "wide").splitlines()
        return "PODS" in head.split() and row.split()[head.split().index("PODS")] == "2"

    await eventually(shown, 5, lambda: "kubectl does not show the number of pods")


STORIES: tuple[Story, ...] = (
    a_gang_runs_on_the_nodes_that_its_pods_were_told,
    a_gang_that_cannot_fit_is_told_so_at_once,
    a_gang_stays_within_one_rack,
    a_gang_may_start_with_fewer,
    a_failed_pod_fails_the_gang_and_all_begin_anew,
    a_gang_that_is_deleted_leaves_nothing,
    a_gang_whose_node_takes_none_of_its_pods_is_placed_anew,
    gangs_give_way_and_are_made_way_for_as_a_whole,
    a_gangs_own_row_tells_its_pods,
)


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
async def test_that(story: str, told: Begun) -> None:
    await told[story]
