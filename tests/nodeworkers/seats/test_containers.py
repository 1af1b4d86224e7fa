"""Which container is a seat's and which processes, by a simulated runtime: what ends, begins and lies in between."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.rpc import cri_pb2 as cri
from nodeworkers.seats import cgroups
from nodeworkers.seats import containers as module
from nodeworkers.seats.backend import Process
from nodeworkers.seats.containers import Containers, ContainersError, Ended, Found
from nodeworkers.seats.cri import Cri
from nodeworkers.sockets import serve
from tests.nodeworkers.seats.simulated_cri import CONTAINER, IP, NAMESPACE, POD, UID, Box, Node, Sandbox, SimulatedCri

FIRST, SECOND = "a" * 64, "b" * 64


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[SimulatedCri]:
    made = SimulatedCri(tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def sandbox(runtime: SimulatedCri) -> Sandbox:
    made = Sandbox("5a" * 32)
    runtime.sandboxes.append(made)
    return made


def runs(node: Node, id: str, *pids: int, started: int = 100) -> None:
    path = node.path(id)
    node.group(path, *pids)
    for pid in pids:
        node.process(pid, path, started)


async def look(runtime: SimulatedCri, node: Node, uid: str = UID) -> Found:
    return await Containers(runtime.socket, node.proc, node.mounted).look(NAMESPACE, POD, CONTAINER, uid)


@pytest.mark.parametrize("unified", [True, False], ids=["cgroup v2", "cgroup v1"])
async def test_a_running_container_is_told_with_all_its_processes(
    tmp_path: Path, runtime: SimulatedCri, sandbox: Sandbox, unified: bool
) -> None:
    (tmp_path / "host").mkdir()
    node = Node(tmp_path / "host", unified)
    runs(node, FIRST, 11, 12)
    node.group(node.path(FIRST) + "/workers", 13)
    node.process(13, node.path(FIRST) + "/workers", started=105)
    node.process(14, node.path(SECOND))  # another's
    runtime.boxes.append(Box(FIRST, sandbox, pid=11, attempt=3))
    found = await look(runtime, node)
    assert found.pod is not None and found.running is not None
    assert (found.pod.uid, found.pod.address, found.pod.ready) == (UID, IP, True)
    assert found.pod.annotations == {"kyb.ai/port": "8000"}
    assert (found.running.id, found.running.attempt, found.running.began) == (FIRST, 3, 3.0)
    assert found.running.root == Process(11, 100)
    assert found.running.processes == (Process(11, 100), Process(12, 100), Process(13, 105))
    assert found.running.among({13, 14}) == (Process(13, 105),)
    assert (found.running.cgroup.path, found.running.cgroup.unified) == (node.path(FIRST), unified)
    assert found.ended is None and not found.created


async def test_a_scope_of_systemd_is_a_containers_too(runtime: SimulatedCri, sandbox: Sandbox, node: Node) -> None:
    path = f"/kubepods.slice/kubepods-pod0a0a_1.slice/cri-containerd-{FIRST}.scope"
    node.group(path, 11)
    node.process(11, path + "/init.scope")
    runtime.boxes.append(Box(FIRST, sandbox, pid=11))
    found = await look(runtime, node)
    assert found.running is not None and found.running.cgroup.path == path
    assert found.running.processes == (Process(11, 100),)


async def test_what_is_not_there_is_told_as_that(runtime: SimulatedCri, node: Node) -> None:
    assert await look(runtime, node) == Found()
    runtime.sandboxes.append(Sandbox("5a" * 32, ip=""))
    found = await look(runtime, node)
    assert found.pod is not None and found.pod.address == "" and found.running is None
    runtime.boxes.append(Box(FIRST, runtime.sandboxes[0], state=cri.CONTAINER_CREATED))
    assert (await look(runtime, node)).created


async def test_the_last_that_ended_is_told_beside_the_one_that_runs(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node
) -> None:
    runtime.boxes += [
        Box(FIRST, sandbox, state=cri.CONTAINER_EXITED, created=2, attempt=1, exit_code=137, reason="OOMKilled"),
        Box("c" * 64, sandbox, state=cri.CONTAINER_EXITED, created=1, exit_code=1, reason="Error"),
        Box(SECOND, sandbox, pid=11, created=3, attempt=2),
        Box("d" * 64, sandbox, pid=99, created=4, name="sidecar"),
    ]
    runs(node, SECOND, 11)
    found = await look(runtime, node)
    assert found.running is not None and found.running.id == SECOND
    assert found.ended == Ended(FIRST, 1, 137, "OOMKilled", 4.5)


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "filters ignored"])
async def test_a_pod_made_anew_under_its_name_is_another(runtime: SimulatedCri, node: Node, filters: bool) -> None:
    runtime.filters = filters
    old = Sandbox("01" * 32, uid="old", state=cri.SANDBOX_NOTREADY, created=1)
    new = Sandbox("02" * 32, uid="new", created=2, ip="10.1.2.4")
    runtime.sandboxes += [new, old, Sandbox("03" * 32, name="else")]
    runtime.boxes += [
        Box(FIRST, old, state=cri.CONTAINER_EXITED, exit_code=3),
        Box(SECOND, new, pid=11),
        Box("e" * 64, new, pid=12, created=9, name="sidecar"),
    ]
    runs(node, SECOND, 11)
    by_name, by_old, by_new = [await look(runtime, node, uid) for uid in ("", "old", "new")]
    assert by_name == by_new
    assert by_new.pod is not None and by_new.pod.address == "10.1.2.4" and by_new.ended is None
    assert by_old.running is None and by_old.ended is not None and by_old.ended.code == 3
    assert await look(runtime, node, "never") == Found()


async def test_a_pods_new_sandbox_has_its_container(runtime: SimulatedCri, node: Node) -> None:
    """The node was started anew: the kubelet makes the pod's sandbox anew, with the same UID."""
    old, new = Sandbox("01" * 32, state=cri.SANDBOX_NOTREADY, created=1), Sandbox("02" * 32, created=2, ip="10.1.2.9")
    runtime.sandboxes += [old, new]
    runtime.boxes += [Box(FIRST, old, state=cri.CONTAINER_EXITED, created=1), Box(SECOND, new, pid=11, created=2)]
    runs(node, SECOND, 11)
    found = await look(runtime, node)
    assert found.pod is not None and found.pod.address == "10.1.2.9"
    assert found.running is not None and found.ended is not None


