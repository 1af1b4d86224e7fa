"""A cluster of one real node with berth on it and a machine of simulated devices, and what people do there by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.cli.application import after_up, application_processes
from stack import Stack, UpOptions
from stack.node_images import BUSYBOX
from tests.nodeworkers.pods import NODE

N150, GPU, SEAT = "tenstorrent.com/n150", "nvidia.com/gpu", "kyb.ai/gpu-2x-seat"
CARDS = [{"type": "n150"} for _ in range(4)]
GPUS = {"gpus": [{"product": "H100", "count": 8}], "topology": "nvlink-pairs"}


@dataclass
class Machine:
    """The node, and the file that says what it has."""

    stack: Stack
    file: Path

    def has(self, cards: Sequence[dict[str, Any]] = CARDS, gpus: dict[str, Any] = GPUS) -> None:
        written = self.file.with_suffix(".new")
        written.write_text(yaml.safe_dump({"tenstorrent": {"cards": list(cards)}, "nvidia": gpus}))
        written.rename(self.file)

    def apply(self, *bodies: dict[str, Any]) -> None:
        self.stack.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found = self.stack.kubectl("get", kind, name, "-o", "json", check=False)
        try:
            raw: dict[str, Any] = json.loads(found)
        except ValueError:
            return {}
        return raw

    def listed(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.stack.kubectl("get", kind, *arguments, "-o", "json"))["items"]
        return found

    def until(self, what: str, seen: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            if time.monotonic() > deadline:
                logs = (self.stack.layout.log / "node.log").read_text()[-3000:]
                shown = self.stack.kubectl("get", "nodedevices,pods,events,gpusp", "-o", "wide", check=False)
                pytest.fail(f"after {seconds:.0f} s still not: {what}\n{shown}\n{logs}")
            time.sleep(0.2)

    def allocatable(self, resource: str) -> int:
        found = self.get("node", NODE).get("status", {}).get("allocatable", {})
        return int(found.get(resource, 0))

    def until_allocatable(self, resource: str, count: int, seconds: float = 60.0) -> None:
        self.until(f"{count} {resource} are allocatable", lambda: self.allocatable(resource) == count, seconds)

    def status(self, pod: str) -> dict[str, Any]:
        status: dict[str, Any] = self.get("pod", pod).get("status", {})
        return status

    def until_phase(self, pod: str, phase: str = "Running", seconds: float = 60.0) -> None:
        self.until(f"{pod} is {phase}", lambda: self.status(pod).get("phase") == phase, seconds)

    def inside(self, pod: str, script: str) -> str:
        return self.stack.kubectl("exec", pod, "--", "sh", "-c", script)

    def variables(self, pod: str) -> dict[str, str]:
        lines = self.inside(pod, "env").splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def remove(self, *pods: str) -> None:
        self.stack.kubectl("delete", "pod", *pods, "--timeout=60s", "--ignore-not-found")


def pod(name: str, resource: str, count: int = 1, script: str = "sleep 100000", **metadata: Any) -> dict[str, Any]:
    amounts = {resource: str(count)}
    container = {"name": "c", "image": BUSYBOX, "command": ["sh", "-ec", script], "resources": {"limits": amounts}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": {"terminationGracePeriodSeconds": 0, "restartPolicy": "Never", "containers": [container]},
    }


def claiming(name: str, template: str, script: str = "sleep 100000", **metadata: Any) -> dict[str, Any]:
    """A pod whose container has the claim that is made for it of a ResourceClaimTemplate."""
    made = pod(name, GPU, script=script, **metadata)
    made["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": template}]
    made["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpus"}]}
    return made


def template(name: str, count: int = 1) -> dict[str, Any]:
    """A ResourceClaimTemplate of so many GPUs."""
    request = {"name": "gpu", "exactly": {"deviceClassName": "berth-nvidia-gpu", "count": count}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def seats(*groups: tuple[str, Sequence[int | str]], per_group: int = 2, size: int = 2) -> dict[str, Any]:
    """A GPUSeatProfile."""
    profile = {
        "name": "pair", "resource": f"kyb.ai/gpu-{size}x-seat", "groupSize": size, "seatsPerGroup": per_group
    }  # fmt: skip
    topology = {"groups": [{"name": name, "gpus": gpus} for name, gpus in groups]}
    return {
        "apiVersion": "kyb.ai/v1alpha1",
        "kind": "GPUSeatProfile",
        "metadata": {"name": "pairs"},
        "spec": {"profiles": [profile], "gpuTopology": topology},
    }


@contextmanager
def machine(folder: Path, *fronts: str) -> Iterator[Machine]:
    """`fronts`: options of `berth node`, such as --device-plugin and a pattern."""
    file = folder / "machine.yaml"
    options = UpOptions(real_node=True, kwok=False, end_with_caller=True, etcd_fsync=False)
    stack = Stack(folder / "stack")
    made = Machine(stack, file)
    made.has()
    devices = [*fronts, "--simulated-machine", str(file)]
    try:
        stack.up(
            options,
            processes=lambda endpoints: application_processes(endpoints, options, devices=devices),
            after_up=lambda endpoints: after_up(endpoints, {}, node=NODE),
        )
        made.apply(seats(("G01", [0, 1]), ("G23", [2, 3])))
        yield made
    finally:
        stack.down()
