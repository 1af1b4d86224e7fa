"""A workload's life on a real control plane: every way it can begin, go wrong and end."""

from __future__ import annotations

import asyncio

import pytest

from kube.client import KubeClient, Propagation
from kube.errors import Forbidden, Invalid, KubeError
from kube.resources import GPUWORKLOADS, JOBS, NAMESPACES, NODES, PODS, SECRETS
from planning.naming import STRATEGY_ANNOTATION, job_name
from planning.strategies import installed
from tests.application.tenant import Tenant, condition, eventually

pytestmark = pytest.mark.stack


async def test_from_apply_to_finished_there_are_no_events_but_the_ledgers(tenant: Tenant) -> None:
    await tenant.usable(await tenant.node("a", 4))
    raw = await tenant.apply("w", 2, modelName="meta-llama/Llama-2-70b")
    done = await tenant.until("w", phase="Succeeded")
    assert condition(done, "Finished")["status"] == "True"

    async def let_go() -> bool:
        return "finalizers" not in (await tenant.get("w"))["metadata"]

    await eventually(let_go, 10, lambda: "its finalizer is still there")
    uid = raw["metadata"]["uid"]
    assert await tenant.history(uid) == []
    assert uid in await tenant.completions()
    assert [e["reason"] for e in await tenant.events("w")] == ["Scheduled", "Completed"]
    await tenant.pod("w")  # whose log somebody may want
    await tenant.delete("w")
    await tenant.empty()


async def test_however_long_it_waits_its_own_history_stays_small(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("first", 1, run="6s")
    raw = await tenant.apply("second", 1)
    waiting = await tenant.until("second", phase="Scheduling")
    assert condition(waiting, "Scheduled")["reason"] == "WaitingForCapacity"
    assert "1 GPU" in waiting["status"]["message"]
    await tenant.until("second", phase="Succeeded")
    assert await tenant.history(raw["metadata"]["uid"]) == []


async def test_the_job_asks_for_exactly_the_gpus_and_is_pinned(tenant: Tenant) -> None:
    node = await tenant.node("a", 8)
    await tenant.apply("w", 8, modelName="org/" + "x" * 200, run="5s")
    await tenant.until("w", phase="Running")
    (job,) = await tenant.jobs()
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": [node]}]
    assert "nodeName" not in spec
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    assert "ttlSecondsAfterFinished" not in job["spec"]
    env = {e["name"]: e.get("value") for e in spec["containers"][0]["env"]}
    assert env["GPU_COUNT"] == "8"


async def test_many_at_once_never_overbook_a_node(tenant: Tenant) -> None:
    for i in range(3):
        await tenant.node(f"n{i}", 4)
    most: dict[str, int] = {}

    async def watch() -> bool:
        used: dict[str, int] = {}
        for pod in await tenant.pods():
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                continue
            node = (
                pod["spec"].get("nodeName")
                or pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                    "nodeSelectorTerms"
                ][0]["matchFields"][0]["values"][0]
            )
            used[node] = used.get(node, 0) + int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for node, gpus in used.items():
            most[node] = max(most.get(node, 0), gpus)
        items, _ = await tenant.kube.list(GPUWORKLOADS, tenant.namespace)
        return all(w.get("status", {}).get("phase") == "Succeeded" for w in items)

    async with tenant.phases() as shown:
        await asyncio.gather(*(tenant.apply(f"w{i}", 1 + i % 3, run="2s") for i in range(24)))
        await eventually(watch, 90, lambda: "not all have succeeded")
    order = ["Scheduling", "Scheduled", "Running", "Succeeded"]
    assert len(shown) == 24
    assert [phases for phases in shown.values() if phases != sorted(phases, key=order.index)] == []
    assert most
    assert max(most.values()) <= 4
    assert len(most) == 3, "all nodes are used, not only the first"


