"""The node's process as it is started on a node: the kubelet is answered whatever is away, and on a real control plane
a cache goes from an order to Ready under the node's own rights.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml
from aiohttp import ClientError, ClientSession
from temporalio import workflow
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from berth import node_process
from berth.install import manifests
from berth.process import ProcessOptions, connect_temporal
from images.credentials import Credentials
from nodeworkers.devices.service import DeviceService
from nodeworkers.ledger import Ledger
from nodeworkers.rpc import csi_pb2
from planning.caches.node_status import status_name
from planning.caches.orders import (
    INVENTORY,
    NODE_WORKFLOW,
    PREPARE,
    REMOVE,
    CacheRef,
    NodeOrder,
    NodeTask,
    Report,
    node_id,
    node_queue,
)
from stack import Stack
from stack.ports import choose
from tests.images import caches
from tests.images.conftest import registry_program, running
from tests.images.signatures.rig import public_pem
from tests.nodeworkers.caches.rig import Publisher

__all__ = ["registry_program"]  # a fixture
DEADLINE = 60.0
PASSWORD = "hunter2-of-all-places"
DEAD = "127.0.0.1:1"  # nobody listens there


@contextmanager
def berth_node(folder: Path, name: str, kubeconfig: Path, temporal: str, *more: str) -> Iterator[Process]:
    """`berth node` with everything of its own below `folder`."""
    health, metrics = choose(["health", "metrics"], {}).values()
    log = (folder / "log").open("a")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "berth", "node", "--node-name", name, "--root", str(folder / "berth"),
            "--kubelet-root", str(folder / "kubelet"), "--kubeconfig", str(kubeconfig), "--temporal-address", temporal,
            "--health-port", str(health), "--metrics-port", str(metrics), "--bind", "127.0.0.1", "--quota", "1Gi",
            "--upper-limit", "16Mi", "--simulated-gpus", "1xH100", *more,
        ],
        stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with log, process:
        try:
            yield Process(process, folder, health)
        finally:
            process.kill()


class Process:
    """One that runs."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, health: int) -> None:
        self.process = process
        self.folder = folder
        self.health = health

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def probe(self) -> bool:
        """CSI's own question, by its socket, as soon as there is one."""
        socket = self.folder / "kubelet" / "plugins" / "csi.tkm.io" / "csi.sock"
        async with asyncio.timeout(DEADLINE):
            while True:
                assert self.process.poll() is None, self.log
                try:
                    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
                        ask = channel.unary_unary(
                            "/csi.v1.Identity/Probe",
                            request_serializer=csi_pb2.ProbeRequest.SerializeToString,
                            response_deserializer=csi_pb2.ProbeResponse.FromString,
                        )
                        answer = await ask(csi_pb2.ProbeRequest(), timeout=5)
                        return bool(answer.ready.value)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

    async def says(self, status: int, *texts: str) -> str:
        """/readyz, once it has this status and says these."""
        async with ClientSession() as session, asyncio.timeout(DEADLINE):
            while True:
                try:
                    async with session.get(f"http://127.0.0.1:{self.health}/readyz") as answer:
                        said = await answer.text()
                        if answer.status == status and all(text in said for text in texts):
                            return said
                except ClientError:
                    pass
                assert self.process.poll() is None, self.log
                await asyncio.sleep(0.05)

    def ends(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)


