"""Quotas and preemption on a real cluster: who waits for what, who borrows and gives back, and who is stopped how.

All wait side by side: what is stopped gets its grace period, and statuses of quotas are written every ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import pytest_asyncio

from crds.gpuworkload import API_VERSION
from kube.errors import Invalid
from kube.resources import GPUQUOTAS, JOBS, NAMESPACES, PODS, Resource
from planning.naming import ATTEMPT_LABEL, WORKLOAD_LABEL
from stack import Stack
from tests.application.stories import Begun, side_by_side
from tests.application.tenant import Tenant, condition, eventually, tenancy
from tests.application.test_observability import get

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

Story = Callable[[Tenant], Coroutine[None, None, None]]

RESOURCEQUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", namespaced=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(deployed: Stack) -> AsyncIterator[Begun]:
    async def tell(story: Story) -> None:
        async with tenancy(deployed, story.__name__) as tenant:
            try:
                await story(tenant)
            finally:
                await tenant.leave()
                for quota in await quotas(tenant):
                    await tenant.kube.delete(GPUQUOTAS, quota["metadata"]["name"])

    async with side_by_side({story.__name__: tell(story) for story in STORIES}) as begun:
        yield begun


async def grant(tenant: Tenant, name: str, **spec: Any) -> str:
    """A GPUQuota of this test's; its name, and its cohort's, begin with the tenant's namespace."""
    full = f"{tenant.namespace}-{name}"
    if "cohort" in spec:
        spec["cohort"] = f"{tenant.namespace}-{spec['cohort']}"
    body = {"apiVersion": API_VERSION, "kind": "GPUQuota", "metadata": {"name": full}, "spec": spec}
    await tenant.kube.create(GPUQUOTAS, body)
    return full


async def quotas(tenant: Tenant) -> list[dict[str, Any]]:
    found, _ = await tenant.kube.list(GPUQUOTAS)
    return [each for each in found if each["metadata"]["name"].startswith(tenant.namespace)]


async def neighbour(tenant: Tenant) -> Tenant:
    """Another namespace that uses the same nodes."""
    name = f"{tenant.namespace}-b"
    await tenant.kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return Tenant(tenant.stack, tenant.kube, tenant.temporal, name)


async def a_tenant_borrows_and_gives_back(tenant: Tenant) -> None:
    node, other = await tenant.node("a", 4), await neighbour(tenant)
    await grant(tenant, "all")
    mine = await grant(tenant, "mine", namespaces=[tenant.namespace], nominal={"gpus": 2}, cohort="all")
    theirs = await grant(tenant, "theirs", namespaces=[other.namespace], nominal={"gpus": 2}, cohort="all")
    await tenant.apply("own", 2, run="300s")
    await tenant.until("own", phase="Running")
    await tenant.apply("firm", 2)
    waiting = await tenant.until("firm", phase="Scheduling")
    assert condition(waiting, "Scheduled")["reason"] == "WaitingForQuota"
    assert f"GPUQuota {mine}: needs 2 GPUs, but of its nominal 2 GPUs" in waiting["status"]["message"]
    await tenant.apply("guest", 2, run="300s", preemptible=True)
    await tenant.until("guest", phase="Running")

    async def shown() -> bool:
        status = (await tenant.kube.get(GPUQUOTAS, mine)).get("status", {})
        return (status.get("used", {}).get("gpus"), status.get("borrowed", {}).get("gpus")) == (4, 2)

    await eventually(shown, 40, lambda: "the quota never shows that it holds 4 GPUs and borrows 2")
    due = {
        f'berth_tenant_gpus_{amount}{{tenant="{mine}"}} {value}.0'
        for amount, value in (("used", 4), ("nominal", 2), ("borrowed", 2))
    }

    async def counted() -> bool:
        scraped = await asyncio.to_thread(get, tenant, "worker-metrics", "/metrics")
        return due <= set(scraped.splitlines())

    await eventually(counted, 10, lambda: "the metrics are not what the status says")
    table = tenant.stack.kubectl("get", "gpuq", mine)
    head = table.splitlines()[0].split()
    assert head == ["NAME", "COHORT", "GPUS", "USED", "BORROWED", "WAITING", "SHARE", "VALID", "AGE"]
    explained = await asyncio.to_thread(explain, tenant, "firm")
    assert any(line.startswith(f"GPUQuota {mine}: 4 GPUs of 2 GPUs used") for line in explained["quota"])

    await other.apply("owner", 2, run="2s", nodeSelector={"pool": tenant.namespace})
    told = await tenant.until("guest", phase="Scheduling", seconds=60)
    assert f"its place on node {node} goes to {other.namespace}/owner" in told["status"]["message"]
    assert (told["status"]["attempt"], told["status"]["retryCount"]) == (1, 0)
    await other.until("owner", phase="Succeeded", seconds=60)
    again = await tenant.until("guest", phase="Running", seconds=60)
    assert (again["status"]["attempt"], again["status"]["retryCount"]) == (1, 0)
    reasons = [event["reason"] for event in await tenant.events("guest")]
    assert reasons.count("Preempted") == 1 and reasons.count("Scheduled") == 2
    assert [event["reason"] for event in await other.events("owner")].count("Preempting") == 1
    assert (await tenant.kube.get(GPUQUOTAS, theirs))["status"]["conditions"][0]["status"] == "True"
    await other.leave()


