"""The real node: a kubelet with containerd runs a pod, kube-proxy carries Services, and `down` leaves nothing of them
on the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stack import Stack, StackError, UpOptions, kubeproxy
from stack.node_images import BUSYBOX
from stack.paths import SYSTEM_PATH, read_json
from stack.realnode import node_address, unavailable

MakeStack = Callable[..., Stack]

CONNECTIONS = ("nf_conntrack_max", "nf_conntrack_tcp_timeout_established", "nf_conntrack_tcp_timeout_close_wait")


def network_records() -> set[str]:
    """Network namespaces, and what CNI remembers of them."""
    folders = (Path("/var/lib/cni/results"), Path("/run/netns"))
    return {str(file) for folder in folders if folder.is_dir() for file in folder.iterdir()}


def until(stack: Stack, answer: str, *arguments: str) -> None:
    """A kubelet that just started is ready before it has seen its pods, so what it says is asked for repeatedly."""
    deadline = time.monotonic() + 60
    while (said := stack.kubectl(*arguments, check=False)) != answer:
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def tables() -> list[str]:
    """kube-proxy's."""
    program = shutil.which("nft", path=SYSTEM_PATH)
    if not program:
        return []
    listed = subprocess.run([program, "list", "tables"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.endswith("kube-proxy")]


def settings() -> dict[str, str]:
    """The kernel's, of connections: the machine's own."""
    folder = Path("/proc/sys/net/netfilter")
    return {name: (folder / name).read_text() for name in CONNECTIONS if (folder / name).exists()}


@contextmanager
def seat_proxy_simulated(name: str) -> Iterator[int]:
    """Listens on the node's address, as a seat proxy does; whoever connects is told its name. Gives its port."""

    class Tell(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(name.encode())

    with socketserver.ThreadingTCPServer((node_address(), 0), Tell) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def service(stack: Stack, name: str, **spec: object) -> str:
    """Makes a Service with port 80; its address."""
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"ports": [{"port": 80}]} | spec}
    made = json.loads(stack.kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(body)))
    return str(made["spec"]["clusterIP"])


def leads_to(stack: Stack, name: str, port: int) -> None:
    """The EndpointSlice of a Service of seats, as the controller writes it: with the address of a node."""
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": f"{name}-seats", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"port": port}],
        "endpoints": [{"addresses": [node_address()], "nodeName": "node-1", "conditions": {"ready": True}}],
    }
    stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(body))


def told_by(address: str) -> str:
    """What whoever listens there says to this machine; empty while nobody does."""
    try:
        with socket.create_connection((address, 80), timeout=2) as connection:
            return connection.recv(100).decode()
    except OSError:
        return ""


def check_services(stack: Stack) -> None:
    """A Service without selector leads from the machine and from a pod to whoever its EndpointSlice names, and a
    Service of pods to them.
    """
    address = service(stack, "seats")
    with seat_proxy_simulated("one") as one, seat_proxy_simulated("two") as two:
        for name, port in (("one", one), ("two", two)):
            leads_to(stack, "seats", port)
            deadline = time.monotonic() + 30
            while told_by(address) != name:
                assert time.monotonic() < deadline, f"the Service does not lead to {name}"
                time.sleep(0.1)
            assert stack.kubectl("exec", "p", "--", "nc", "-w", "5", address, "80") == name
        stack.wait_restarted("kube-proxy", stack.kill("kube-proxy"))
        assert told_by(address) == "two"
    of_pods = service(stack, "pods", selector={"app": "web"}, ports=[{"port": 80, "targetPort": 8080}])
    ask = rf"printf 'GET /hello HTTP/1.0\r\n\r\n' | nc -w 5 {of_pods} 80 | tail -n 1"
    until(stack, "hello\n", "exec", "p", "--", "sh", "-c", ask)


@pytest.mark.node
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible")
def test_a_pod_runs_on_a_real_node_and_nothing_is_left_after_down(make_stack: MakeStack) -> None:
    networks_before, tables_before, settings_before = network_records(), tables(), settings()
    stack = make_stack(UpOptions(real_node=True))
    assert settings() == settings_before
    web = "mkdir /www; echo hello >/www/hello; exec httpd -f -p 8080 -h /www"
    for name, script in (("p", "echo hello from a pod; sleep 1000"), ("web", web)):
        container = {"name": "c", "image": BUSYBOX, "command": ["sh", "-c", script]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"containers": [container], "nodeName": "node-1", "terminationGracePeriodSeconds": 0},
        }
        stack.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    stack.kubectl("wait", "--for=condition=Ready", "pod/p", "pod/web", "--timeout=60s")
    assert stack.kubectl("logs", "p") == "hello from a pod\n"
    assert stack.kubectl("exec", "p", "--", "id", "-u") == "0\n"
    with pytest.raises(StackError, match="Forbidden"):
        stack.kubectl("logs", "p", identity="berth-worker")

    without_services = kubeproxy.obstacle(stack.layout)
    if not without_services:
        check_services(stack)

    # A killed containerd finds its pods again; a killed kubelet as well.
    for name in ("containerd", "kubelet"):
        stack.wait_restarted(name, stack.kill(name), timeout=60)
    until(stack, "still here\n", "exec", "p", "--", "echo", "still here")

    shims = subprocess.run(
        ["pgrep", "-f", "containerd-shim-runc-v2.*berth"], capture_output=True, text=True, check=False
    )
    assert shims.stdout, "the pod has no shim"
    stack.down()
    root = str(stack.layout.root)
    assert root not in Path("/proc/self/mountinfo").read_text()
    assert not network_records() - networks_before, "pods' networks are left"
    assert not set(tables()) - set(tables_before), "rules of Services are left"
    for pid in shims.stdout.split():
        arguments = Path(f"/proc/{pid}/cmdline")
        assert not arguments.exists() or b"shim" not in arguments.read_bytes()

    # As after a reboot: the pod is still there and is started again.
    stack.up(UpOptions(real_node=True, end_with_caller=True))
    until(stack, "hello from a pod\n", "logs", "p")
    until(stack, "still here\n", "exec", "p", "--", "echo", "still here")
    # All at once, with pods that run: what is left then goes as well.
    os.kill(read_json(stack.layout.supervisor)["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while stack.running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert tables() or without_services, "nobody was there to remove them"
    stack.down()
    assert not network_records() - networks_before, "pods' networks are left"
    assert not set(tables()) - set(tables_before), "rules of Services are left"
    if without_services:
        pytest.skip(f"no Service was tried, and the rest passed: {without_services}")


def test_without_what_it_needs_a_real_node_is_refused_by_name(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(StackError, match=r"(?s)--real-node` is not possible here: a real node needs root.*kwok"):
        make_stack(UpOptions(real_node=True))
