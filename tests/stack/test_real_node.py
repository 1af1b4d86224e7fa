"""The real node: a kubelet with containerd runs a pod, and `down` leaves nothing of it on the machine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stack import Stack, StackError, UpOptions
from stack.node_images import BUSYBOX
from stack.realnode import unavailable

MakeStack = Callable[..., Stack]


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


@pytest.mark.node
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible")
def test_a_pod_runs_on_a_real_node_and_nothing_is_left_after_down(make_stack: MakeStack) -> None:
    networks_before = network_records()
    stack = make_stack(UpOptions(real_node=True))
    container = {"name": "c", "image": BUSYBOX, "command": ["sh", "-c", "echo hello from a pod; sleep 1000"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {"containers": [container], "nodeName": "node-1", "terminationGracePeriodSeconds": 0},
    }
    stack.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    stack.kubectl("wait", "--for=condition=Ready", "pod/p", "--timeout=60s")
    assert stack.kubectl("logs", "p") == "hello from a pod\n"
    assert stack.kubectl("exec", "p", "--", "id", "-u") == "0\n"
    with pytest.raises(StackError, match="Forbidden"):
        stack.kubectl("logs", "p", identity="berth-worker")

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
    for pid in shims.stdout.split():
        arguments = Path(f"/proc/{pid}/cmdline")
        assert not arguments.exists() or b"shim" not in arguments.read_bytes()

    # As after a reboot: the pod is still there and is started again.
    stack.up(UpOptions(real_node=True, end_with_caller=True))
    until(stack, "hello from a pod\n", "logs", "p")
    stack.kubectl("delete", "pod", "p", "--timeout=60s")
    stack.down()
    assert not network_records() - networks_before, "pods' networks are left"


def test_without_what_it_needs_a_real_node_is_refused_by_name(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(StackError, match=r"(?s)--real-node` is not possible here: a real node needs root.*kwok"):
        make_stack(UpOptions(real_node=True))
