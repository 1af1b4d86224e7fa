"""Three model servers share a group of simulated GPUs under a real kubelet: each is asked by its Service, whoever is
asked is woken, whoever is not is parked, and nobody's memory is ever beside another's.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.seats.service import SIMULATED_GPUS
from nodeworkers.seats.simulated_gpu.checker import Verdict, check
from planning.seats.endpoints import PORT_ANNOTATION, SERVICE_ANNOTATION
from stack import StackError
from stack.native import cargo, ensure, find
from stack.node_images import BUSYBOX
from stack.paths import Layout, NodeFolders
from stack.realnode import unavailable
from tests.nodeworkers.csi_rig import needs_mounts
from tests.nodeworkers.devices.whole import SEAT, Machine, machine, seats
from tests.nodeworkers.pods import NODE

ROOT = Path(__file__).parents[3]
SIZE = 8 * 2**20  # bytes of each server on each card
PORT = 8000
NAMES = ("a", "b", "c")


def _missing() -> str:
    if why := unavailable():
        return why
    try:
        if find("seat-proxy") is None:
            cargo()
    except StackError as error:
        return str(error)
    return ""


pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "possible"),
]


def server(name: str, folder: Path) -> dict[str, Any]:
    """A pod with a seat, whose server is the simulated one, in the host's own files."""
    command = [
        "/bin/busybox", "chroot", "/host", "env", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1",
        sys.executable, "-m", "nodeworkers.seats.simulated_gpu.server", "--folder", str(folder), "--bytes", str(SIZE),
        "--port", str(PORT),
        "--name", name,
    ]  # fmt: skip
    limits = {SEAT: "1", "memory": "256Mi"}
    container = {
        "name": "server", "image": BUSYBOX, "command": command, "resources": {"limits": limits},
        "volumeMounts": [{"name": "host", "mountPath": "/host"}],
    }  # fmt: skip
    annotations = {PORT_ANNOTATION: str(PORT), "kyb.ai/wait-seconds": "120"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"model": name}, "annotations": annotations},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        },
    }


def service(name: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": "default", "annotations": {SERVICE_ANNOTATION: f"model={name}"}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": [{"port": 80}]}}


class Seated:
    """The node, and who asks its servers."""

    def __init__(self, node: Machine) -> None:
        self.node = node
        self.folder = node.stack.layout.root / "node" / "berth" / SIMULATED_GPUS

    def ask(self, name: str, tokens: int = 1) -> dict[str, Any]:
        """By the Service, from this machine."""
        address = self.node.get("service", name)["spec"]["clusterIP"]
        body = json.dumps({"user": name, "max_tokens": tokens}).encode()
        request = urllib.request.Request(f"http://{address}/v1/completions", data=body)
        with urllib.request.urlopen(request, timeout=150) as answer:
            told: dict[str, Any] = json.loads(answer.read())
            return told

    def group(self) -> dict[str, Any]:
        found: dict[str, Any] = self.node.get("gpuseatgroup", f"{NODE}.g01").get("status", {})
        return found

    def verdict(self) -> Verdict:
        with (self.folder / "log.jsonl").open() as log:
            return check(log)


@pytest.fixture(scope="module")
def seated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seated]:
    folder = tmp_path_factory.mktemp("seats")
    options = (
        "--device-plugin", "kyb.ai/*", "--switch-seats", "--seat-proxy", str(ensure("seat-proxy")),
        "--container-runtime", str(NodeFolders(Layout.of(folder / "stack")).socket),
    )  # fmt: skip
    with machine(folder, *options) as node:
        node.apply(seats(("G01", [0, 1]), per_group=3))
        node.until_allocatable(SEAT, 3)
        made = Seated(node)
        node.until("simulated GPUs are laid out", (made.folder / "cards.json").exists)
        yield made


def test_three_servers_share_two_gpus(seated: Seated) -> None:
    node = seated.node
    node.apply(*(service(name) for name in NAMES), *(server(name, seated.folder) for name in NAMES))
    with ThreadPoolExecutor(3) as clients:
        # A first request to each also starts it: nobody else asks for the slot.
        first = [clients.submit(_patient, seated, name) for name in NAMES]
        assert [each.result()["model"] for each in first] == list(NAMES)
    for name in ("a", "c", "b", "a"):
        assert seated.ask(name) == {"model": name, "id": name, "choices": [{"index": 0, "text": "0"}]}
    statuses = [node.status(name)["containerStatuses"][0] for name in NAMES]
    assert [each["restartCount"] for each in statuses] == [0, 0, 0]
    verdict = seated.verdict()
    assert not verdict.wrong
    assert verdict.restores >= 2 * 3


def _patient(seated: Seated, name: str) -> dict[str, Any]:
    """Until its Service leads somewhere: the pod must have its seat first."""
    deadline = time.monotonic() + 240
    while True:
        try:
            return seated.ask(name)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            if time.monotonic() > deadline:
                logs = (seated.node.stack.layout.log / "node.log").read_text()[-5000:]
                shown = seated.node.stack.kubectl(
                    "get", "gpuseatgroups,pods,services,endpointslices,events", "-o", "wide", check=False
                )
                pytest.fail(f"{name} does not answer by its Service\n{shown}\n{logs}")
            time.sleep(1)
