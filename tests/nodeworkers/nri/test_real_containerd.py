"""The NRI plugin and seat-init under a real containerd and a real kubelet: refused, granted, ended, started anew."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.nri import seat_init
from nodeworkers.nri.plugin import Plugin
from nodeworkers.nri.values import Adjustment, Container, Happening, Pod, Refused, Started, Stopped, Synchronized
from stack import Stack, UpOptions, cdi_folder
from stack.node_images import BUSYBOX
from stack.realnode import unavailable
from tests.nodeworkers.pods import NODE

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]
MakeStack = Callable[..., Stack]
SENTENCE = "Seat kyb-G01-s1 waits: kyb-G01-s2 has the slot of group G01."
# It takes part in what a CDI file would bring: the kubelet writes this into the container as it is.
SEAT = {"name": "KYB_GPU_SEAT", "value": "kyb-G01-s1"}


class Node:
    """Grants or refuses, puts seat-init in place, and remembers."""

    def __init__(self, folder: Path) -> None:
        self.program, self.slots, self.granted = folder / "seat-init", folder / "slots", False
        self.asked: list[Container] = []
        self.happened: list[Happening] = []
        seat_init.build(self.program)

    async def decide(self, seat: str, pod: Pod, container: Container) -> Adjustment:
        assert (seat, pod.name, container.name) == ("kyb-G01-s1", "served", "server")
        self.asked.append(container)
        if not self.granted:
            raise Refused(SENTENCE)
        seat_init.run(self.orders(container))
        return seat_init.behind(container, self.program, self.orders(container))

    def orders(self, container: Container) -> Path:
        return self.slots / container.id

    def started(self) -> list[Started]:
        return [each for each in self.happened if isinstance(each, Started) and each.pod.name == "served"]


async def until(holds: Callable[[], object], what: str, seconds: float = 60) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, f"not in {seconds} s: {what}"
        await asyncio.sleep(0.02)


def body(name: str, env: list[dict[str, str]], user: int) -> dict[str, Any]:
    container = {
        "name": "server",
        "image": BUSYBOX,
        "command": ["sh", "-c", "echo served by $$; trap 'exit 0' TERM; while :; do sleep 0.1; done"],
        "env": env,
        "securityContext": {
            "runAsUser": user, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }  # fmt: skip
    spec = {"nodeName": NODE, "terminationGracePeriodSeconds": 5, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


async def test_a_container_starts_when_it_is_granted_and_its_server_anew_without_a_restart(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    node = Node(tmp_path)
    stack = await asyncio.to_thread(make_stack, UpOptions(real_node=True, kwok=False))
    plugin = Plugin(node.decide, node.happened.append)
    running = asyncio.ensure_future(plugin.run())

    async def kubectl(*arguments: str, stdin: dict[str, Any] | None = None) -> str:
        text = None if stdin is None else json.dumps(stdin)
        return await asyncio.to_thread(stack.kubectl, *arguments, stdin=text, check=False)

    async def until_says(expected: str, *arguments: str) -> str:
        began = time.monotonic()
        while expected not in (said := await kubectl(*arguments)):
            assert time.monotonic() - began < 60, f"{expected!r} is not in {said!r}"
            await asyncio.sleep(0.1)
        return said

    async def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await kubectl("get", "pod", "served", "-o", "json"))
        statuses = found["status"].get("containerStatuses", [{}])
        return dict(statuses[0])

    try:
        await until(lambda: plugin.status.connected, "connected")
        assert plugin.status.sets_args and not plugin.status.message
        await until_says("default", "get", "serviceaccount", "default", "-o", "name")
        await kubectl("apply", "-f", "-", stdin=body("served", [SEAT], user=1000))
        await kubectl("apply", "-f", "-", stdin=body("other", [], user=0))

        # Refused: the pod says why, nothing is left behind, and others are not touched.
        said = await until_says(SENTENCE, "get", "pod", "served", "-o", "json")
        assert '"reason": "CreateContainerError"' in said
        await until_says("Running", "get", "pod", "other")
        assert not containers(stack, "server", "served")
        assert not node.started()

        # Granted: a change of the pod is enough for the kubelet to try again at once.
        node.granted = True
        await kubectl("annotate", "pod", "served", "kyb.ai/granted=1")
        await until(node.started, "started")
        (first,) = node.started()
        pid, orders = first.container.pid, node.orders(first.container)
        assert first.container.args[:2] == (seat_init.INSIDE, seat_init.ORDERS_INSIDE)
        await until_says("served by", "logs", "served")

        # Down and up again, and the kubelet sees the same container all the time.
        for cycle in (2, 3):
            seat_init.down(orders, 5)
            await until(lambda: not seat_init.others(pid), "the server is down")
            seat_init.run(orders)
            await until_says("served by", "logs", "served", f"--tail={2 * cycle}")
            await until(lambda: seat_init.others(pid), "the server is up")
        assert "ended with status 0 without its seat" in await kubectl("logs", "served")
        now = await status()
        assert now["restartCount"] == 0 and "running" in now["state"]

        # A containerd that is killed knows it still, and asks again.
        killed = await asyncio.to_thread(stack.kill, "containerd")
        told = len(node.happened)
        await until(lambda: any(isinstance(each, Synchronized) for each in node.happened[told:]), "synchronized")
        await asyncio.to_thread(stack.wait_restarted, "containerd", killed, timeout=60)
        synchronized = next(each for each in node.happened[told:] if isinstance(each, Synchronized))
        assert (pid, first.container.id) in [(each.pid, each.id) for _, each in synchronized.containers]

        # Its server dies while the seat has the slot: the container's end, which the kubelet counts, and asks for.
        asked = len(node.asked)
        os.kill(seat_init.others(pid)[0], signal.SIGKILL)
        await until(lambda: len(node.started()) == 2, "started again")
        assert len(node.asked) == asked + 1
        stopped = [
            each for each in node.happened if isinstance(each, Stopped) and each.container.id == first.container.id
        ]
        assert stopped[0].container.exit_code == 137
        await until_says("served by", "logs", "served")
        assert (await status())["restartCount"] == 1
        began = time.monotonic()
        await kubectl("delete", "pod", "served")
        assert time.monotonic() - began < 5, "SIGTERM ends it"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def containers(stack: Stack, name: str, pod: str) -> list[str]:
    """The ids of those that containerd has of a pod, whatever their state."""
    runtime = cdi_folder(stack.layout.root).with_name("containerd.sock")
    crictl = [str(stack.tool("crictl")), "--runtime-endpoint", f"unix://{runtime}"]
    listed = subprocess.run(
        [*crictl, "ps", "-a", "-q", "--name", name, "--label", f"io.kubernetes.pod.name={pod}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return listed.stdout.split()
