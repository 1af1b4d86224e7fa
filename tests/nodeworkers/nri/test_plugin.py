"""The NRI plugin against a simulated containerd: it grants and refuses, is never late, and comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.nri import wire
from nodeworkers.nri.plugin import INDEX, NAME, Plugin, Status, takes_arguments
from nodeworkers.nri.session import (
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    PLUGIN_SERVICE,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
)
from nodeworkers.nri.values import (
    Adjustment,
    Container,
    Happening,
    Pod,
    Refused,
    Removed,
    Started,
    State,
    Stopped,
    Synchronized,
)
from nodeworkers.rpc import nri_pb2 as nri
from nodeworkers.rpc import ttrpc_pb2 as ttrpc
from planning.devices.offers import Mount
from tests.nodeworkers.nri.simulated_runtime import (
    POD,
    CallError,
    Connection,
    SimulatedRuntime,
    container,
    simulated_runtime,
)

BUSY = "Seat kyb-G01-s1 is not granted: berth is too busy to say when. It is asked again."


class Ledger:
    """Decides as it is told to, and remembers what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Pod, Container]] = []
        self.happened: list[Happening] = []
        self.answer: Callable[[], Adjustment] = Adjustment
        self.hangs = False

    async def decide(self, seat: str, pod: Pod, container: Container) -> Adjustment:
        self.asked.append((seat, pod, container))
        if self.hangs:
            await asyncio.Event().wait()
        return self.answer()


def refuse() -> Adjustment:
    raise Refused("Seat kyb-G01-s1 waits for the slot.")


def fail() -> Adjustment:
    raise RuntimeError("the ledger is locked")