async def test_failures_are_retried_and_then_final(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", exit_code=3, retryPolicy={"maxRetries": 1, "backoffSeconds": 1})
    backing_off = await tenant.until("w", phase="Pending", retryCount=1)
    assert backing_off["status"]["nextRetryTime"]
    assert "exit code 3" in backing_off["status"]["message"]
    failed = await tenant.until("w", phase="Failed")
    assert failed["status"]["retryCount"] == 1
    assert condition(failed, "Finished")["reason"] == "MaxRetriesExceeded"
    assert "exit code 3" in failed["status"]["message"]

    async def tidy() -> bool:
        return [job["metadata"]["name"][-2:] for job in await tenant.jobs()] == ["-1"]

    await eventually(tidy, 20, lambda: "of all Jobs the last one stays, and no other")
    reasons = [e["reason"] for e in await tenant.events("w")]
    assert reasons.count("MaxRetriesExceeded") == 1


async def test_a_request_no_node_could_hold_is_told_so_and_runs_after_an_edit(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    await tenant.apply("w", 8)
    told = await tenant.until("w", phase="Pending", retryCount=1)
    assert condition(told, "Scheduled")["reason"] == "NoSuitableNode"
    assert "8 GPU" in told["status"]["message"]
    await tenant.patch("w", gpuCount=2)
    await tenant.until("w", phase="Succeeded", seconds=20)  # without waiting out the 30 s of back-off


async def test_suspension_takes_the_job_back_and_costs_no_retry(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", run="3s")
    await tenant.until("w", phase="Running")
    await tenant.patch("w", suspend=True)
    suspended = await tenant.until("w", phase="Pending")
    assert condition(suspended, "Suspended")["status"] == "True"
    await tenant.empty()
    await tenant.patch("w", suspend=False)
    done = await tenant.until("w", phase="Succeeded")
    assert done["status"]["retryCount"] == 0
    assert done["status"]["attempt"] == 1


async def test_a_suspended_newcomer_does_not_run(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", suspend=True)
    raw = await tenant.until("w", phase="Pending")
    assert condition(raw, "Suspended")["status"] == "True"
    assert await tenant.jobs() == []
    await tenant.patch("w", suspend=False)
    await tenant.until("w", phase="Succeeded")


@pytest.mark.parametrize("moment", ["queued", "running", "backing-off", "finished", "at-once"])
async def test_deletion(tenant: Tenant, moment: str) -> None:
    if moment != "queued":
        await tenant.node("a", 1)
    else:
        await tenant.node("a", 2)
        await tenant.apply("blocker", 2, run="60s")
        await tenant.until("blocker", phase="Running")
    failing = moment == "backing-off"
    await tenant.apply("w", run="1s" if moment in ("finished", "backing-off") else "60s", exit_code=int(failing))
    match moment:
        case "queued":
            await tenant.until("w", phase="Scheduling")
        case "running":
            await tenant.until("w", phase="Running")
        case "backing-off":
            await tenant.until("w", retryCount=1)
        case "finished":
            await tenant.until("w", phase="Succeeded")
    await tenant.delete("w")
    await tenant.until_gone("w")
    if moment == "queued":
        await tenant.delete("blocker")
        await tenant.until_gone("blocker")
    await tenant.empty()


async def test_an_eviction_is_answered_with_another_job_and_costs_no_retry(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", run="4s")
    await tenant.until("w", phase="Running")
    await tenant.evict("w")
    done = await tenant.until("w", phase="Succeeded", seconds=60)
    assert done["status"]["retryCount"] == 0
    assert done["status"]["attempt"] >= 1


async def test_a_pod_that_finds_no_place_in_time_is_withdrawn_and_placed_anew(tenant: Tenant) -> None:
    await tenant.node("a", 2)
    # Nobody but the kube-scheduler knows of this rule, as of any place that somebody else took.
    term = {"labelSelector": {"matchLabels": {"no": "such-pod"}}, "topologyKey": "kubernetes.io/hostname"}
    template = {
        "spec": {
            "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
            "containers": [{"name": "main", "image": "busybox:1.36"}],
        }
    }
    await tenant.apply("w", 2, template=template)

    async def withdrawn() -> bool:
        told = [e for e in await tenant.events("w") if e["reason"] == "Withdrawn" and "affinity" in e["note"]]
        return bool(told) and bool((await tenant.get("w")).get("status", {}).get("attempt", 0) >= 1)

    await eventually(withdrawn, 40, lambda: "the first Job was not withdrawn, or nobody told why")
    raw = await tenant.get("w")
    assert raw["status"]["retryCount"] == 0
    assert "JobDeleted" not in [e["reason"] for e in await tenant.events("w")]


async def test_every_installed_strategy_places(tenant: Tenant) -> None:
    node = await tenant.node("a", 8)
    for name in installed():
        await tenant.apply(name.lower(), schedulingStrategy=name)
    for name in installed():
        await tenant.until(name.lower(), phase="Succeeded", assignedNode=node, strategy=name)


async def test_packing_keeps_a_node_free_where_spreading_does_not(tenant: Tenant) -> None:
    for name in ("a", "b"):
        await tenant.node(name, 4)
    await tenant.kube.merge_patch(
        NAMESPACES, tenant.namespace, None, {"metadata": {"annotations": {STRATEGY_ANNOTATION: "mostAllocated"}}}
    )
    await tenant.apply("first", 1, run="60s", schedulingStrategy="leastLoaded")
    await tenant.until("first", phase="Running")
    await tenant.apply("packed", 1, run="60s")
    first = (await tenant.get("first"))["status"]["assignedNode"]
    await tenant.until("packed", phase="Running", assignedNode=first)
    await tenant.apply("spread", 1, run="60s", schedulingStrategy="leastLoaded")
    raw = await tenant.until("spread", phase="Running")
    assert raw["status"]["assignedNode"] != first


async def test_a_template_that_the_api_server_refuses_is_a_condition(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    bad = {"spec": {"containers": [{"name": "Not A Name", "image": "x"}]}}
    await tenant.apply("w", template=bad)
    raw = await tenant.until("w", phase="Pending")
    assert condition(raw, "Accepted")["reason"] == "TemplateRefused"
    assert "containers[0].name" in raw["status"]["message"]
    assert await tenant.jobs() == []
    await tenant.patch("w", template={"spec": {"containers": [{"name": "main", "image": "x"}]}})
    # A merge patch merges the template's maps; the list of containers is replaced.
    await tenant.until("w", phase="Succeeded")


@pytest.mark.parametrize("gpus", [0, 9])
async def test_zero_or_nine_gpus_are_refused_at_the_door(tenant: Tenant, gpus: int) -> None:
    with pytest.raises(Invalid, match=r"spec\.gpuCount"):
        await tenant.apply("w", gpus)


async def test_a_spec_of_1_4_mib_is_refused_or_told_never_a_crash(tenant: Tenant) -> None:
    with pytest.raises(KubeError) as refused:
        await tenant.apply("w", args=["x" * 1_400_000])
    assert "spec.args" in str(refused.value) or refused.value.status in (413, 422)


async def test_a_name_of_253_characters_runs(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    name = ("n" * 60 + ".") * 4 + "n" * 9
    assert len(name) == 253
    await tenant.apply(name)
    await tenant.until(name, phase="Succeeded")


async def test_after_the_first_job_only_suspend_priority_and_deadline_may_change(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", run="20s")
    await tenant.until("w", phase="Running")
    with pytest.raises(Invalid, match="suspend, priority"):
        await tenant.patch("w", gpuCount=2)
    await tenant.patch("w", priority=7, activeDeadlineSeconds=3)
    failed = await tenant.until("w", phase="Failed")
    assert condition(failed, "Finished")["reason"] == "DeadlineExceeded"
    assert failed["status"]["retryCount"] == 0


async def test_higher_priority_goes_first(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("blocker", run="4s")
    await tenant.until("blocker", phase="Running")
    await tenant.apply("low", priority="low", run="3s")
    await tenant.apply("high", priority="high", run="1s")
    await tenant.until("low", phase="Scheduling")
    await tenant.until("high", phase="Scheduling")
    await tenant.until("high", phase="Succeeded")
    assert (await tenant.get("low"))["status"]["phase"] != "Succeeded"
    await tenant.until("low", phase="Succeeded")


async def test_a_tainted_or_cordoned_node_is_not_used(tenant: Tenant) -> None:
    tainted = await tenant.node("a", 1)
    await tenant.kube.merge_patch(
        NODES, tainted, None, {"spec": {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}}
    )
    await tenant.apply("w", retryPolicy={"maxRetries": 10, "backoffSeconds": 1})
    told = await tenant.until("w", phase={"Scheduling", "Pending"})
    assert "k" in told["status"]["message"]
    await tenant.apply("tolerant", tolerations=[{"key": "k", "operator": "Exists"}])
    await tenant.until("tolerant", phase="Succeeded")
    await tenant.kube.merge_patch(NODES, tainted, None, {"spec": {"taints": None}})
    await tenant.until("w", phase="Succeeded", seconds=60)


async def test_others_pods_count(tenant: Tenant) -> None:
    node = await tenant.node("a", 2)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "somebody-else"},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "x", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        },
    }
    await tenant.kube.create(PODS, pod, tenant.namespace)
    await tenant.apply("w", 2)
    raw = await tenant.until("w", phase="Scheduling")
    assert condition(raw, "Scheduled")["reason"] == "WaitingForCapacity"
    await tenant.kube.delete(PODS, "somebody-else", tenant.namespace)
    await tenant.until("w", phase="Succeeded")


async def test_a_finished_workload_is_deleted_when_its_time_is_over(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", ttlSecondsAfterFinished=2)
    await tenant.until_gone("w", seconds=45)


async def test_a_poke_to_a_tombstone_starts_nothing(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    raw = await tenant.apply("w")
    await tenant.until("w", phase="Succeeded")
    before = await tenant.history(raw["metadata"]["uid"])
    await tenant.patch("w", priority=5)
    await tenant.apply("other")
    await tenant.until("other", phase="Succeeded")  # the controller has certainly seen the edit by now
    assert await tenant.history(raw["metadata"]["uid"]) == before
    assert (await tenant.get("w"))["status"]["phase"] == "Succeeded"


async def test_berths_identities_may_do_nothing_else(tenant: Tenant) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "x", "image": "x"}]},
    }
    for identity in ("berth-controller", "berth-worker"):
        async with await KubeClient.connect(tenant.stack.endpoints.kubeconfig(identity)) as kube:
            for namespace in (tenant.namespace, "berth-system"):
                with pytest.raises(Forbidden):
                    await kube.list(SECRETS, namespace)
                body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}}
                with pytest.raises(Forbidden):
                    await kube.create(SECRETS, body, namespace)
            with pytest.raises(Forbidden):
                await kube.create(PODS, pod, tenant.namespace)  # the worker's must belong to a SeatMigration


@pytest.mark.parametrize("cascade", ["Background", "Foreground"])
async def test_a_job_deleted_by_hand_is_replaced_and_no_turn_is_repeated(tenant: Tenant, cascade: Propagation) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", run="300s")
    await tenant.until("w", phase="Running", attempt=0)
    await tenant.evict("w")
    await tenant.until("w", phase="Running", attempt=1, seconds=60)
    (job,) = await tenant.jobs()
    await tenant.kube.delete(JOBS, job["metadata"]["name"], tenant.namespace, propagation=cascade)

    async def replaced() -> bool:
        jobs = await tenant.jobs()
        return bool(jobs) and all(
            j["metadata"]["uid"] != job["metadata"]["uid"] and j.get("status", {}).get("ready") for j in jobs
        )

    await eventually(replaced, 60, lambda: "no new Job runs")
    (again,) = await tenant.jobs()
    assert int(again["metadata"]["labels"]["gpu.warp.dev/attempt"]) >= 1, "the ledger has not lost count"
    status = (await tenant.until("w", phase="Running"))["status"]
    assert status["retryCount"] == 0
    assert status["jobName"] == again["metadata"]["name"]


async def test_a_name_that_somebody_elses_job_has_is_told(tenant: Tenant) -> None:
    await tenant.node("a", 1)
    await tenant.apply("w", suspend=True, retryPolicy={"maxRetries": 1, "backoffSeconds": 1})
    raw = await tenant.until("w", phase="Pending")
    body = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name("w", raw["metadata"]["uid"], 0)},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}},
    }
    await tenant.kube.create(JOBS, body, tenant.namespace)
    await tenant.patch("w", suspend=False)
    refused = await tenant.until("w", retryCount=1)
    assert "not this workload's" in refused["status"]["message"]
    await tenant.until("w", phase="Succeeded")  # the next Job has another number, and so another name


async def test_five_hundred_that_fit_nowhere_are_told_and_hold_up_nobody(tenant: Tenant) -> None:
    await tenant.node("a", 4)
    policy = {"maxRetries": 1, "backoffSeconds": 300}
    await asyncio.gather(*(tenant.apply(f"big-{i}", 8, retryPolicy=policy) for i in range(500)))
    await tenant.apply("small", 1)
    await tenant.until("small", phase="Succeeded", seconds=60)

    async def told() -> bool:
        items, _ = await tenant.kube.list(GPUWORKLOADS, tenant.namespace)
        waiting = [i for i in items if condition(i, "Scheduled").get("reason") == "NoSuitableNode"]
        return len(waiting) == 500

    await eventually(told, 120, lambda: "not all 500 were told why")
