"""Kernel caches on a real control plane and a real registry: tags that are resolved once, waves, rollback, checks anew,
deletion that waits for pods. The nodes' processes are simulated. All wait side by side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from temporalio.service import RPCError

from activities.cache_signatures import NodeState, node_attributes
from benchmarks.cache_agents import register
from crds.kernelcache import API_VERSION
from crds.settings import SETTINGS_KEY, SETTINGS_NAME, SETTINGS_NAMESPACE
from images.credentials import Credential, Credentials
from images.descriptor import OCI_MANIFEST, Descriptor
from images.reference import Reference
from images.registry import Registry
from kube.errors import NotFound
from kube.resources import (
    CONFIGMAPS,
    EVENTS,
    KERNELCACHEPOLICIES,
    NODES,
    ROLEBINDINGS,
    ROLES,
    SECRETS,
    TRITONKERNELCACHES,
)
from planning.caches.model import FORCE_ANNOTATION
from planning.caches.orders import (
    INVENTORY,
    NODE_WORKFLOW,
    Inventory,
    NodeTask,
    Report,
    cache_id,
    node_cache_id,
    node_id,
)
from stack import Lines, Stack, StackError
from stack.tools import Toolbox
from tests.application.cache_nodes import SimulatedAgent, serving
from tests.application.conftest import SETTINGS
from tests.application.stories import Begun, side_by_side
from tests.application.tenant import Tenant, condition, eventually, tenancy, type_name
from tests.images.conftest import RealRegistry, running

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

Story = Callable[["World"], Coroutine[None, None, None]]


@dataclass
class World:
    """A tenant, a registry, and simulated nodes."""

    tenant: Tenant
    registry: RealRegistry
    locked: RealRegistry

    async def agents(self, *names: str) -> list[SimulatedAgent]:
        found = [SimulatedAgent(await self.tenant.node(name, 1)) for name in names]
        for agent in found:
            await register(self.tenant.kube, agent.node)
        return found

    async def push(self, tag: str, content: str) -> str:
        """An image whose digest depends on `content`; returns it."""
        config = json.dumps({"content": content}).encode()
        blob = Descriptor("application/vnd.oci.image.config.v1+json", _digest(config), len(config))
        manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": blob.as_json(), "layers": [blob.as_json()]}
        reference = Reference.parse(self.image(tag))
        async with Registry(self.registry.settings) as registry:
            await registry.push_blob(reference, blob, config)
            return (await registry.push_manifest(reference, json.dumps(manifest).encode(), OCI_MANIFEST)).digest

    def image(self, tag: str) -> str:
        return f"{self.registry.host}/{self.tenant.namespace}/cache:{tag}"

    async def apply(self, image: str, **spec: Any) -> str:
        """Creates the cache `llama` for this tenant's nodes; returns its UID."""
        oci = {"image": image, **spec.pop("ociImage", {})}
        body = {"ociImage": oci, "nodeSelector": {"pool": self.tenant.namespace}, **spec}
        manifest = {"apiVersion": API_VERSION, "kind": "TritonKernelCache", "metadata": {"name": "llama"}, "spec": body}
        raw = await self.tenant.kube.create(TRITONKERNELCACHES, manifest, self.tenant.namespace)
        return str(raw["metadata"]["uid"])

    async def patch(self, **spec: Any) -> None:
        await self.tenant.kube.merge_patch(TRITONKERNELCACHES, "llama", self.tenant.namespace, {"spec": spec})

    async def get(self) -> dict[str, Any]:
        return await self.tenant.kube.get(TRITONKERNELCACHES, "llama", self.tenant.namespace)

    async def until(self, kind: str, status: str, reason: str, seconds: float = 40.0) -> dict[str, Any]:
        """The cache once a condition is so."""
        raw: dict[str, Any] = {}

        async def holds() -> bool:
            nonlocal raw
            raw = await self.get()
            found = condition(raw, kind)
            return (found.get("status"), found.get("reason")) == (status, reason)

        await eventually(holds, seconds, lambda: f"{kind} should be {status} {reason}: {raw.get('status')}")
        return raw

    async def until_gone(self) -> None:
        async def gone() -> bool:
            try:
                await self.get()
            except NotFound:
                return True
            return False

        await eventually(gone, 30, lambda: "the cache is still there")

    async def delete(self) -> None:
        await self.tenant.kube.delete(TRITONKERNELCACHES, "llama", self.tenant.namespace)

    async def events(self) -> set[str]:
        items, _ = await self.tenant.kube.list(EVENTS, self.tenant.namespace)
        return {str(each["reason"]) for each in items if each["regarding"]["kind"] == "TritonKernelCache"}

    async def history(self, workflow_id: str) -> list[str]:
        handle = self.tenant.temporal.get_workflow_handle(workflow_id)
        return [type_name(event.event_type) async for event in handle.fetch_history_events()]


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture(scope="module")
def registry_program() -> Path:
    try:
        return Toolbox().ensure(["registry-referrers"], Lines())["registry-referrers"].path
    except StackError as error:
        pytest.skip(f"the test registry cannot be had here: {error}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(deployed: Stack, registry_program: Path) -> AsyncIterator[Begun]:
    with running(registry_program) as registry, running(registry_program, password="hunter2") as locked:
        async with tenancy(deployed, "kernel caches") as first:
            body = {**SETTINGS, "registries": {"insecure": [registry.host, locked.host]}}
            data = {"data": {SETTINGS_KEY: yaml.safe_dump(body)}}
            await first.kube.merge_patch(CONFIGMAPS, SETTINGS_NAME, SETTINGS_NAMESPACE, data)

        async def tell(story: Story) -> None:
            async with tenancy(deployed, story.__name__) as tenant:
                try:
                    await story(World(tenant, registry, locked))
                finally:
                    for node in (await tenant.kube.list(NODES, label_selector=f"pool={tenant.namespace}"))[0]:
                        await tenant.kube.delete(NODES, node["metadata"]["name"])
                    with contextlib.suppress(NotFound):
                        await tenant.kube.delete(TRITONKERNELCACHES, "llama", tenant.namespace)

        async with side_by_side({story.__name__: tell(story) for story in STORIES}) as begun:
            yield begun


async def a_cache_gets_ready_on_the_nodes_that_it_is_for(world: World) -> None:
    agents = await world.agents("a", "b")
    other = await world.tenant.node("without-driver", 1)
    digest = await world.push("v1", "first")
    async with serving(world.tenant.stack.endpoints, agents):
        uid = await world.apply(world.image("v1"))
        raw = await world.until("Ready", "True", "Ready")
        status = raw["status"]
        assert status["resolvedDigest"] == status["lastKnownGoodDigest"] == digest
        assert (status["counts"]["nodes"], status["counts"]["ready"], status["rollout"]) == (2, 2, "2/2")
        assert condition(raw, "Verified")["status"] == "True"
        assert condition(raw, "Error")["status"] == "False"
        assert {task.order.digest for agent in agents for task in agent.orders} == {digest}
        assert {task.order.image for agent in agents for task in agent.orders} == {world.image("v1")[: -len(":v1")]}
        histories = [await world.history(node_cache_id(uid, agent.node)) for agent in agents]
        assert max(len(each) for each in histories) <= 15, histories
        await eventually(lambda: _has(world, "Ready"), 15, lambda: "no Event")
        with pytest.raises(RPCError):
            await world.history(node_cache_id(uid, other))


async def _has(world: World, reason: str) -> bool:
    return reason in await world.events()


async def a_bad_image_is_given_up_for_the_last_good_one(world: World) -> None:
    agents = await world.agents("a", "b", "c")
    good, bad = await world.push("v1", "good"), await world.push("v2", "bad")

    def answers(task: NodeTask) -> Report:
        if task.order.digest == bad:
            return Report(task.node, task.order.epoch, "failed", "", "SignatureRefused", "nobody known has signed it")
        return Report(task.node, task.order.epoch, "ready", task.order.digest, "Verified", "signed by release")

    for agent in agents:
        agent.answers = answers
    async with serving(world.tenant.stack.endpoints, agents):
        await world.apply(world.image("v1"))
        await world.until("Ready", "True", "Ready")
        await world.patch(ociImage={"image": world.image("v2")})
        raw = await world.until("Error", "True", "RolledBack")
        assert "nobody known has signed it" in condition(raw, "Error")["message"]
        raw = await world.until("Ready", "True", "Ready")
        assert raw["status"]["lastKnownGoodDigest"] == good
        assert raw["status"]["resolvedDigest"] == bad
        assert condition(raw, "Outdated")["reason"] == "TagMoved"
        assert sum(task.order.digest == bad for agent in agents for task in agent.orders) == 1, "one wave, one node"
        assert {agent.serves for agent in agents} == {good}
        await eventually(lambda: _has(world, "RolledBack"), 15, lambda: "no Event")
        # Somebody who may sign is added: what was given up is tried again.
        for agent in agents:
            agent.answers = lambda task: Report(task.node, task.order.epoch, "ready", task.order.digest, "Verified", "")
        await world.tenant.kube.create(KERNELCACHEPOLICIES, policy(world))
        try:
            await eventually(lambda: _serve(agents, bad), 20, lambda: "what was given up is not tried again")
            await world.until("Error", "False", "None")
        finally:
            await world.tenant.kube.delete(KERNELCACHEPOLICIES, world.tenant.namespace)


def policy(world: World) -> dict[str, Any]:
    key = (
        "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEg4NuJe/v+hoEsPGQcU1eVLSOyFb9\n"
        "7H4fmJMCCpA/n0rsNCfz8yX81poKDmQMrmcB7tVpkJZggrD8N3nhyy6q1g==\n-----END PUBLIC KEY-----\n"
    )
    spec = {"images": [f"{world.registry.host}/{world.tenant.namespace}/*"], "signers": [{"name": "k", "key": key}]}
    return {
        "apiVersion": API_VERSION,
        "kind": "KernelCachePolicy",
        "metadata": {"name": world.tenant.namespace},
        "spec": spec,
    }


async def what_changed_is_checked_anew(world: World) -> None:
    agents = await world.agents("a", "b")
    await world.push("v1", "checked")
    async with serving(world.tenant.stack.endpoints, agents):
        await world.apply(world.image("v1"))
        await world.until("Ready", "True", "Ready")
        assert [len(agent.orders) for agent in agents] == [1, 1]
        await world.tenant.kube.create(KERNELCACHEPOLICIES, policy(world))
        try:
            await eventually(lambda: _orders(agents, [2, 2]), 20, lambda: "a policy is no news")
        finally:
            await world.tenant.kube.delete(KERNELCACHEPOLICIES, world.tenant.namespace)
        await eventually(lambda: _orders(agents, [3, 3]), 20, lambda: "nor is that it went")
        for fingerprint in ("one", "one", "two"):
            await _inventory(world, agents[1].node, fingerprint)
        await eventually(lambda: _orders(agents, [3, 4]), 20, lambda: "other hardware is no news")
        await world.tenant.kube.delete(NODES, agents[1].node)
        await eventually(lambda: _over(world, node_id(agents[1].node)), 20, lambda: "the node's workflow goes on")
        await eventually(lambda: _counts(world, nodes=1, ready=1), 20, lambda: "a node that is gone still counts")


async def _counts(world: World, **wanted: int) -> bool:
    shown: dict[str, int] = (await world.get()).get("status", {}).get("counts", {})
    return wanted.items() <= shown.items()


async def _serve(agents: list[SimulatedAgent], digest: str) -> bool:
    return {agent.serves for agent in agents} == {digest}


async def _orders(agents: list[SimulatedAgent], counts: list[int]) -> bool:
    return [len(agent.orders) for agent in agents] == counts


async def _over(world: World, workflow_id: str) -> bool:
    described = await world.tenant.temporal.get_workflow_handle(workflow_id).describe()
    return described.close_time is not None


async def _inventory(world: World, node: str, fingerprint: str) -> None:
    await world.tenant.temporal.start_workflow(
        NODE_WORKFLOW,
        NodeState(node, fingerprint),
        id=node_id(node),
        task_queue="control-plane",
        search_attributes=node_attributes(node),
        start_signal=INVENTORY,
        start_signal_args=[Inventory(node, fingerprint)],
    )


async def deletion_waits_while_pods_use_it(world: World) -> None:
    agents = await world.agents("a", "b")
    await world.push("v1", "used")
    async with serving(world.tenant.stack.endpoints, agents):
        uid = await world.apply(world.image("v1"))
        await world.until("Ready", "True", "Ready")
        agents[0].pods = 2
        await world.delete()
        raw = await world.until("Ready", "False", "InUse")
        told = condition(raw, "Ready")["message"]
        assert "2 pods" in told and agents[0].node in told and FORCE_ANNOTATION in told
        agents[0].pods = 1
        await eventually(lambda: _says(world, "1 pod has"), 20, lambda: "a pod that went is no news")
        agents[0].pods = 0
        await world.until_gone()
        await eventually(lambda: _over(world, cache_id(uid)), 20, lambda: "the workflow goes on")


async def _says(world: World, words: str) -> bool:
    return words in condition(await world.get(), "Ready")["message"]


async def a_node_that_is_deleted_keeps_nothing(world: World) -> None:
    agents = await world.agents("a", "b")
    await world.push("v1", "gone")
    async with serving(world.tenant.stack.endpoints, agents[:1]):
        uid = await world.apply(world.image("v1"))
        # From then on the workflow surely remembers whom it gave orders.
        await eventually(lambda: _counts(world, nodes=2, ready=1), 40, lambda: "the one that answers is not ready")
        agents[0].pods = 1
        await world.delete()
        await world.until("Ready", "False", "InUse")
        for agent in agents:  # one with pods, one whose process never answered
            await world.tenant.kube.delete(NODES, agent.node)
        await world.until_gone()
        for agent in agents:
            over = partial(_over, world, node_cache_id(uid, agent.node))
            await eventually(over, 20, lambda: "somebody waits for it")


async def a_forced_deletion_waits_for_nobody(world: World) -> None:
    agents = await world.agents("a")
    await world.push("v1", "forced")
    async with serving(world.tenant.stack.endpoints, agents):
        uid = await world.apply(world.image("v1"))
        await world.until("Ready", "True", "Ready")
        agents[0].pods = 1
        await world.delete()
        await world.until("Ready", "False", "InUse")
        annotations = {"metadata": {"annotations": {FORCE_ANNOTATION: "true"}}}
        await world.tenant.kube.merge_patch(TRITONKERNELCACHES, "llama", world.tenant.namespace, annotations)
        await world.until_gone()
        agents[0].pods = 0
        await eventually(lambda: _over(world, node_cache_id(uid, agents[0].node)), 20, lambda: "the node keeps it")


async def a_secret_is_read_once_its_owner_grants_it(world: World) -> None:
    name, namespace = "pull", world.tenant.namespace
    image = f"{world.locked.host}/{namespace}/cache:v1"
    config = b"{}"
    blob = Descriptor("application/vnd.oci.image.config.v1+json", _digest(config), len(config))
    manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": blob.as_json(), "layers": [blob.as_json()]}
    someone = Credentials({world.locked.host: Credential("someone", "hunter2")})
    async with Registry(world.locked.settings, someone) as registry:
        await registry.push_blob(Reference.parse(image), blob, config)
        await registry.push_manifest(Reference.parse(image), json.dumps(manifest).encode(), OCI_MANIFEST)
    document = {"auths": {world.locked.host: {"username": "someone", "password": "hunter2"}}}
    secret = {
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson", "metadata": {"name": name},
        "stringData": {".dockerconfigjson": json.dumps(document)},
    }  # fmt: skip
    await world.tenant.kube.create(SECRETS, secret, namespace)
    agents = await world.agents("a")
    async with serving(world.tenant.stack.endpoints, agents):
        uid = await world.apply(image, ociImage={"pullSecret": name})
        raw = await world.until("Error", "True", "PullSecretNotGranted")
        told = condition(raw, "Error")["message"]
        assert f"create role berth-pull-{name}" in told and "berth-system:berth-node" in told
        # As the condition says it.
        rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name], "verbs": ["get"]}
        await world.tenant.kube.create(ROLES, {"metadata": {"name": "berth-pull"}, "rules": [rule]}, namespace)
        subjects = [{"kind": "ServiceAccount", "name": "berth-worker", "namespace": "berth-system"}]
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "berth-pull"}
        await world.tenant.kube.create(
            ROLEBINDINGS, {"metadata": {"name": "berth-pull"}, "roleRef": reference, "subjects": subjects}, namespace
        )
        await world.until("Ready", "True", "Ready", seconds=60)
        history = await world.tenant.temporal.get_workflow_handle(cache_id(uid)).fetch_history()
        assert "hunter2" not in history.to_json()