def dead_cluster(file: Path) -> Path:
    """A kubeconfig of an API server that does not answer."""
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": f"http://{DEAD}"}}],
                "users": [{"name": "c", "user": {"token": "t"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            }
        )
    )  # fmt: skip
    return file


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets below it."""
    made = Path(tempfile.mkdtemp(prefix="berth-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


async def test_the_kubelet_is_answered_while_everything_else_is_away(folder: Path) -> None:
    with berth_node(folder, "node-1", dead_cluster(folder / "config"), DEAD) as node:
        assert await node.probe()
        await node.says(503, "Temporal cannot be reached: Failed client connect", "its GPUs are simulated")
        assert node.process.poll() is None
        assert await node.probe()
        assert node.ends() == 0
        assert "berth-node stopped on request" in node.log


async def test_devices_are_served_while_caches_are_put_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over, sweeping, swept = asyncio.Event(), asyncio.Event(), threading.Event(), threading.Event()

    def put_in_order(*_: object) -> list[str]:
        sweeping.set()
        assert swept.wait(DEADLINE)
        return []

    async def run(_: DeviceService) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    monkeypatch.setattr(node_process, "put_in_order", put_in_order)
    monkeypatch.setattr(DeviceService, "run", run)
    health, metrics = choose(["health", "metrics"], {}).values()
    options = ProcessOptions(
        kubeconfig=dead_cluster(folder / "config"), temporal_address=DEAD, bind="127.0.0.1", health_port=health,
        metrics_port=metrics,
    )  # fmt: skip
    made = node_process.NodeOptions("n", folder / "berth", folder / "kubelet", 1 << 30, 1 << 24)
    serving = asyncio.create_task(node_process.serve(options, made, traced=False))
    socket = folder / "kubelet" / "plugins" / "csi.tkm.io" / "csi.sock"
    try:
        async with asyncio.timeout(DEADLINE):
            await begun.wait()
            await asyncio.to_thread(sweeping.wait, DEADLINE)
            assert not socket.exists(), "mounts wait for the caches"
            swept.set()
            while not socket.exists():
                assert not serving.done(), serving.result()
                await asyncio.sleep(0.01)
        assert not over.is_set()
    finally:
        swept.set()
        serving.cancel()
        await asyncio.wait([serving])
    assert over.is_set() and serving.cancelled()


async def test_what_is_wrong_with_temporals_configuration_is_told_and_ends_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", str(folder / "no-such-file"))
    monkeypatch.setenv("TEMPORAL_TLS_CLIENT_KEY_PATH", str(folder / "no-such-file"))
    with berth_node(folder, "node-1", dead_cluster(folder / "config"), DEAD) as node:
        await node.says(503, "Temporal cannot be reached: ", "no-such-file")
        assert await node.probe()
        assert node.ends() == 0


async def test_a_second_process_says_who_is_in_the_way(folder: Path) -> None:
    ledger = Ledger(folder / "berth")
    try:
        with berth_node(folder, "node-1", dead_cluster(folder / "config"), DEAD) as node:
            assert node.process.wait(DEADLINE) == 1
            assert "Another berth node uses the ledger" in node.log
    finally:
        ledger.close()


# ---- on a real control plane, with a real registry that wants a password


@workflow.defn(name="Errand")
class Errand:
    """Has a node do one thing, as the cache's workflow does."""

    @workflow.run
    async def run(self, activity: str, task: NodeTask) -> Report:
        report: Report = await workflow.execute_activity(
            activity,
            task,
            task_queue=node_queue(task.node),
            result_type=Report,
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=30),
        )
        return report


class Cluster:
    """What a person and the control plane do."""

    def __init__(self, stack: Stack, temporal: Client, namespace: str, queue: str) -> None:
        self.stack = stack
        self.temporal = temporal
        self.namespace = namespace
        self.queue = queue

    def apply(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        written = self.stack.kubectl(
            "apply", "--server-side", "--force-conflicts", "-o", "json", "-f", "-", stdin=json.dumps(manifest)
        )
        found: dict[str, Any] = json.loads(written)
        return found

    async def errand(self, activity: str, task: NodeTask) -> Report:
        found: Report = await self.temporal.execute_workflow(
            Errand.run, args=[activity, task], id=f"errand-{uuid.uuid4().hex}", task_queue=self.queue
        )
        return found

    async def status(self, cache: str, name: str, node: Process) -> dict[str, Any]:
        """The status on that node, once it is written: nobody waits for that."""
        place = (
            status_name(cache, name),
            "-n",
            self.namespace,
            "-o",
            "json",
            "--ignore-not-found",
            "--show-managed-fields",
        )
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    found = self.stack.kubectl("get", "tritonkernelcachenodestatus", *place)
                    if found and json.loads(found).get("status"):
                        written: dict[str, Any] = json.loads(found)
                        return written
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(node.log) from None


@asynccontextmanager
async def cluster(stack: Stack) -> AsyncIterator[Cluster]:
    for manifest in [*manifests("crds"), *manifests("rbac"), *manifests("policies")]:
        stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(manifest))
    stack.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    namespace = f"node-{uuid.uuid4().hex[:8]}"
    stack.kubectl("create", "namespace", namespace)
    endpoints = stack.endpoints
    temporal = await connect_temporal(
        ProcessOptions(temporal_address=endpoints.temporal_address, temporal_namespace=endpoints.temporal_namespace),
        lazy=False,
    )
    queue = f"errands-{namespace}"
    worker = Worker(temporal, task_queue=queue, workflows=[Errand], workflow_runner=UnsandboxedWorkflowRunner())
    async with worker:
        yield Cluster(stack, temporal, namespace, queue)
    stack.kubectl("delete", "namespace", namespace, "--wait=false")


def account(stack: Stack, file: Path, node: str) -> Path:
    """A kubeconfig of berth-node on that node, and of nobody else."""
    made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
    stack.kubectl("create", "-f", "-", stdin=json.dumps(made))
    uid = json.loads(stack.kubectl("get", "node", node, "-o", "json"))["metadata"]["uid"]
    bound = ("--bound-object-kind=Node", f"--bound-object-name={node}", f"--bound-object-uid={uid}")
    token = stack.kubectl("create", "token", "berth-node", "-n", "berth-system", *bound).strip()
    config = yaml.safe_load(stack.endpoints.kubeconfig("admin").read_text())
    config["users"] = [{"name": each["name"], "user": {"token": token}} for each in config["users"]]
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.stack
async def test_from_an_order_to_ready_under_the_nodes_own_rights(
    stack: Stack, registry_program: Path, folder: Path
) -> None:
    with running(registry_program, password=PASSWORD) as real:
        async with cluster(stack) as there:
            await _one_life(there, real.host, folder, Publisher(settings=real.settings, host=real.host))


