"""DRA under a real kubelet and scheduler, with simulated devices: pods with claims and with extended resource names get
what they asked for, are told of a card's trouble, and outlive the driver and the kubelet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from berth.install import manifests
from planning.devices.claims import CDI_KIND
from planning.devices.slices import UNHEALTHY
from stack import Stack, UpOptions, cdi_folder
from stack.node_images import BUSYBOX
from stack.realnode import unavailable
from tests.nodeworkers.dra.dra_process import IDS, SEAT
from tests.nodeworkers.dra.simulated_devices import N150
from tests.nodeworkers.pods import NODE

pytestmark = [
    pytest.mark.node,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]
MakeStack = Callable[..., Stack]


def pod(name: str, resources: dict[str, Any], *claims: dict[str, Any], script: str = "true") -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "resourceClaims": list(claims),
            "containers": [
                {
                    "name": "c", "image": BUSYBOX, "command": ["sh", "-ec", f"{script}; sleep 100000"],
                    "resources": resources,
                }
            ],
        },
    }  # fmt: skip


def claim(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    spec = {"devices": {"requests": list(requests)}}
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"}, "spec": spec,
    }  # fmt: skip


class Node:
    """A stack with a real kubelet, and the driver beside it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.kubelet = stack.layout.root / "node" / "kubelet"
        self.folder = stack.layout.root / "node" / "berth"
        self.cdi = cdi_folder(stack.layout.root)  # where its containerd looks
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        kubeconfig = self.stack.endpoints.kubeconfig("admin")
        arguments = [str(self.folder), str(self.kubelet), NODE, str(kubeconfig), str(self.cdi)]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.nodeworkers.dra.dra_process", *arguments],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n", self.log()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

    def apply(self, *bodies: dict[str, Any]) -> None:
        self.stack.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))

    def get(self, *what: str) -> Any:
        return json.loads(self.stack.kubectl("get", *what, "-o", "json"))

    def until(self, what: str, seen: Callable[[], Any], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            events = self.stack.kubectl("get", "events", check=False)[-3000:]
            assert time.monotonic() < deadline, f"{what}\n{self.log()}\n{events}"
            time.sleep(0.2)

    def inside(self, name: str, script: str) -> str:
        return self.stack.kubectl("exec", name, "--", "sh", "-c", script, check=False)

    def running(self, *names: str) -> None:
        for name in names:
            self.until(f"{name} runs", partial(self._runs, name))

    def _runs(self, name: str) -> bool:
        return bool(self.get("pod", name)["status"].get("phase") == "Running")

    def has(self, name: str) -> list[str]:
        """The simulated devices whose nodes a container sees; each must be in its environment as well."""
        script = "echo $SIMULATED_DEVICES; ls /dev/simulated; test -s /etc/simulated && echo mounted"
        first, *rest, mounted = self.inside(name, script).split()
        assert sorted(first.split(",")) == sorted(rest) and mounted == "mounted"
        return sorted(rest)

    def gone(self, *names: str) -> None:
        self.stack.kubectl("delete", "pod", *names, "--wait=false")
        for name in names:
            self.stack.kubectl("wait", "--for=delete", f"pod/{name}", "--timeout=120s")

    def devices(self) -> dict[str, Any]:
        slices = self.get("resourceslices", f"--field-selector=spec.nodeName={NODE}")["items"]
        return {device["name"]: device for body in slices for device in body["spec"]["devices"]}

    def health(self, name: str) -> list[str]:
        """What the pod's status says of the health of its resources."""
        (container,) = self.get("pod", name)["status"]["containerStatuses"]
        told = container.get("allocatedResourcesStatus", ())
        return sorted(each["health"] for status in told for each in status.get("resources", ()))

    def specs(self) -> set[str]:
        return {file.name for file in self.cdi.glob(f"{CDI_KIND.replace('/', '-')}_*")}


@pytest.fixture
def node(make_stack: MakeStack) -> Iterator[Node]:
    made = Node(make_stack(UpOptions(real_node=True)))
    try:
        made.apply(*manifests("dra"))
        made.start()
        made.until("published", lambda: len(made.devices()) == len(IDS) + 1)
        yield made
    finally:
        made.kill()


def test_pods_get_devices_by_claim_and_by_resource_name(node: Node) -> None:
    two = {"name": "two", "exactly": {"deviceClassName": "berth-tenstorrent-n150", "count": 2}}
    preferred = {
        "name": "seat",
        "firstAvailable": [
            {
                "name": "there", "deviceClassName": "berth-gpu-2x-seat",
                "selectors": [{"cel": {"expression": 'device.attributes["devices.kyb.ai"].group == "pair9"'}}],
            },
            {"name": "any", "deviceClassName": "berth-gpu-2x-seat"},
        ],
    }  # fmt: skip
    node.apply(claim("shared", two), claim("seat", preferred))
    reference = {"name": "devices", "resourceClaimName": "shared"}
    wants = {"claims": [{"name": "devices"}]}
    node.apply(
        pod("first", wants, reference), pod("second", wants, reference),
        pod("seated", wants, {"name": "devices", "resourceClaimName": "seat"}),
        pod("named", {"limits": {N150: "1"}}),
    )  # fmt: skip
    node.running("first", "second", "seated", "named")
    shared = node.has("first")
    assert len(shared) == 2 and node.has("second") == shared, "two pods of one claim have the same cards"
    (named,) = node.has("named")
    assert named in set(IDS) - set(shared)
    assert node.has("seated") == [SEAT.id]
    allocatable = node.get("node", NODE)["status"]["allocatable"]
    assert N150 not in allocatable, "what DRA offers does not stand in allocatable"
    assert len(node.specs()) == 3

    # A card's trouble is on the slice and in the status of the pods that have it (by claim: of extended resources the
    # kubelet 1.36 tells nothing there), and goes again.
    ill = shared[0]
    (node.folder / "ill").write_text(ill)
    node.until("the taint", lambda: node.devices()[ill].get("taints"))
    assert node.devices()[ill]["taints"][0]["key"] == UNHEALTHY
    node.until("the pods are told", lambda: node.health("first") == node.health("second") == ["Healthy", "Unhealthy"])
    node.until("the other's as well", lambda: node.health("seated") == ["Healthy"])
    (spare,) = set(IDS) - set(shared) - {named}
    (node.folder / "ill").write_text(f"{ill} {spare}")
    node.until("the other taint", lambda: node.devices()[spare].get("taints"))
    node.apply(pod("waiting", {"limits": {N150: "1"}}))
    node.until(
        "no pod gets a card that is not well",
        lambda: any(
            each.get("reason") == "Unschedulable"
            for each in node.get("pod", "waiting")["status"].get("conditions", ())
        ),
    )  # fmt: skip
    (node.folder / "ill").write_text("")
    node.running("waiting")
    assert node.has("waiting") == [spare]
    node.until("the pods are told of the recovery", lambda: node.health("first") == ["Healthy", "Healthy"])

    # The driver is killed and the CDI specs are gone, as after a reboot: the pods go on, and what is prepared still is.
    node.kill()
    for file in node.cdi.glob(f"{CDI_KIND.replace('/', '-')}_*"):
        file.unlink()
    node.stack.kubectl("delete", "pod", "second", "waiting", "--wait=false")
    node.start()
    for name in ("second", "waiting"):
        node.stack.kubectl("wait", "--for=delete", f"pod/{name}", "--timeout=120s")
    node.until("one claim was given back", lambda: len(node.specs()) == 3)
    assert node.has("first") == shared

    # A kubelet that starts anew deletes the slices, and finds the driver by itself.
    node.stack.wait_restarted("kubelet", node.stack.kill("kubelet"), timeout=60)
    node.apply(pod("third", wants, reference), pod("renamed", {"limits": {N150: "1"}}))
    node.running("third", "renamed")
    assert node.has("third") == shared and node.has("renamed") == [spare]
    node.until("published again", lambda: len(node.devices()) == len(IDS) + 1)

    node.gone("first", "third", "seated", "named", "renamed")
    node.until("nothing is left", lambda: not node.specs() and not list((node.folder / "claims").glob("*.json")))
    assert node.process is not None
    node.process.terminate()
    assert node.process.wait(30) == 0
