"""A real node whose seats are switched: pods with simulated model servers, Services that lead to them, and who asks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.seats.service import SIMULATED_GPUS
from nodeworkers.seats.simulated_gpu.checker import Verdict, check
from planning.seats.endpoints import PORT_ANNOTATION, SERVICE_ANNOTATION
from stack.native import ensure
from stack.node_images import BUSYBOX
from stack.paths import Layout, NodeFolders
from tests.nodeworkers.devices.whole import SEAT, Machine, machine, seats
from tests.nodeworkers.pods import NODE

ROOT = Path(__file__).parents[3]
SIZE = 8 * 2**20  # bytes of each server on each card
PORT = 8000
NAMES = ("a", "b", "c")


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

    def ask_until_answered(self, name: str) -> dict[str, Any]:
        """Until its Service leads somewhere: the pod must have its seat first."""
        deadline = time.monotonic() + 240
        while True:
            try:
                return self.ask(name)
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                if time.monotonic() > deadline:
                    logs = (self.node.stack.layout.log / "node.log").read_text()[-5000:]
                    shown = self.node.stack.kubectl(
                        "get", "gpuseatgroups,pods,services,endpointslices,events", "-o", "wide", check=False
                    )
                    pytest.fail(f"{name} does not answer by its Service\n{shown}\n{logs}")
                time.sleep(1)

    def end_what_outlives_berth(self) -> None:
        """The proxy and the helpers."""
        for victim in ("seat-proxy --control", "nodeworkers.seats.helper"):
            for pid in self.processes(victim):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes(self, words: str) -> list[int]:
        """Of this stack, those whose command line has these words."""
        mine, found = str(self.node.stack.layout.root), []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                told = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words in told and mine in told:
                    found.append(int(place.name))
        return found


@contextmanager
def seated(
    folder: Path, lost_percent: int = 10, per_group: int = len(NAMES), front: str = "--device-plugin"
) -> Iterator[Seated]:
    """With one group of two GPUs and three seats, which nobody holds yet. `lost_percent`: what switches may take."""
    options = (
        front, "kyb.ai/*", "--switch-seats", "--seat-proxy", str(ensure("seat-proxy")),
        "--container-runtime", str(NodeFolders(Layout.of(folder / "stack")).socket),
    )  # fmt: skip
    with machine(folder, *options) as node:
        profile = seats(("G01", [0, 1]), per_group=per_group)
        profile["spec"]["profiles"][0]["policy"] = {"type": "onDemand", "lostPercent": lost_percent}
        node.apply(profile)
        if front == "--device-plugin":
            node.until_allocatable(SEAT, per_group)
        made = Seated(node)
        node.until("simulated GPUs are laid out", (made.folder / "cards.json").exists)
        try:
            yield made
        finally:
            made.end_what_outlives_berth()