async def a_tag_that_moves_is_followed(world: World) -> None:
    agents = await world.agents("a")
    await world.push("v1", "one")
    async with serving(world.tenant.stack.endpoints, agents):
        await world.apply(world.image("v1"), updatePolicy={"type": "OnTagChange", "intervalSeconds": 30})
        await world.until("Ready", "True", "Ready")
        moved = await world.push("v1", "two")

        async def follows() -> bool:
            return agents[0].serves == moved

        await eventually(follows, 60, lambda: "the tag is not followed")


async def what_cannot_be_resolved_says_why(world: World) -> None:
    agents = await world.agents("a")
    async with serving(world.tenant.stack.endpoints, agents):
        await world.apply(world.image("missing"))
        await world.until("Error", "True", "ImageNotFound")
        await world.patch(ociImage={"image": world.image("missing"), "pullPolicy": "Never"})
        await world.until("Error", "True", "NotResolved")
        await world.patch(ociImage={"image": f"127.0.0.1:1/{world.tenant.namespace}:v1", "pullPolicy": "Always"})
        await world.until("Error", "True", "RegistryAway", seconds=60)
        assert not agents[0].orders
        await world.delete()
        await world.until_gone()


STORIES: tuple[Story, ...] = (
    a_cache_gets_ready_on_the_nodes_that_it_is_for,
    a_bad_image_is_given_up_for_the_last_good_one,
    what_changed_is_checked_anew,
    deletion_waits_while_pods_use_it,
    a_node_that_is_deleted_keeps_nothing,
    a_forced_deletion_waits_for_nobody,
    a_secret_is_read_once_its_owner_grants_it,
    a_tag_that_moves_is_followed,
    what_cannot_be_resolved_says_why,
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_story(told: Begun, story: Story) -> None:
    await told[story.__name__]