async def test_a_pid_that_is_anothers_by_now_is_not_the_containers(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node
) -> None:
    runtime.boxes.append(Box(FIRST, sandbox, pid=11))
    node.group(node.path(FIRST), 11)
    node.process(11, "/system.slice/ssh.service")
    with pytest.raises(ContainersError, match=f"system.slice/ssh.service, which is not that of the container {FIRST}"):
        await look(runtime, node)


async def test_a_listed_process_whose_pid_is_anothers_by_now_is_left_out(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node
) -> None:
    runtime.boxes.append(Box(FIRST, sandbox, pid=11))
    runs(node, FIRST, 11, 12, 13, 14, 15)
    node.process(12, "/system.slice/ssh.service")
    shutil.rmtree(node.proc / "13")
    node.process(14, node.path(FIRST), state="Z", threads=0)  # ended, and nobody has waited for it
    node.process(15, node.path(FIRST), state="Z", threads=4)  # only its first thread has ended
    found = await look(runtime, node)
    assert found.running is not None and [each.pid for each in found.running.processes] == [11, 15]


async def test_a_pid_that_is_used_again_in_the_same_container_while_it_is_read_is_left_out(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.boxes.append(Box(FIRST, sandbox, pid=11))
    runs(node, FIRST, 11, 12)
    read = cgroups._path

    def reads(pid: int, proc: Path) -> tuple[str, bool]:
        if pid == 12:
            node.process(12, node.path(FIRST), started=200)
        return read(pid, proc)

    monkeypatch.setattr(cgroups, "_path", reads)
    found = await look(runtime, node)
    assert found.running is not None and found.running.processes == (Process(11, 100),)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOENT, errno.EOPNOTSUPP, errno.EIO], ids=errno.errorcode.get)
