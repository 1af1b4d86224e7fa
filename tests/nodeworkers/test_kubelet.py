"""The CSI driver under a real kubelet: pods mount a cache, compile into their own layers, are refused with a reason,
and outlive the driver and the kubelet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from berth.install import manifests
from nodeworkers.ledger import Ledger
from stack import Stack, UpOptions
from stack.realnode import unavailable
from tests.nodeworkers.csi_rig import CACHE, CAPTURED, DIGEST, FILES, KERNEL, Rig, Store, needs_mounts
from tests.nodeworkers.pods import NODE, pod

pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]
MakeStack = Callable[..., Stack]

(DRIVER,) = manifests("csi")


class Node:
    """A stack with a real kubelet, and the driver beside it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.kubelet = stack.layout.root / "node" / "kubelet"
        self.folder = stack.layout.root / "node" / "berth"  # `down` unmounts what a failed test leaves below node/
        self.rig = Rig(self.kubelet, self.folder, Store(self.folder / "store"))
        self.rig.store.add(DIGEST, FILES)
        self.write(CACHE, replace(CACHE, uid="0a0a-2", name="pending", state="Pending", reason="extracting"))
        self.process: subprocess.Popen[str] | None = None

    def write(self, *caches: Any) -> None:
        """While the driver is away, for it is the one that writes."""
        ledger = Ledger(self.folder)
        for cache in caches:
            ledger.put_cache(cache)
        ledger.close()

    def start(self) -> None:
        arguments = [str(self.folder), str(self.kubelet), NODE]
        log = (self.folder / "log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nodeworkers.csi_process", *arguments],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        log.close()
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n", (self.folder / "log").read_text()[-3000:]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def stop(self) -> None:
        """As a DaemonSet's update does."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)

    def apply(self, *bodies: dict[str, Any]) -> None:
        self.stack.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))

    def inside(self, name: str, script: str) -> str:
        return self.stack.kubectl("-n", "team-a", "exec", name, "--", "sh", "-c", script, check=False)

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not seen():
            assert time.monotonic() < deadline, f"{what}\n{(self.folder / 'log').read_text()[-3000:]}"
            time.sleep(0.2)

    def running(self, name: str) -> None:
        self.stack.kubectl("-n", "team-a", "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s")

    def events(self, name: str) -> str:
        selector = f"--field-selector=involvedObject.name={name}"
        return self.stack.kubectl("-n", "team-a", "get", "events", selector, "-o", "jsonpath={.items[*].message}")


@pytest.fixture
def node(make_stack: MakeStack) -> Iterator[Node]:
    made = Node(make_stack(UpOptions(real_node=True)))
    try:
        made.apply(DRIVER, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}})
        made.start()
        drivers = ("get", "csinode", NODE, "-o", "jsonpath={.spec.drivers[*].name}")
        made.until("registered", lambda: made.stack.kubectl(*drivers, check=False) == "csi.tkm.io")
        yield made
    finally:
        made.kill()


def test_pods_mount_compile_and_are_refused_under_a_real_kubelet(node: Node) -> None:
    compiles = (
        f"cat {CAPTURED}/{KERNEL}/add.cubin; echo; cd {CAPTURED}; mkdir NEW; echo new > NEW/x; "
        f"echo more > {KERNEL}/extra; echo done"
    )
    service_account = "the default service account of a new namespace"
    sees = ("-n", "team-a", "get", "serviceaccount", "default", "-o", "name")
    node.until(service_account, lambda: "default" in node.stack.kubectl(*sees, check=False))
    node.apply(
        pod("first", "llama", compiles), pod("second", "llama"), pod("early", "pending"),
        pod("stranger", "nobodys"),
    )  # fmt: skip
    node.running("first")
    node.running("second")
    said = "machine code\ndone\n"
    node.until("the first pod's words", lambda: node.stack.kubectl("-n", "team-a", "logs", "first") == said)
    assert node.inside("first", f"id -u; cat {CAPTURED}/NEW/x {CAPTURED}/{KERNEL}/extra") == "1000\nnew\nmore\n"
    assert node.inside("second", f"ls {CAPTURED}") == f"{KERNEL}\n"
    assert node.inside("second", f"ls {CAPTURED}/{KERNEL}") == "__grp__add.json\nadd.cubin\n"

    # Why a pod does not start is in its Events.
    told = "FailedPrecondition desc = TritonKernelCache team-a/pending is not Ready on this node yet: extracting"
    node.until("the refusal in an Event", lambda: told in node.events("early"))
    node.until("the refusal in an Event", lambda: "team-a/nobodys is not known on this node" in node.events("stranger"))

    # Without the driver pods go on, and one that is deleted waits for it.
    node.kill()
    assert (
        node.inside("first", f"cat {CAPTURED}/NEW/x; echo late > {CAPTURED}/late && cat {CAPTURED}/late")
        == "new\nlate\n"
    )
    node.stack.kubectl("-n", "team-a", "delete", "pod", "second", "stranger", "--wait=false")
    node.write(replace(CACHE, uid="0a0a-2", name="pending"))
    node.start()
    node.running("early")
    for name in ("second", "stranger"):
        node.stack.kubectl("-n", "team-a", "wait", "--for=delete", f"pod/{name}", "--timeout=120s")
    assert node.inside("first", f"cat {CAPTURED}/late") == "late\n"

    # A kubelet that starts anew finds the driver by itself, and its pods' volumes as they were.
    node.stack.wait_restarted("kubelet", node.stack.kill("kubelet"), timeout=60)
    node.apply(pod("third", "llama"))
    node.running("third")
    node.until("first again", lambda: node.inside("first", f"cat {CAPTURED}/late") == "late\n")

    for name in ("first", "third", "early"):
        node.stack.kubectl("-n", "team-a", "delete", "pod", name, "--wait=false")
    for name in ("first", "third", "early"):
        node.stack.kubectl("-n", "team-a", "wait", "--for=delete", f"pod/{name}", "--timeout=120s")
    node.until(
        "nothing is left but layers for pods to come", lambda: all(".spare-" in each for each in node.rig.left())
    )
    node.stop()
    assert node.rig.left() == []
    node.kill()
    ledger = Ledger(node.folder)
    assert ledger.mounts() == []
    ledger.close()