async def _one_life(there: Cluster, host: str, folder: Path, publisher: Publisher) -> None:
    login = json.dumps({"auths": {host: {"username": "someone", "password": PASSWORD}}})
    publisher.credentials = Credentials.parse(login.encode())
    for target in (caches.CUDA, caches.HIP):
        caches.kernel(folder / "cache", f"{target}", target=target)
    digest = await publisher.push(folder / "cache", index=True)
    name, namespace = f"{there.namespace}-n", there.namespace
    settings = {"registries": {"insecure": [host]}}
    there.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "berth-settings", "namespace":
                 "berth-system"}, "data": {"settings.yaml": json.dumps(settings)}})  # fmt: skip
    signers = [{"name": "release", "key": public_pem(publisher.key)}]
    there.apply({"apiVersion": "tkm.io/v1alpha1", "kind": "KernelCachePolicy", "metadata": {"name": namespace},
                 "spec": {"images": [f"{host}/**"], "signers": signers}})  # fmt: skip
    there.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "pull", "namespace": namespace}, "type":
                 "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": login}})  # fmt: skip
    cache = there.apply(
        {
            "apiVersion": "tkm.io/v1alpha1", "kind": "TritonKernelCache",
            "metadata": {"name": "llama", "namespace": namespace},
            "spec": {"ociImage": {"image": f"{host}/team/cache:v1", "pullSecret": "pull"}},
        }
    )  # fmt: skip
    ref = CacheRef("TritonKernelCache", namespace, "llama", cache["metadata"]["uid"])
    config = account(there.stack, folder / "config", name)

    def order(epoch: int) -> NodeTask:
        return NodeTask(ref, name, NodeOrder(epoch, "prepare", publisher.image, digest, 1))

    address = there.stack.endpoints.temporal_address
    more = ("--temporal-namespace", there.stack.endpoints.temporal_namespace)
    with berth_node(folder, name, config, address, *more) as node:
        await node.says(200, "its GPUs are simulated")
        report = await there.errand(PREPARE, order(1))
        assert (report.outcome, report.reason) == ("retrying", "PullSecretNotGranted"), report
        # What it prints is what the namespace's owner types.
        for line in report.message.partition("grants it with: ")[2].split(" && "):
            there.stack.kubectl(*line.split()[1:])
        async with asyncio.timeout(DEADLINE):  # the API server's authorizer hears of a grant a moment later
            while (report := await there.errand(PREPARE, order(2))).reason == "PullSecretNotGranted":
                await asyncio.sleep(0.2)
        assert (report.outcome, report.reason, report.serves) == ("ready", "Verified", digest), report
        status = await there.status("llama", name, node)
        assert {each["type"]: each["status"] for each in status["status"]["conditions"]} == {
            "Verified": "True", "Compatible": "True", "HitPredicted": "Unknown", "Ready": "True",
        }  # fmt: skip
        assert status["status"]["simulated"] is True and status["status"]["targetDigest"] == digest
        assert {each["manager"] for each in status["metadata"]["managedFields"]} == {"berth-node"}
        assert PASSWORD not in node.log
        handle = there.temporal.get_workflow_handle(node_id(name))
        async with asyncio.timeout(DEADLINE):
            found = await handle.describe()
        assert found.workflow_type == NODE_WORKFLOW
        signals = [
            event.workflow_execution_signaled_event_attributes.signal_name
            async for event in handle.fetch_history_events()
            if event.HasField("workflow_execution_signaled_event_attributes")
        ]
        assert signals == [INVENTORY]
        await handle.terminate("the test is over")
        node.process.kill()
        node.process.wait(DEADLINE)
    # SIGKILL lost nothing, and without Temporal the kubelet is still told that the cache is there.
    with berth_node(folder, name, config, DEAD) as node:
        assert await node.probe()
        assert node.ends() == 0
    ledger = Ledger(folder / "berth")
    assert [(row.state, row.serves, row.epoch) for row in ledger.caches()] == [("Ready", digest, 2)]
    ledger.close()
    with berth_node(folder, name, config, address, *more) as node:
        report = await there.errand(REMOVE, NodeTask(ref, name, NodeOrder(3, "remove")))
        assert report.outcome == "removed", report
        there.stack.kubectl("wait", "--for=delete", "tritonkernelcachenodestatus/" + status_name("llama", name), "-n",
                            namespace, "--timeout=30s")  # fmt: skip
        handle = there.temporal.get_workflow_handle(node_id(name))
        async with asyncio.timeout(DEADLINE):  # its GPUs are told beside what it is asked to do
            while (await handle.describe()).status is not WorkflowExecutionStatus.RUNNING:
                await asyncio.sleep(0.1)
        assert node.ends() == 0
    await handle.terminate("the test is over")
    there.stack.kubectl("delete", "node", name)
    there.stack.kubectl("delete", "kernelcachepolicy", namespace)
