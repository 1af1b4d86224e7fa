"""A cluster with berth on one real node, a real registry and the real cosign, and what people do there by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from berth.cli.application import after_up, application_processes
from stack import Lines, Stack, StackError, UpOptions
from stack.tools import Toolbox
from tests.images.conftest import RealRegistry, running
from tests.images.signatures.test_real_cosign import Cosign
from tests.nodeworkers.pods import NODE

DATA = Path(__file__).parents[1] / "images" / "data"
KERNELS = DATA / "triton-3.9.0"
NODE_STATUS = "tritonkernelcachenodestatus"


def program(name: str) -> Path:
    try:
        return Toolbox().ensure([name], Lines())[name].path
    except StackError as error:
        pytest.skip(f"{name} cannot be had here: {error}")


@dataclass
class Cluster:
    """A cluster of one real node with berth on it, and a registry."""

    stack: Stack
    registry: RealRegistry
    cosign: Cosign
    folder: Path

    def berth(self, *arguments: str, good: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "berth", *arguments], capture_output=True, text=True, check=False, timeout=120
        )
        assert not good or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def push(self, name: str, folder: Path = KERNELS, *, sign: bool = True) -> str:
        """Builds, pushes and signs an image as a person would; returns its reference."""
        image = f"{self.registry.host}/team/{name}:v1"
        layout = self.folder / f"image-{name}"
        self.berth("cache", "build", str(folder), "--out", str(layout), "--index")
        self.berth("cache", "push", str(layout), image, "--insecure", self.registry.host)
        if sign:
            insecure = ("--allow-insecure-registry", "--allow-http-registry")
            self.cosign.run(
                "sign", "--yes", "--key", "cosign.key", "--tlog-upload=false", "--use-signing-config=false",
                "--recursive=false", *insecure, image,
            )  # fmt: skip
        return image

    def apply(self, *bodies: dict[str, Any]) -> None:
        self.stack.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))

    def cache(self, name: str, image: str, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "tkm.io/v1alpha1",
            "kind": "TritonKernelCache",
            "metadata": {"name": name, "namespace": "team-a"},
            "spec": {"ociImage": {"image": image}, **spec},
        }

    def get(self, kind: str, name: str) -> dict[str, Any]:
        found = self.stack.kubectl("-n", "team-a", "get", kind, name, "-o", "json", check=False)
        try:
            raw: dict[str, Any] = json.loads(found)
        except ValueError:
            return {}
        return raw

    def condition(self, kind: str, name: str, condition: str) -> tuple[str, str, str]:
        for each in self.get(kind, name).get("status", {}).get("conditions", []):
            if each["type"] == condition:
                return each["status"], each["reason"], each["message"]
        return "", "", ""

    def until(self, what: str, seen: Callable[[], bool], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            if time.monotonic() > deadline:
                logs = (self.stack.layout.log / "node.log").read_text()[-3000:]
                everything = self.stack.kubectl(
                    "-n", "team-a", "get", "tkc,tkcn,pods,events", "-o", "wide", check=False
                )
                pytest.fail(f"after {seconds:.0f} s still not: {what}\n{everything}\n{logs}")
            time.sleep(0.2)

    def until_condition(self, name: str, condition: str, status: str, reason: str) -> str:
        """Of the cache; returns the message."""
        kind = "tritonkernelcache"
        self.until(
            f"{name} is {condition} {status} {reason}",
            lambda: self.condition(kind, name, condition)[:2] == (status, reason),
        )
        return self.condition(kind, name, condition)[2]

    def until_predicted(self, name: str, status: str, reason: str) -> None:
        """On the node, of the pods that come."""
        self.until(
            f"hits of {name} are predicted {status} {reason}",
            lambda: self.condition(NODE_STATUS, f"{name}.{NODE}", "HitPredicted")[:2] == (status, reason),
        )

    def served(self, name: str) -> str:
        """The digest that new pods get on the node."""
        return str(self.get(NODE_STATUS, f"{name}.{NODE}")["status"]["digest"])

    def events(self, name: str, namespace: str = "team-a") -> str:
        """What an object's Events say, each on a line of its own."""
        selector = f"--field-selector=involvedObject.name={name}"
        said = '-o=jsonpath={range .items[*]}{.reason}: {.message}{"\\n"}{end}'
        return self.stack.kubectl("-n", namespace, "get", "events", selector, said)

    def inside(self, pod: str, script: str) -> str:
        return self.stack.kubectl("-n", "team-a", "exec", pod, "--", "sh", "-c", script, check=False)

    def running(self, pod: str) -> None:
        self.until(f"{pod} runs", lambda: self.get("pod", pod).get("status", {}).get("phase") == "Running", 120)

    def pods(self, name: str) -> int:
        """How many have the cache mounted, as the node says."""
        status = self.get(NODE_STATUS, f"{name}.{NODE}").get("status", {})
        return int(status.get("podsUsing", 0))

    def mount(self, pod: str) -> Path:
        """Where the kubelet has the pod's volume."""
        uid = self.get("pod", pod)["metadata"]["uid"]
        (found,) = (self.stack.layout.root / "node/kubelet/pods" / uid / "volumes").glob("*/kernels/mount")
        return Path(found)


def policy(host: str, key: str) -> dict[str, Any]:
    """What a registry has is to be signed by this key."""
    return {
        "apiVersion": "tkm.io/v1alpha1",
        "kind": "KernelCachePolicy",
        "metadata": {"name": host.replace(":", "-")},
        "spec": {"images": [f"{host}/team/**"], "signers": [{"name": "release", "key": key}]},
    }


@contextmanager
def whole(folder: Callable[[str], Path], others: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """The cluster, with a policy that wants every image signed by the key of this run. `folder` makes new folders.
    `others`: further registries, and who signs what lies there: a public key in PEM.
    """
    keys = folder("keys")
    cosign = Cosign(program("cosign"), keys)
    options = UpOptions(real_node=True, kwok=False, end_with_caller=True, etcd_fsync=False)
    stack = Stack(folder("stack"))
    with running(program("registry-referrers"), blobs=folder("blobs")) as registry:
        settings = {"registries": {"insecure": [registry.host, *(others or {})]}}
        try:
            stack.up(
                options,
                processes=lambda endpoints: application_processes(endpoints, options, simulated_gpus="2xH100"),
                after_up=lambda endpoints: after_up(endpoints, settings, node=NODE),
            )
            made = Cluster(stack, registry, cosign, keys)
            cosign.run("generate-key-pair")
            trusted = {registry.host: (keys / "cosign.pub").read_text(), **(others or {})}
            made.apply(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}},
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-b"}},
                *(policy(host, key) for host, key in trusted.items()),
            )
            yield made
        finally:
            stack.down()
