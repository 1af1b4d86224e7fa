"""The door of the real API server: what is refused and filled in there, and that nobody waits for berth to be there."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from berth.install import FIELD_MANAGER
from controller.webhooks.keeper import CONFIGURATIONS
from controller.webhooks.material import SECRET_NAME, SECRET_NAMESPACE
from crds import gpuquota, kernelcache, kernelcachepolicy
from crds.gpuworkload import API_VERSION, KIND
from kube.errors import Invalid, KubeError
from kube.resources import (
    CONFIGMAPS,
    GPUQUOTAS,
    GPUWORKLOADS,
    LEASES,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    SECRETS,
    VALIDATING_WEBHOOKS,
)
from planning.naming import STRATEGY_ANNOTATION
from planning.strategies import installed
from tests.application.tenant import Tenant, condition, eventually
from tests.application.test_long_outages import is_ready, listening, stopped

pytestmark = pytest.mark.stack

UNKNOWN = f"there is no strategy 'noSuchThing'; installed are {', '.join(installed())}"
BIG = {"metadata": {"annotations": {"x": "y" * 100_000}}, "spec": {"containers": [{"name": "main", "image": "x"}]}}


@pytest.fixture
async def checked(tenant: Tenant) -> Tenant:
    """A tenant whose workloads are checked: the webhooks begin some moments after the controller is ready."""

    async def answers() -> bool:
        try:
            await tenant.apply("probe", schedulingStrategy="noSuchThing")
        except Invalid:
            return True
        await tenant.delete("probe")
        return False

    await eventually(answers, 40, lambda: "nobody answers the API server's webhooks")
    return tenant


def manifest(name: str, **spec: Any) -> str:
    body = {"modelName": "m", "gpuCount": 1, "suspend": True, **spec}
    return json.dumps({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": body})


async def kubectl(tenant: Tenant, *arguments: str, stdin: str) -> str:
    return await asyncio.to_thread(
        tenant.stack.kubectl, *arguments, "-n", tenant.namespace, "-f", "-", stdin=stdin, check=False
    )


async def strategy(tenant: Tenant, name: str) -> None:
    """What the namespace says from now on; the controller hears of it a moment later."""
    body = {"metadata": {"annotations": {STRATEGY_ANNOTATION: name}}}
    await tenant.kube.merge_patch(NAMESPACES, tenant.namespace, None, body)


async def test_kubectl_is_told_where_and_why(checked: Tenant) -> None:
    said = await kubectl(checked, "apply", stdin=manifest("w", schedulingStrategy="noSuchThing"))
    assert f"spec.schedulingStrategy: {UNKNOWN}" in said
    for more, why in (
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "spec.resources: GPUs are asked for by gpuCount"),
        ({"nodeSelector": {"a b": "c"}}, "spec.nodeSelector.a b: is not a label key"),
        ({"template": BIG}, "spec.template: must be at most 64 KiB as JSON"),
    ):
        assert why in await kubectl(checked, "apply", "--server-side", stdin=manifest("w", **more))
    assert (await checked.kube.list(GPUWORKLOADS, checked.namespace))[0] == []
    bad = manifest("w", schedulingStrategy="noSuchThing")
    assert UNKNOWN in await kubectl(checked, "apply", "--dry-run=server", stdin=bad)
    await checked.apply("good", suspend=True)
    with pytest.raises(Invalid, match="there is no strategy"):
        await checked.patch("good", schedulingStrategy="noSuchThing")


async def test_kubectl_is_told_of_a_circle_of_cohorts(checked: Tenant) -> None:
    p, q = f"{checked.namespace}-p", f"{checked.namespace}-q"

    def quota(name: str, **spec: Any) -> str:
        return json.dumps({"apiVersion": API_VERSION, "kind": gpuquota.KIND, "metadata": {"name": name}, "spec": spec})

    try:
        said = await kubectl(checked, "apply", stdin=quota(p, cohort=q))
        assert f"Warning: spec.cohort: there is no GPUQuota {q}; until then it neither lends nor borrows" in said
        assert f"{p} created" in said

        async def refused() -> bool:  # the controller hears of the first a moment later
            said = await kubectl(checked, "apply", "--dry-run=server", stdin=quota(q, cohort=p))
            return f"denied the request: spec.cohort: {q} → {p} → {q} is a circle" in said

        await eventually(refused, 10, lambda: "a circle of cohorts is let in")
        said = await kubectl(checked, "apply", stdin=quota(q, namespaces=[checked.namespace]))
        assert f"GPUQuota {p} would be wrong then: spec.cohort: GPUQuota {q} names namespaces" in said
        assert "created" in await kubectl(checked, "apply", stdin=quota(q))
    finally:
        for name in (p, q):
            await checked.kube.delete(GPUQUOTAS, name)


async def test_kubectl_is_told_what_can_never_work_of_kernel_caches(checked: Tenant) -> None:
    """Nothing is stored: a policy would be about others' caches."""

    async def said(kind: str, spec: dict[str, Any]) -> str:
        raw = {"apiVersion": kernelcache.API_VERSION, "kind": kind, "metadata": {"name": "door"}, "spec": spec}
        return await kubectl(checked, "apply", "--dry-run=server", stdin=json.dumps(raw))

    image = "registry.example/team/cache"
    pinned = {"image": f"{image}@sha256:{'0' * 64}", "pullPolicy": "Never"}
    denied = 'admission webhook "validate.tkm.io" denied the request: spec.'
    for kind in (kernelcache.KIND, kernelcache.CLUSTER_KIND):
        told = await said(kind, {"ociImage": {"image": "team/cache"}})
        assert f"{denied}ociImage.image: 'team/cache' names no registry" in told
        assert f"{denied}ociImage.pullPolicy: is Never" in await said(
            kind, {"ociImage": {"image": image, "pullPolicy": "Never"}}
        )
        told = await said(kind, {"ociImage": pinned, "updatePolicy": {"type": "OnTagChange"}})
        assert "Warning: spec.updatePolicy.type: OnTagChange follows nothing here" in told and "created" in told
    key = "-----BEGIN PUBLIC KEY-----\ncut\n-----END PUBLIC KEY-----\n"
    policy = {"images": ["**"], "signers": [{"name": "release", "key": key}]}
    assert f"{denied}signers[release].key: it is no public key" in await said(kernelcachepolicy.KIND, policy)
    root = {"issuer": "i", "identity": "x", "trustedRoot": {"name": "sigstore", "key": "trusted_root.json"}}
    policy = {"images": ["**"], "signers": [{"name": "release", "keyless": root}], "allowSkipping": True}
    told = await said(kernelcachepolicy.KIND, policy)
    assert "Warning: spec.allowSkipping: ** fits every image" in told and "created" in told