async def test_a_group_below_that_is_going_or_lists_nothing_is_passed_over(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    runtime.boxes.append(Box(FIRST, sandbox, pid=11))
    runs(node, FIRST, 11)
    below = node.group(node.path(FIRST) + "/threads", 12) / "cgroup.procs"
    read = cgroups._read

    def reads(path: Path) -> str:
        if path == below:
            raise OSError(number, os.strerror(number))
        return read(path)

    monkeypatch.setattr(cgroups, "_read", reads)
    if number == errno.EIO:
        with pytest.raises(ContainersError, match="Input/output error"):
            await look(runtime, node)
    else:
        found = await look(runtime, node)
        assert found.running is not None and found.running.processes == (Process(11, 100),)


@pytest.mark.parametrize("removed", [False, True])
async def test_a_container_that_exits_between_two_calls_is_looked_at_again(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node, removed: bool
) -> None:
    box = Box(FIRST, sandbox, pid=11)
    runtime.boxes.append(box)

    def exits(method: str, request: Message) -> None:
        if method == "ContainerStatus" and box.state == cri.CONTAINER_RUNNING:
            box.state, box.exit_code = cri.CONTAINER_EXITED, 9
            if removed:
                runtime.boxes.clear()

    runtime.hook = exits
    found = await look(runtime, node)
    assert found.pod is not None and found.running is None
    assert (found.ended is None) if removed else (found.ended is not None and found.ended.code == 9)


async def test_a_process_that_ends_before_it_is_read_is_looked_at_again(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node
) -> None:
    box = Box(FIRST, sandbox, pid=11)
    runtime.boxes.append(box)

    def listed(method: str, request: Message) -> None:
        if method == "ListContainers" and runtime.asked.count(method) == 2:
            box.state, box.reason = cri.CONTAINER_EXITED, "Completed"

    runtime.hook = listed
    found = await look(runtime, node)
    assert found.running is None and found.ended is not None and found.ended.reason == "Completed"


async def test_a_pod_that_goes_while_it_is_looked_at_is_none(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node
) -> None:
    def goes(method: str, request: Message) -> None:
        if method == "PodSandboxStatus":
            runtime.sandboxes.clear()

    runtime.hook = goes
    assert await look(runtime, node) == Found()


async def test_a_state_that_the_runtime_does_not_know_is_not_taken_for_one(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node
) -> None:
    runtime.boxes.append(Box(FIRST, sandbox, state=cri.CONTAINER_UNKNOWN))
    with pytest.raises(ContainersError, match="does not know whether container server of team-a/llama runs"):
        await look(runtime, node)


@pytest.mark.parametrize(
    "info",
    [
        "", "{", "[]", "7", "{}", '{"pid": 0}', '{"pid": -1}', '{"pid": true}', '{"pid": "11"}', '{"pid": 11.0}',
        '{"pid": 99999999999}', "[" * 100_000,
    ],
    ids=lambda info: info[:12],
)  # fmt: skip
async def test_words_without_a_pid_are_told(runtime: SimulatedCri, sandbox: Sandbox, node: Node, info: str) -> None:
    runtime.boxes.append(Box(FIRST, sandbox, pid=11, info=info))
    with pytest.raises(ContainersError, match="does not tell the first process of container aaaaaaaaaaaa"):
        await look(runtime, node)


@pytest.mark.parametrize("id", ["", "..", "../" * 30, "a", "x" * 4000, "a b" * 10])
async def test_an_id_that_is_none_is_refused(runtime: SimulatedCri, sandbox: Sandbox, node: Node, id: str) -> None:
    runtime.boxes.append(Box(id, sandbox, pid=11))
    with pytest.raises(ContainersError, match="which is none"):
        await look(runtime, node)


@pytest.mark.parametrize("ip", ["not an address", "10.0.0.256", "a" * 100_000])
async def test_an_address_that_is_none_is_left_out(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node, ip: str
) -> None:
    sandbox.ip = ip
    found = await look(runtime, node)
    assert found.pod is not None and found.pod.address == ""


async def test_an_answer_without_end_is_refused(runtime: SimulatedCri, sandbox: Sandbox, node: Node) -> None:
    sandbox.annotations = {"x": "a" * (17 * 1024 * 1024)}
    with pytest.raises(ContainersError, match="RESOURCE_EXHAUSTED"):
        await look(runtime, node)


@pytest.mark.parametrize("method", ["ListPodSandbox", "ListContainers", "PodSandboxStatus", "ContainerStatus"])
async def test_a_slow_answer_has_a_deadline(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.boxes.append(Box(FIRST, sandbox, pid=11))
    runs(node, FIRST, 11)
    runtime.hook = lambda asked, request: asyncio.sleep(60) if asked == method else None
    asking = Containers(runtime.socket, node.proc, node.mounted)
    monkeypatch.setattr(asking, "_cri", Cri(runtime.socket, seconds=0.2))
    with pytest.raises(ContainersError, match=f"does not answer {method} on .* within"):
        await asking.look(NAMESPACE, POD, CONTAINER, UID)


async def test_a_look_has_a_deadline_of_its_own(
    runtime: SimulatedCri, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.2)
    runtime.hook = lambda asked, request: asyncio.sleep(60)
    began = time.monotonic()
    with pytest.raises(ContainersError, match="did not say within 0 s"):
        await look(runtime, node)
    assert time.monotonic() - began < 3


async def test_a_runtime_that_is_away_is_told_and_found_again(
    runtime: SimulatedCri, sandbox: Sandbox, node: Node
) -> None:
    asking = Containers(runtime.socket, node.proc, node.mounted)
    await runtime.stop()
    with pytest.raises(ContainersError, match="UNAVAILABLE"):
        await asking.look(NAMESPACE, POD, CONTAINER)
    await runtime.start()
    assert (await asking.look(NAMESPACE, POD, CONTAINER)).pod is not None


@given(answer=st.binary(max_size=200))
@settings(max_examples=40, deadline=None)
def test_any_bytes_for_an_answer_are_told_or_make_sense(
    answer: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def run() -> None:
        socket = tmp_path_factory.mktemp("cri") / "s"
        server = await serve(socket, [Answers(answer)])
        try:
            found = await Containers(socket).look(NAMESPACE, POD, CONTAINER)
            assert found.running is None
        except ContainersError:
            pass
        finally:
            await server.stop(grace=0)

    asyncio.run(run())


class Answers(grpc.GenericRpcHandler):
    """To whatever is asked, with these bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def answers(request: bytes, context: object) -> bytes:
            return self._answer

        serves: Callable[..., grpc.RpcMethodHandler[bytes, bytes]] = grpc.unary_unary_rpc_method_handler
        return serves(answers)