async def until(holds: Callable[[], object], what: str, seconds: float = 15) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, f"not in {seconds} s: {what}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(plugin: Plugin) -> AsyncIterator[None]:
    task = asyncio.ensure_future(plugin.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def connected(folder: Path, ledger: Ledger) -> AsyncIterator[tuple[Plugin, Connection, SimulatedRuntime]]:
    async with simulated_runtime(folder) as runtime:
        plugin = Plugin(ledger.decide, ledger.happened.append, socket=runtime.socket)
        async with running(plugin):
            connection = await runtime.plugin()
            await connection.begin()
            yield plugin, connection, runtime


async def test_it_registers_and_wants_few_events(tmp_path: Path) -> None:
    ledger = Ledger()
    async with simulated_runtime(tmp_path) as runtime:
        plugin = Plugin(ledger.decide, ledger.happened.append, socket=runtime.socket)
        assert not plugin.status.connected
        async with running(plugin):
            connection = await runtime.plugin()
            configured = await connection.begin(container(), pods=(POD,))
            registered = connection.registered.result()
            assert (registered.plugin_name, registered.plugin_idx) == (NAME, INDEX)
            events = {event for event in range(1, nri.LAST) if configured.events >> (event - 1) & 1}
            assert events == {nri.CREATE_CONTAINER, nri.START_CONTAINER, nri.STOP_CONTAINER, nri.REMOVE_CONTAINER}
            await until(lambda: ledger.happened, "it is told what runs")
            status = plugin.status
            assert (status.connected, status.sets_args, status.message) == (True, True, "")
            assert status.runtime == "containerd v2.3.7"
        assert plugin.status == Status(False, "berth's NRI plugin was stopped")
    (told,) = ledger.happened
    assert isinstance(told, Synchronized)
    ((pod, one),) = told.containers
    assert pod == Pod(
        "sandbox-1", "uid-1", "team-a", "llama", {"app": "llama"}, {"kyb.ai/port": "80"}, ips=("10.0.0.7",)
    )
    assert (one.pid, one.state, one.cgroup, one.args) == (4001, State.RUNNING, "/pods/1", ("vllm", "serve"))


async def test_a_seat_that_is_granted_gets_what_the_ledger_gives_it(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.answer = lambda: Adjustment(
        mounts=(Mount("/host/seat-init", "/inside"), Mount("/host/rw", "/rw", read_only=False)),
        env={"A": "b"},
        args=("/inside", "vllm", "serve"),
        annotations={"kyb.ai/granted": "7"},
    )
    async with connected(tmp_path, ledger) as (_, connection, _runtime):
        adjustment = await connection.create(container())
    assert list(adjustment.args) == ["", "/inside", "vllm", "serve"], "a first that is empty overrules other plugins"
    assert [(mount.source, mount.destination, list(mount.options)) for mount in adjustment.mounts] == [
        ("/host/seat-init", "/inside", ["bind", "nosuid", "nodev", "ro"]),
        ("/host/rw", "/rw", ["bind", "nosuid", "nodev", "rw"]),
    ]
    assert [(pair.key, pair.value) for pair in adjustment.env] == [("A", "b")]
    assert adjustment.annotations == {"kyb.ai/granted": "7"}
    ((seat, pod, asked),) = ledger.asked
    assert (seat, pod.uid, asked.name) == ("kyb-G01-s1", "uid-1", "server")


async def test_a_seat_that_is_not_granted_is_refused_with_the_ledgers_sentence(tmp_path: Path) -> None:
    ledger = Ledger()
    async with connected(tmp_path, ledger) as (_, connection, _runtime):
        ledger.answer = refuse
        with pytest.raises(CallError, match=r"^Seat kyb-G01-s1 waits for the slot\.$") as refused:
            await connection.create(container())
        assert refused.value.code == FAILED_PRECONDITION
        ledger.answer = Adjustment
        assert not (await connection.create(container())).args


async def test_containers_without_a_seat_are_nobodys_business(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.answer = refuse
    async with connected(tmp_path, ledger) as (_, connection, _runtime):
        for each in (container(seat=""), nri.Container(), nri.Container(env=["KYB_GPU_SEATS=x", "KYB_GPU_SEAT="])):
            assert await connection.create(each) == nri.ContainerAdjustment()
    assert not ledger.asked


async def test_the_founders_lookup_says_who_has_a_seat(tmp_path: Path) -> None:
    ledger = Ledger()

    def seat_of(pod: Pod, container: Container) -> str | None:
        if container.name == "broken":
            raise KeyError(container.name)
        return "kyb-G23-s4" if (pod.uid, container.name) == ("uid-1", "server") else None

    async with simulated_runtime(tmp_path) as runtime:
        plugin = Plugin(ledger.decide, ledger.happened.append, socket=runtime.socket, seat_of=seat_of)
        async with running(plugin):
            connection = await runtime.plugin()
            await connection.begin()
            await connection.create(container(seat=""))
            await connection.create(container(name="sidecar"))
            await connection.create(container(name="broken", seat="kyb-G01-s9"))
            await connection.create(container(name="broken", seat=""))
    assert [seat for seat, _, _ in ledger.asked] == ["kyb-G23-s4", "kyb-G01-s9"]


# --- never late ---


async def test_a_ledger_that_hangs_is_a_refusal_in_time(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.hangs = True
    async with connected(tmp_path, ledger) as (_, connection, _runtime):
        began = time.monotonic()
        with pytest.raises(CallError) as refused:
            await connection.create(container())
        assert str(refused.value) == BUSY
        assert time.monotonic() - began < 1.8
        await connection.create(container(seat=""))
        ledger.hangs = False
        await connection.create(container())


async def test_a_node_process_that_is_stuck_is_a_refusal_in_time_and_others_pass(tmp_path: Path) -> None:
    """The runtime is in a loop of its own, as containerd is in a process of its own."""
    ledger, answers = Ledger(), list[tuple[float, str]]()
    loop_there = asyncio.Event()

    def stuck(plugin: Plugin) -> None:
        async def there() -> None:
            async with simulated_runtime(tmp_path) as runtime:
                connection = await runtime.plugin()
                await connection.begin()
                main.call_soon_threadsafe(loop_there.set)
                await asyncio.sleep(0.2)  # by now the other loop is stuck
                began = time.monotonic()
                with pytest.raises(CallError) as refused:
                    await connection.create(container())
                answers.append((time.monotonic() - began, str(refused.value)))
                await connection.create(container(seat=""))
                answers.append((time.monotonic() - began, ""))

        asyncio.run(there())

    main = asyncio.get_running_loop()
    plugin = Plugin(ledger.decide, ledger.happened.append, socket=tmp_path / "nri.sock")
    async with running(plugin):
        runtime = asyncio.ensure_future(asyncio.to_thread(stuck, plugin))
        await loop_there.wait()
        began = time.monotonic()
        while time.monotonic() - began < 2.5 and len(answers) < 2:
            time.sleep(0.01)  # noqa: ASYNC251 - nothing else runs in this loop
        assert len(answers) == 2, "both were answered while nothing ran here"
        await runtime
    assert answers[0][1] == BUSY
    assert answers[1][0] < 1.8


async def test_a_ledger_that_fails_refuses_that_container_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger()
    async with connected(tmp_path, ledger) as (plugin, connection, _):
        ledger.answer = fail
        with pytest.raises(CallError, match=r"berth failed \(RuntimeError\)\. See its log") as refused:
            await connection.create(container())
        assert refused.value.code == FAILED_PRECONDITION
        await connection.create(container(seat=""))
        assert plugin.status.connected
    assert "the ledger is locked" in caplog.text


async def test_one_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    ledger = Ledger()
    async with connected(tmp_path, ledger) as (_, connection, _runtime):
        ledger.hangs = True
        slow = [asyncio.ensure_future(connection.create(container(number=number))) for number in range(20)]
        await until(lambda: len(ledger.asked) == 20, "all are under way")
        ledger.hangs = False
        await connection.create(container())
        assert not any(each.done() for each in slow)
        assert {str(each) for each in await asyncio.gather(*slow, return_exceptions=True)} == {BUSY}


# --- what happens ---


async def test_it_tells_what_happens_in_its_order(tmp_path: Path) -> None:
    ledger = Ledger()
    async with connected(tmp_path, ledger) as (_, connection, _runtime):
        ended = container()
        ended.state, ended.exit_code = nri.CONTAINER_STOPPED, 137
        calls = [
            ("StartContainer", nri.StartContainerRequest(pod=POD, container=container()), nri.StartContainerResponse),
            ("StopContainer", nri.StopContainerRequest(pod=POD, container=ended), nri.StopContainerResponse),
            ("RemoveContainer", nri.RemoveContainerRequest(pod=POD, container=ended), nri.RemoveContainerResponse),
        ]
        await asyncio.gather(*(connection.call(*each) for each in calls))
        for event in (nri.START_CONTAINER, nri.REMOVE_CONTAINER, nri.POST_START_CONTAINER, nri.RUN_POD_SANDBOX):
            change = nri.StateChangeEvent(event=event, pod=POD, container=container(number=2))
            await connection.call("StateChange", change, nri.Empty)
        await until(lambda: len(ledger.happened) == 6, "all of it")
    kinds = [type(each) for each in ledger.happened]
    assert kinds == [Synchronized, Started, Stopped, Removed, Started, Removed]
    assert isinstance(ledger.happened[2], Stopped) and ledger.happened[2].container.exit_code == 137


async def test_what_runs_may_come_in_several_messages(tmp_path: Path) -> None:
    ledger = Ledger()
    async with simulated_runtime(tmp_path) as runtime:
        plugin = Plugin(ledger.decide, ledger.happened.append, socket=runtime.socket)
        async with running(plugin):
            connection = await runtime.plugin()
            await connection.registered
            await connection.call("Configure", nri.ConfigureRequest(runtime_name="containerd"), nri.ConfigureResponse)
            for number, more in ((1, True), (2, True), (3, False)):
                request = nri.SynchronizeRequest(
                    pods=[POD] if more else [], containers=[container(number=number)], more=more
                )
                assert (await connection.call("Synchronize", request, nri.SynchronizeResponse)).more == more
                assert plugin.status.connected != more
            assert not plugin.status.sets_args and "2.2 is needed" in plugin.status.message
            await until(lambda: ledger.happened, "it is told")
    (told,) = ledger.happened
    assert isinstance(told, Synchronized)
    assert [each.id for _, each in told.containers] == ["container-1", "container-2", "container-3"]


@pytest.mark.parametrize(
    ("name", "version", "takes"),
    [
        ("containerd", "v2.3.7", True),
        ("containerd", "2.2.0", True),
        ("containerd", "v3.0.0-beta.1", True),
        ("containerd", "v2.1.5", False),
        ("containerd", "1.7.28", False),
        ("containerd", "", False),
        ("cri-o", "1.34.0", False),
    ],
)
def test_which_runtimes_take_command_lines(name: str, version: str, takes: bool) -> None:
    assert takes_arguments(name, version) is takes


# --- coming back ---


async def test_it_comes_back_when_the_runtime_does(tmp_path: Path) -> None:
    ledger = Ledger()
    async with connected(tmp_path, ledger) as (plugin, connection, runtime):
        for _ in range(2):
            await runtime.stop()
            await until(lambda: not plugin.status.connected, "it has noticed")
            assert str(runtime.socket) in plugin.status.message
            await runtime.start()
            connection = await runtime.plugin()
            await connection.begin()
            assert plugin.status.connected
            await connection.create(container())
    assert len(ledger.asked) == 2 and sum(isinstance(each, Synchronized) for each in ledger.happened) == 3


async def test_it_says_that_there_is_no_nri(tmp_path: Path) -> None:
    plugin = Plugin(Ledger().decide, lambda _: None, socket=tmp_path / "nri.sock")
    async with running(plugin):
        await until(lambda: "disables NRI" in plugin.status.message, "no socket")
        async with simulated_runtime(tmp_path) as runtime:
            await (await runtime.plugin()).begin()
            assert (plugin.status.connected, plugin.status.message) == (True, "")


async def test_it_says_that_it_was_refused_and_tries_again(tmp_path: Path) -> None:
    async with simulated_runtime(tmp_path) as runtime:
        runtime.accepts = ttrpc.Status(code=2, message="invalid plugin index")
        plugin = Plugin(Ledger().decide, lambda _: None, socket=runtime.socket)
        async with running(plugin):
            await until(lambda: "refused the registration: invalid plugin index" in plugin.status.message, "refused")
            await runtime.plugin()
            await runtime.plugin()


@pytest.mark.parametrize(
    ("sent", "said"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "What answers is no NRI"), (b"", "containerd closed the connection")],
)
async def test_it_says_what_was_wrong_with_a_connection(tmp_path: Path, sent: bytes, said: str) -> None:
    async with simulated_runtime(tmp_path) as runtime:
        plugin = Plugin(Ledger().decide, lambda _: None, socket=runtime.socket)
        async with running(plugin):
            connection = await runtime.plugin()
            await connection.registered
            connection.writer.write(sent)
            connection.writer.close()
            await until(lambda: said in plugin.status.message, said)
            await (await runtime.plugin()).begin()


async def test_it_ends_when_it_is_cancelled_also_before_it_began(tmp_path: Path) -> None:
    ledger = Ledger()
    for wait in (0.0, 0.0, 0.05, 0.3):
        plugin = Plugin(ledger.decide, ledger.happened.append, socket=tmp_path / "nri.sock")
        task = asyncio.ensure_future(plugin.run())
        await asyncio.sleep(wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# --- what nobody sends ---


async def test_requests_that_cannot_be_served_are_answered(tmp_path: Path) -> None:
    ledger = Ledger()

    def request(method: str, payload: bytes = b"", service: str = PLUGIN_SERVICE) -> bytes:
        return ttrpc.Request(service=service, method=method, payload=payload).SerializeToString()

    async with connected(tmp_path, ledger) as (plugin, connection, _):
        for data, flags, code in (
            (b"\xff\xff", 0, INVALID_ARGUMENT),
            (request("CreateContainer", b"\xff"), 0, INVALID_ARGUMENT),
            (request("Synchronize", b"\x0a\x05a"), 0, INVALID_ARGUMENT),
            (request("UpdateContainer"), 0, UNIMPLEMENTED),
            (request("Configure", service="nri.Other"), 0, UNIMPLEMENTED),
            (request("Configure"), wire.REMOTE_OPEN, UNIMPLEMENTED),
        ):
            assert (await connection.raw(data, flags)).status.code == code
        ledger.answer = lambda: Adjustment(env={"A": "x" * (wire.MOST_DATA + 1)})
        with pytest.raises(CallError) as error:
            await connection.create(container())
        assert error.value.code == RESOURCE_EXHAUSTED
        ledger.answer = lambda: Adjustment(env={"A": "\ud800"})
        with pytest.raises(CallError) as error:
            await connection.create(container())
        assert error.value.code == INTERNAL
        ledger.answer = Adjustment
        assert plugin.status.connected
        await connection.create(container())


payloads = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda method, payload: ttrpc.Request(
            service=PLUGIN_SERVICE, method=method, payload=payload
        ).SerializeToString(),
        st.sampled_from(["Configure", "Synchronize", "CreateContainer", "StartContainer", "StateChange", "Shutdown"]),
        st.binary(max_size=200),
    ),
)
hostile = st.lists(
    st.one_of(
        st.builds(
            wire.packed,
            st.sampled_from([0, wire.PLUGIN, wire.RUNTIME, 9]),
            st.builds(wire.Frame, st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(0, 7), payloads),
        ),
        st.binary(max_size=40),
    ),
    max_size=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=hostile)
async def test_whatever_a_socket_sends_the_plugin_lives_on(tmp_path: Path, sent: list[bytes]) -> None:
    ledger = Ledger()
    async with simulated_runtime(tmp_path) as runtime:
        plugin = Plugin(ledger.decide, ledger.happened.append, socket=runtime.socket)
        async with running(plugin):
            hostile_one = await runtime.plugin()
            for each in sent:
                hostile_one.writer.write(each)
            await asyncio.sleep(0)
            hostile_one.writer.close()
            connection = await runtime.plugin()
            await connection.begin()
            await connection.create(container())
            assert plugin.status.connected


@given(st.text(max_size=2000))
def test_a_refusal_is_one_line_that_a_status_can_hold(text: str) -> None:
    said = str(Refused(text))
    assert len(said) <= 500 and "\n" not in said and said.isprintable()