async def test_the_namespaces_strategy_is_written_into_the_spec_and_no_finalizer(checked: Tenant) -> None:
    assert "schedulingStrategy" not in (await checked.apply("before", suspend=True))["spec"]
    await strategy(checked, "mostAllocated")
    number = iter(range(100))

    async def filled_in() -> bool:
        raw = await checked.apply(f"w-{next(number)}", suspend=True)
        return bool(raw["spec"].get("schedulingStrategy") == "mostAllocated")

    await eventually(filled_in, 10, lambda: "the namespace's strategy is not filled in")
    own = await checked.apply("own", suspend=True, schedulingStrategy="random")
    assert own["spec"]["schedulingStrategy"] == "random"
    for apply in (("apply",), ("apply", "--server-side")):
        for _ in range(2):  # who applies it again does not take it away, for it was never theirs
            said = await kubectl(checked, *apply, "-o", "json", stdin=manifest(f"by-{len(apply)}"))
            applied = json.loads(said)
            assert applied["spec"]["schedulingStrategy"] == "mostAllocated"
            assert "finalizers" not in applied["metadata"]
    await strategy(checked, "noSuchThing")

    async def warned() -> bool:
        said = await kubectl(checked, "create", stdin=manifest(f"w-{next(number)}"))
        return f"Warning: namespace {checked.namespace}: {UNKNOWN}" in said and "created" in said

    await eventually(warned, 10, lambda: "kubectl shows no warning")


async def test_many_admissions_ask_the_api_server_nothing(checked: Tenant) -> None:
    def asked() -> dict[str, float]:
        text = checked.stack.kubectl("get", "--raw", "/metrics")
        watched = (
            "namespaces|gpuquotas|secrets|configmaps|validatingwebhookconfigurations|mutatingwebhookconfigurations"
        )
        pattern = rf'^apiserver_request_total\{{.*resource="({watched})".*verb="(GET|LIST)".*\}} (\S+)$'
        found: dict[str, float] = {}
        for resource, verb, count in re.findall(pattern, text, re.MULTILINE):
            found[f"{verb} {resource}"] = found.get(f"{verb} {resource}", 0.0) + float(count)
        return found

    before, admitted = asked(), await reviews(checked)
    for number in range(60):
        await checked.apply(f"w{number}", suspend=True)
    assert await reviews(checked) - admitted >= 120
    more = {key: count - before.get(key, 0.0) for key, count in asked().items()}
    assert max(more.values(), default=0.0) < 30, more  # the keeper looks once a minute, others have theirs to do


async def reviews(tenant: Tenant) -> float:
    url = f"http://127.0.0.1:{tenant.stack.endpoints.ports['controller-metrics']}/metrics"

    def counted() -> float:
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("berth_admission_reviews_total{"))

    return await asyncio.to_thread(counted)