def explain(tenant: Tenant, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "berth", "explain", "workload", name, "-n", tenant.namespace, "--json"]
    config = ["--kubeconfig", str(tenant.stack.endpoints.kubeconfig("admin"))]
    shown: dict[str, Any] = json.loads(subprocess.run([*command, *config], capture_output=True, check=True).stdout)
    return shown


async def a_higher_priority_gets_the_place_of_a_low_one(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    async with tenant.phases() as phases:
        await tenant.apply("low", 2, run="20s", priority="low")
        low = await tenant.until("low", phase="Running")
        first = low["status"]["jobName"]
        await tenant.apply("high", 2, run="2s", priority="high")
        await tenant.until("low", phase="Scheduling", attempt=1, seconds=60)
        job = await tenant.kube.get(JOBS, first, tenant.namespace)
        assert job["spec"]["suspend"] is True
        assert job["metadata"]["annotations"]["gpu.warp.dev/preempted"].endswith("no retry is counted")
        await tenant.until("high", phase="Succeeded", seconds=60)
        done = await tenant.until("low", phase="Succeeded", seconds=90)
    assert (done["status"]["attempt"], done["status"]["retryCount"], done["status"]["jobName"]) == (1, 0, first)
    order = [phase for phase in phases["low"] if phase in ("Scheduling", "Running", "Succeeded")]
    assert order[-4:] == ["Running", "Scheduling", "Running", "Succeeded"]


async def a_stopped_job_goes_on_on_another_node(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    await tenant.apply("low", 2, run="4s", priority="low", activeDeadlineSeconds=60)
    first = (await tenant.until("low", phase="Running"))["status"]
    (job,) = await tenant.jobs()
    await tenant.apply("high", 2, run="300s", priority="high")
    await tenant.until("high", phase="Running", seconds=60)
    waits = (await tenant.until("low", phase="Scheduling", attempt=1))["status"]
    assert "assignedNode" not in waits and waits["jobName"] == first["jobName"]
    explained = await asyncio.to_thread(explain, tenant, "low")
    assert explained["state"] == "queued" and explained["position"] >= 1, "others wait in this cluster, too"
    other = await tenant.node("b", 2)
    again = (await tenant.until("low", phase="Running", seconds=60))["status"]
    assert (again["assignedNode"], again["jobName"], again["attempt"]) == (other, first["jobName"], 1)
    assert again["startTime"] > first["startTime"] and again["lastScheduleTime"] > first["lastScheduleTime"]
    pod = await tenant.kube.get(PODS, await tenant.pod("low"), tenant.namespace)
    assert (pod["spec"]["nodeName"], pod["metadata"]["labels"][ATTEMPT_LABEL]) == (other, "1")
    done = (await tenant.until("low", phase="Succeeded", seconds=60))["status"]
    assert (done["retryCount"], done["attempt"], done["jobName"]) == (0, 1, first["jobName"])
    (left,) = [each for each in await tenant.jobs() if each["metadata"]["labels"][WORKLOAD_LABEL] == "low"]
    assert left["metadata"]["uid"] == job["metadata"]["uid"]
    notes = [event["note"] for event in await tenant.events("low") if event["reason"] == "Scheduled"]
    assert f"Job {first['jobName']} was resumed on node {other} (leastLoaded)" in notes


async def a_stopped_job_that_may_not_go_on_is_replaced(tenant: Tenant) -> None:
    """Though the namespace has room for its Job and the other's, and for no third."""
    await tenant.node("a", 2)
    tight = {"metadata": {"name": "tight"}, "spec": {"hard": {"count/jobs.batch": "2"}}}
    await tenant.kube.create(RESOURCEQUOTAS, {"apiVersion": "v1", "kind": "ResourceQuota", **tight}, tenant.namespace)

    async def counted() -> bool:
        found = await tenant.kube.get(RESOURCEQUOTAS, "tight", tenant.namespace)
        return "count/jobs.batch" in found.get("status", {}).get("used", {})

    await eventually(counted, 60, lambda: "the quota on Jobs is not in force")
    await tenant.apply("low", 2, run="4s", priority="low")
    first = (await tenant.until("low", phase="Running"))["status"]["jobName"]
    await tenant.apply("high", 2, run="8s", priority="high")
    await tenant.until("low", phase="Scheduling", attempt=1, seconds=60)
    resumes = "has(oldObject.spec.suspend) && oldObject.spec.suspend && !object.spec.suspend"
    async with policy(tenant, first, resumes, {"suspend": False}):
        done = (await tenant.until("low", phase="Succeeded", seconds=60))["status"]
    assert (done["retryCount"], done["attempt"]) == (0, 1) and done["jobName"] != first
    names = {each["metadata"]["name"] for each in await tenant.jobs()}
    assert done["jobName"] in names and first not in names
    reasons = [event["reason"] for event in await tenant.events("low")]
    assert (reasons.count("Preempted"), reasons.count("Scheduled")) == (1, 2)
    assert not {"JobDeleted", "JobRefused", "Withdrawn"} & {*reasons}
    (why,) = [event["note"] for event in await tenant.events("low") if event["reason"] == "NotResumed"]
    assert f"Job {first} could not be resumed on " in why and "never to be done" in why


@contextlib.asynccontextmanager
async def policy(tenant: Tenant, job: str, refused: str, spec: dict[str, Any]) -> AsyncIterator[None]:
    """An admission policy by which nobody may change this Job in the way that `refused` tells; a patch of `spec` would.
    In force when it begins.
    """
    name = f"{tenant.namespace}-policy"
    api, meta = {"apiVersion": "admissionregistration.k8s.io/v1"}, {"metadata": {"name": name}}
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["jobs"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [
            {
                "expression": f"object.metadata.name != '{job}' || !({refused})",
                "message": "never to be done to this one",
            }
        ],
    }
    chosen = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": tenant.namespace}}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": chosen}
    items = [
        api | meta | {"kind": "ValidatingAdmissionPolicy", "spec": policy},
        api | meta | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    ]
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    await asyncio.to_thread(tenant.stack.kubectl, "create", "-f", "-", stdin=manifest)

    async def in_force() -> bool:
        patch = ("patch", "job", job, "-n", tenant.namespace, "--type=merge", "--dry-run=server")
        said = await asyncio.to_thread(tenant.stack.kubectl, *patch, "-p", json.dumps({"spec": spec}), check=False)
        return "never to be done" in said

    try:
        await eventually(in_force, 60, lambda: "the policy is not in force")
        yield
    finally:
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            await asyncio.to_thread(tenant.stack.kubectl, "delete", kind, name)


async def who_may_not_be_stopped_goes_on_and_another_is_stopped(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    for name, priority in (("kept", -300), ("other", -200)):
        await tenant.apply(name, run="300s", priority=priority)
    kept = await tenant.until("kept", phase="Running")
    await tenant.until("other", phase="Running")
    job = kept["status"]["jobName"]
    async with policy(tenant, job, "has(object.spec.suspend) && object.spec.suspend", {"suspend": True}):
        await tenant.apply("high", run="1s", priority="high")
        await tenant.until("high", phase="Succeeded", seconds=60)
    (told,) = [event for event in await tenant.events("kept") if event["reason"] == "NotStopped"]
    assert f"Job {job} could not be stopped" in told["note"] and "never to be done" in told["note"]
    assert told.get("series") is None, "it is told once"
    assert [event["reason"] for event in await tenant.events("other")].count("Preempted") == 1
    status = (await tenant.get("kept"))["status"]
    assert (status["phase"], status["attempt"], status["jobName"]) == ("Running", 0, job)


async def a_wrong_quota_says_where_and_why(tenant: Tenant) -> None:
    with pytest.raises(Invalid, match=r"spec\.nominal\.gpus.*greater than or equal to 0"):
        await grant(tenant, "negative", nominal={"gpus": -1})
    early = await grant(tenant, "early", namespaces=[tenant.namespace], cohort="late")

    async def valid() -> dict[str, Any]:
        return condition(await tenant.kube.get(GPUQUOTAS, early), "Valid")

    async def told() -> bool:
        return (await valid()).get("status") == "False"

    await eventually(told, 30, lambda: "nothing is said of a quota that is wrong")
    assert (await valid())["message"].startswith(f"spec.cohort: there is no GPUQuota {tenant.namespace}-late")
    await grant(tenant, "late")

    async def mended() -> bool:
        return (await valid()).get("status") == "True"

    await eventually(mended, 30, lambda: "the cohort is there, and nobody says so")


STORIES: tuple[Story, ...] = (
    a_tenant_borrows_and_gives_back,
    a_higher_priority_gets_the_place_of_a_low_one,
    a_stopped_job_goes_on_on_another_node,
    a_stopped_job_that_may_not_go_on_is_replaced,
    who_may_not_be_stopped_goes_on_and_another_is_stopped,
    a_wrong_quota_says_where_and_why,
)


@pytest.mark.parametrize("story", [story.__name__ for story in STORIES])
async def test_that(story: str, told: Begun) -> None:
    await told[story]
