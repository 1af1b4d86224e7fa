"""The real stack: TLS and RBAC hold, simulated Jobs run, Temporal is set up, data survives, killed processes return."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stack import SimulatedNode, Stack, StackError, UpOptions, node_manifests
from stack.temporal import SEARCH_ATTRIBUTES

pytestmark = pytest.mark.stack

MakeStack = Callable[..., Stack]
SERVICES = ["etcd", "temporal", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok"]


def apply(stack: Stack, *objects: dict[str, Any]) -> None:
    stack.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))


def job(name: str, namespace: str = "stack-test", **env: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "simulated",
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    pod = {"restartPolicy": "Never", "containers": [container], "nodeSelector": {"stack-test": "true"}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"backoffLimit": 0, "template": {"spec": pod}},
    }


def temporal(stack: Stack, *arguments: str) -> str:
    command = [str(stack.tool("temporal")), *arguments, "--address", stack.endpoints.temporal_address]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def nodes(stack: Stack) -> Iterator[Stack]:
    fleet = node_manifests(
        [SimulatedNode(f"stack-test-{i}", 8, "NVIDIA-A100", labels={"stack-test": "true"}) for i in range(3)]
    )
    apply(stack, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "stack-test"}}, *fleet)
    stack.kubectl("wait", "--for=condition=Ready", "node", "-l", "stack-test=true", "--timeout=30s")
    yield stack
    stack.kubectl("delete", "namespace", "stack-test", "--wait=false")
    stack.kubectl("delete", "node", "-l", "stack-test=true", "--wait=false")


def test_all_processes_are_ready_and_answer(stack: Stack) -> None:
    states = {status.name: status.state for status in stack.probe()}
    assert {name: states[name] for name in SERVICES} == dict.fromkeys(SERVICES, "ready")
    assert json.loads(stack.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"] == "v1.36.3"


def test_up_again_changes_nothing(stack: Stack) -> None:
    before = {name: stack.pid(name) for name in SERVICES}
    assert stack.up(UpOptions(end_with_caller=True, etcd_fsync=False)) == stack.endpoints
    assert {name: stack.pid(name) for name in SERVICES} == before


def test_everything_listens_on_loopback_only(stack: Stack) -> None:
    """A socket of one of the processes on any other address would be reachable from outside."""
    inodes = set()
    for name in SERVICES:
        listed = subprocess.run(
            ["find", f"/proc/{stack.pid(name)}/fd", "-lname", "socket:*", "-printf", "%l\n"],
            capture_output=True,
            text=True,
            check=False,
        )
        inodes |= {line.strip("socket:[]") for line in listed.stdout.splitlines()}
    open_to_all = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                local, state, inode = line.split()[1], line.split()[3], line.split()[9]
                if state == "0A" and inode in inodes and not local.startswith("0100007F:"):
                    open_to_all.append(local)
    assert open_to_all == []


def test_the_api_server_speaks_tls_and_refuses_strangers(stack: Stack) -> None:
    port = stack.endpoints.ports["kube-apiserver"]
    trusting = ssl.create_default_context(cafile=str(stack.layout.pki / "kubernetes" / "ca.crt"))
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(f"https://127.0.0.1:{port}/api/v1/nodes", context=trusting)
    refused.value.close()
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"https://127.0.0.1:{port}/version", context=ssl.create_default_context())


def test_etcd_wants_a_certificate_of_its_own_authority(stack: Stack) -> None:
    endpoints = stack.endpoints
    assert endpoints.etcd_ca is not None
    url = f"{endpoints.etcd_endpoint}/version"
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        urllib.request.urlopen(url, context=ssl.create_default_context(cafile=str(endpoints.etcd_ca)))
    kubernetes = stack.layout.pki / "kubernetes"
    wrong = ssl.create_default_context(cafile=str(endpoints.etcd_ca))
    wrong.load_cert_chain(kubernetes / "admin.crt", kubernetes / "admin.key")
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        urllib.request.urlopen(url, context=wrong)
    right = ssl.create_default_context(cafile=str(endpoints.etcd_ca))
    right.load_cert_chain(str(endpoints.etcd_cert), str(endpoints.etcd_key))
    with urllib.request.urlopen(url, context=right) as answer:
        assert json.load(answer)["etcdserver"] == stack.endpoints.versions["etcd"]


def test_berths_identities_have_the_rights_that_are_bound_to_them_and_no_others(make_stack: MakeStack) -> None:
    stack = make_stack(UpOptions(etcd_fsync=False))
    for identity in ("berth-controller", "berth-worker"):
        who = json.loads(stack.kubectl("auth", "whoami", "-o", "json", identity=identity))["status"]["userInfo"]
        assert who["username"] == f"system:serviceaccount:berth-system:{identity}"
        assert {"system:serviceaccounts", "system:serviceaccounts:berth-system", "system:authenticated"} <= set(
            who["groups"]
        )
        with pytest.raises(StackError, match="Forbidden"):
            stack.kubectl("get", "pods", "-A", identity=identity)
        with pytest.raises(StackError, match="Forbidden"):
            stack.kubectl("get", "secrets", "-n", "kube-system", identity=identity)
    role = ("create", "clusterrole", "reader", "--verb=list", "--resource=pods")
    stack.kubectl(*role)
    account = "--serviceaccount=berth-system:berth-worker"
    stack.kubectl("create", "clusterrolebinding", "reader", "--clusterrole=reader", account)
    deadline = time.monotonic() + 10
    while "Forbidden" in stack.kubectl("get", "pods", "-A", identity="berth-worker", check=False):
        assert time.monotonic() < deadline
    with pytest.raises(StackError, match="Forbidden"):
        stack.kubectl("get", "pods", "-A", identity="berth-controller")
    with pytest.raises(StackError, match="Forbidden"):
        stack.kubectl("delete", "pod", "any", identity="berth-worker")


def test_pods_get_a_service_account_as_in_a_real_cluster(nodes: Stack) -> None:
    apply(nodes, job("account", SIMULATED_RUN="1h"))
    selector = ("-n", "stack-test", "-l", "job-name=account")
    nodes.kubectl("wait", "--for=create", "pod", *selector, "--timeout=20s")
    (pod,) = json.loads(nodes.kubectl("get", "pod", *selector, "-o", "json"))["items"]
    assert pod["spec"]["serviceAccountName"] == "default"
    assert pod["spec"]["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]
    nodes.kubectl("delete", "job", "account", "-n", "stack-test")


def test_simulated_jobs_run_as_long_and_end_as_they_are_told(nodes: Stack) -> None:
    apply(nodes, job("plain"), job("long", SIMULATED_RUN="3.5s"), job("bad", SIMULATED_RUN="200ms", SIMULATED_EXIT="7"))
    for name, condition in (("plain", "Complete"), ("long", "Complete"), ("bad", "Failed")):
        nodes.kubectl("wait", f"--for=condition={condition}", f"job/{name}", "-n", "stack-test", "--timeout=30s")
    pods = json.loads(nodes.kubectl("get", "pods", "-n", "stack-test", "-o", "json"))["items"]
    by_job = {pod["metadata"]["labels"]["job-name"]: pod["status"] for pod in pods}
    assert by_job["plain"]["phase"] == by_job["long"]["phase"] == "Succeeded"
    assert by_job["bad"]["phase"] == "Failed"
    assert by_job["bad"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7
    ran = by_job["long"]["containerStatuses"][0]["state"]["terminated"]
    assert ran["finishedAt"] > ran["startedAt"]


def test_a_simulated_node_fails_and_recovers_by_a_label(nodes: Stack) -> None:
    for label, ready in (("gpu.warp.dev/simulated-failure=true", "False"), ("gpu.warp.dev/simulated-failure-", "True")):
        nodes.kubectl("label", "node", "stack-test-2", label)
        nodes.kubectl("wait", f"--for=condition=Ready={ready}", "node/stack-test-2", "--timeout=30s")


def test_a_deleted_job_leaves_no_pod(nodes: Stack) -> None:
    apply(nodes, job("endless", SIMULATED_RUN="1000h"))
    selector = ("-n", "stack-test", "-l", "job-name=endless")
    nodes.kubectl("wait", "--for=create", "pod", *selector, "--timeout=20s")
    nodes.kubectl("wait", "--for=condition=Ready", "pod", *selector, "--timeout=20s")
    nodes.kubectl("delete", "job", "endless", "-n", "stack-test")
    nodes.kubectl("wait", "--for=delete", "pod", *selector, "--timeout=20s")


def test_a_pod_whose_removal_the_api_server_left_half_done_is_removed(nodes: Stack) -> None:
    """It writes the mark first and removes then; killed in between, it leaves what is put into etcd here."""
    apply(nodes, job("half-gone", SIMULATED_RUN="100ms"))
    nodes.kubectl("wait", "--for=condition=Complete", "job/half-gone", "-n", "stack-test", "--timeout=20s")
    selector = ("-n", "stack-test", "-l", "job-name=half-gone")
    pod = json.loads(nodes.kubectl("get", "pod", *selector, "-o", "json"))["items"][0]
    assert not pod["metadata"].get("finalizers")
    del pod["metadata"]["resourceVersion"]
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}
    put_into_etcd(nodes, f"/registry/pods/stack-test/{pod['metadata']['name']}", pod)
    nodes.kubectl("wait", "--for=delete", "pod", *selector, "--timeout=20s")
    nodes.kubectl("delete", "job", "half-gone", "-n", "stack-test")


def put_into_etcd(stack: Stack, key: str, value: dict[str, Any]) -> None:
    endpoints = stack.endpoints
    context = ssl.create_default_context(cafile=str(endpoints.etcd_ca))
    context.load_cert_chain(str(endpoints.etcd_cert), str(endpoints.etcd_key))
    key, stored = (base64.b64encode(each.encode()).decode() for each in (key, json.dumps(value)))
    body = json.dumps({"key": key, "value": stored}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoints.etcd_endpoint}/v3/kv/put", body, headers)
    with urllib.request.urlopen(request, context=context):
        pass


def test_temporal_has_its_ui_search_attributes_and_a_month_of_memory(stack: Stack) -> None:
    listed = temporal(stack, "operator", "search-attribute", "list")
    assert all(name in listed for name in SEARCH_ATTRIBUTES)
    described = json.loads(temporal(stack, "operator", "namespace", "describe", "-n", "default", "-o", "json"))
    assert described["config"]["workflowExecutionRetentionTtl"] == "2592000s"
    assert stack.endpoints.temporal_ui is not None
    with urllib.request.urlopen(stack.endpoints.temporal_ui) as page:
        assert page.status == 200
    database = stack.layout.root / "temporal" / "temporal.db"
    assert database.with_name("temporal.db-wal").is_file(), "SQLite does not run with a write-ahead log"


def test_all_state_and_all_ports_survive_down_and_up(make_stack: MakeStack) -> None:
    stack = make_stack()
    before = stack.endpoints
    stack.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    uid = stack.kubectl("get", "namespace", "default", "-o", "jsonpath={.metadata.uid}")
    start = ("workflow", "start", "--type", "Nobody", "--task-queue", "nowhere", "--workflow-id", "kept")
    temporal(stack, *start, "--search-attribute", 'BerthPhase="Pending"')
    pids = [stack.pid(name) for name in SERVICES]
    assert stack.down()
    assert not any(
        subprocess.run(["kill", "-0", str(pid)], capture_output=True, check=False).returncode == 0 for pid in pids
    )
    assert {status.state for status in stack.status()} == {"stopped"}
    after = stack.up(UpOptions(end_with_caller=True))
    assert after == before
    assert stack.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"
    assert stack.kubectl("get", "namespace", "default", "-o", "jsonpath={.metadata.uid}") == uid
    assert "kept" in temporal(stack, "workflow", "list", "--query", 'BerthPhase="Pending"')


def test_a_port_that_was_taken_meanwhile_is_chosen_anew(make_stack: MakeStack) -> None:
    stack = make_stack()
    before = stack.endpoints
    stack.down()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the old connections may still be in TIME_WAIT
        thief.bind(("127.0.0.1", before.ports["kube-apiserver"]))
        thief.listen()
        after = stack.up(UpOptions(end_with_caller=True))
        assert after.ports["kube-apiserver"] != before.ports["kube-apiserver"]
        assert after.ports["temporal"] == before.ports["temporal"]
        assert "default" in stack.kubectl("get", "namespaces")


@pytest.mark.faults
def test_every_process_comes_back_from_sigkill(make_stack: MakeStack) -> None:
    stack = make_stack(UpOptions(etcd_fsync=False))
    apply(stack, *node_manifests([SimulatedNode("n", 8, labels={"stack-test": "true"})]))
    for round_, name in enumerate(SERVICES):
        stack.wait_restarted(name, stack.kill(name))
        deadline = time.monotonic() + 30
        while "created" not in stack.kubectl("create", "configmap", f"round-{round_}", check=False):
            assert time.monotonic() < deadline, f"the API server does not answer after {name} was killed"
        apply(stack, job(f"after-{name}", "default", SIMULATED_RUN="100ms"))
        stack.kubectl("wait", "--for=condition=Complete", f"job/after-{name}", "--timeout=60s")
        assert "default" in temporal(stack, "operator", "namespace", "describe", "-n", "default")
    assert {status.name: status.restarts for status in stack.status()} == dict.fromkeys(SERVICES, 1)


def test_history_is_kept_when_asked_for(make_stack: MakeStack) -> None:
    stack = make_stack(UpOptions(keep_history=True, kwok=False, event_ttl="10m"))
    flags = json.loads(stack.layout.plan.read_text())["processes"]
    apiserver = next(each["argv"] for each in flags if each["name"] == "kube-apiserver")
    assert "--etcd-compaction-interval=0" in apiserver
    assert "--event-ttl=10m" in apiserver
    assert "kwok" not in stack.names