async def test_a_running_workload_costs_two_questions(checked: Tenant) -> None:
    """One each when it is created: neither its statuses nor its finalizer are asked about."""
    await checked.node("a", 1)
    before = await reviews(checked)
    await checked.apply("w")
    await checked.until("w", phase="Succeeded")
    assert await reviews(checked) - before == 2


async def test_certificates_are_renewed_while_it_runs(checked: Tenant) -> None:
    """Somebody empties the Secret: another authority and certificate, trusted and served, without a restart."""
    pid = checked.stack.pid("controller")
    old = await trusted(checked)
    await checked.kube.merge_patch(SECRETS, SECRET_NAME, SECRET_NAMESPACE, {"data": None})

    async def another() -> bool:
        bundles = await trusted(checked)
        return len(set(bundles)) == 1 and bundles != old

    await eventually(another, 30, lambda: "the configurations trust what they trusted")
    number = iter(range(1000))

    async def answered() -> bool:
        try:
            await checked.apply(f"w{next(number)}", schedulingStrategy="noSuchThing", suspend=True)
        except Invalid:
            return True
        return False

    await eventually(answered, 10, lambda: "nobody answers under the new certificate")
    assert checked.stack.pid("controller") == pid


async def test_the_manifests_for_a_cluster_are_what_an_api_server_takes(tenant: Tenant) -> None:
    """With the Service, which the embedded stack leaves out: here only as a dry run."""
    folder = Path(__file__).parents[2] / "deploy" / "webhooks"
    apply = ("apply", "--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}", "--dry-run=server")
    said = await asyncio.to_thread(tenant.stack.kubectl, *apply, "-f", str(folder))
    assert said.count("serverside-applied (server dry run)") == 4, said


async def trusted(tenant: Tenant) -> list[str]:
    found = []
    for resource in (VALIDATING_WEBHOOKS, MUTATING_WEBHOOKS):
        raw = await tenant.kube.get(resource, CONFIGURATIONS)
        found += [hook["clientConfig"]["caBundle"] for hook in raw["webhooks"]]
    return found


@asynccontextmanager
async def dead(tenant: Tenant) -> AsyncIterator[None]:
    """Nobody listens where the webhooks were."""
    port = tenant.stack.endpoints.ports["controller-webhook"]
    async with stopped(tenant.stack, "controller"), asyncio.timeout(60):
        while await listening(port):
            old = tenant.stack.kill("controller")
            while tenant.stack.process("controller").pid in (None, old):
                await asyncio.sleep(0.005)
            tenant.stack.kill("controller", signal.SIGSTOP)
        yield


async def quick(seconds: float, write: Any) -> Any:
    began = time.monotonic()
    done = await write
    took = time.monotonic() - began
    assert took < seconds, f"a write took {took:.1f} s"
    return done


@pytest.mark.parametrize("gone", ["hangs", "dead"])
async def test_while_the_controller_is_away_nobody_waits_and_bad_input_is_told_afterwards(
    checked: Tenant, gone: str
) -> None:
    kube, mine = checked.kube, checked.namespace
    await checked.node("a", 1)
    away = stopped(checked.stack, "controller") if gone == "hangs" else dead(checked)
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"}}
    # Two webhooks of 2 s each where it hangs; where nobody listens, a refused connection.
    patience = 5.0 if gone == "hangs" else 1.5
    async with away:
        await quick(1.5, kube.create(CONFIGMAPS, config, mine))
        await quick(1.5, kube.create(LEASES, lease, mine))
        await quick(1.5, kube.merge_patch(NAMESPACES, mine, None, {"metadata": {"labels": {"a": "b"}}}))
        await quick(patience, checked.apply("unknown", schedulingStrategy="noSuchThing"))
        await quick(patience, checked.apply("big", template=BIG))
        await quick(patience, checked.apply("queued", suspend=True))
        with pytest.raises(KubeError, match=r"spec\.gpuCount"):
            await checked.apply("nine", 9)  # the CRD's own schema needs nobody
        # Nothing was made for it, so nothing holds it: neither a finalizer nor a webhook.
        await quick(1.5, checked.delete("queued"))
        await checked.until_gone("queued", seconds=1)
    await is_ready(checked.stack, "controller", within=40)
    unknown = await checked.until("unknown", phase="Pending", seconds=40)
    told = condition(unknown, "Accepted")
    assert (told["status"], told["reason"]) == ("False", "UnknownStrategy")
    assert told["message"] == f"spec.schedulingStrategy: {UNKNOWN}"
    big = await checked.until("big", phase="Pending")
    assert condition(big, "Accepted")["reason"] == "Invalid"
    assert "64 KiB" in big["status"]["message"]

    async def corrected() -> bool:
        await checked.patch("unknown", schedulingStrategy="random")
        return True

    await eventually(corrected, 5, lambda: "the edit was refused")
    done = await checked.until("unknown", phase="Succeeded")
    assert done["status"]["strategy"] == "random"
