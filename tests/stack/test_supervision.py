"""The supervisor: starts in order, restarts, and ends what it started and nothing else. Real processes, no services."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stack import Probe, ProcessSpec, Stack, StackError, UpOptions
from stack.proc import alive, start_time
from stack.process import start_order
from stack.progress import Silent
from tests.stack.outside import Outside

SLEEP = (sys.executable, "-c", "import time; time.sleep(1000)")


def wait_for(condition: Callable[[], object], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def server(port: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port))


# ---- what is written down


def test_a_spec_survives_the_plan_file() -> None:
    probe = Probe("exec", argv=("true",), ca="a")
    spec = ProcessSpec("a", ("x", "y"), {"A": "1"}, ("b",), (probe,), 7, "/", 3.0, ("true",))
    assert ProcessSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_plan_of_another_version_can_still_be_read() -> None:
    written = ProcessSpec("a", ("x",)).to_json() | {"of_the_future": 1}
    del written["before"]
    assert ProcessSpec.from_json(written) == ProcessSpec("a", ("x",))


def test_start_order_follows_what_each_waits_for() -> None:
    specs = [ProcessSpec("c", (), after=("b",)), ProcessSpec("b", (), after=("a",)), ProcessSpec("a", ())]
    assert [spec.name for spec in start_order(specs)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="waits for itself"):
        start_order([ProcessSpec("a", (), after=("b",)), ProcessSpec("b", (), after=("a",))])
    with pytest.raises(ValueError, match="not in the plan"):
        start_order([ProcessSpec("a", (), after=("b",))])


async def test_probes(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" if b"/good" in line else b"HTTP/1.1 500 No\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        assert await Probe("tcp", f"127.0.0.1:{port}").passes()
        assert await Probe("http", f"http://127.0.0.1:{port}/good").passes()
        assert not await Probe("http", f"http://127.0.0.1:{port}/bad").passes()
    assert not await Probe("tcp", f"127.0.0.1:{port}").passes()
    assert not await Probe("http", f"http://127.0.0.1:{port}/good").passes()
    assert not await Probe("file", str(tmp_path / "f")).passes()
    (tmp_path / "f").touch()
    assert await Probe("file", str(tmp_path / "f")).passes()
    assert await Probe("exec", argv=("true",)).passes()
    assert not await Probe("exec", argv=("false",)).passes()
    assert not await Probe("exec", argv=("sleep", "10")).passes(timeout=0.1)


# ---- what runs


def test_a_killed_process_is_back_within_a_second_on_its_port(light: Stack) -> None:
    port = light.port("web")
    light.add_process("web", server(port), ready=[Probe("http", f"http://127.0.0.1:{port}/")], port=port)
    for _ in range(2):
        began = time.monotonic()
        new = light.wait_restarted("web", light.kill("web"))
        assert time.monotonic() - began < 2.5  # a second, and what an interpreter takes to start on a busy machine
        assert light.pid("web") == new
    assert light.process("web").restarts == 2
    assert light.process("web").port == port
    assert "SIGKILL" in light.process("web").last_exit
    assert light.port("web") == port


def test_down_ends_only_what_up_started_and_may_be_repeated(light: Stack) -> None:
    mine = light.add_process("mine", SLEEP)
    with subprocess.Popen(SLEEP) as bystander:
        try:
            assert light.down()
            wait_for(lambda: start_time(mine) is None)
            assert not light.running
            assert not light.down()
            assert bystander.poll() is None, "down ended a stranger"
        finally:
            bystander.kill()
    assert [status.state for status in light.status()] == ["stopped"]


def test_down_does_not_signal_a_stranger_that_got_the_supervisors_process_id(light: Stack) -> None:
    own = json.loads(light.layout.supervisor.read_text())
    light.down()
    with subprocess.Popen(SLEEP) as stranger:
        try:
            light.layout.supervisor.write_text(json.dumps(own | {"pid": stranger.pid}))
            assert not light.down()
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_the_children_die_with_a_killed_supervisor_and_up_starts_anew(light: Stack, outside: Outside) -> None:
    child = light.add_process("child", SLEEP)
    own = json.loads(light.layout.supervisor.read_text())
    os.kill(own["pid"], signal.SIGKILL)
    wait_for(lambda: start_time(child) is None)
    wait_for(lambda: not light.running)  # a child may be gone before the last of its parent is
    assert [status.state for status in light.status()] == ["stopped"]
    options = outside.options
    light.up(options)
    assert light.running


def test_a_process_that_ignores_sigterm_is_killed(light: Stack) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(1000)"
    )
    pid = light.add_process("deaf", (sys.executable, "-c", code), stop_timeout=0.5)
    wait_for(lambda: "on" in light.log_file("deaf").read_text())
    light.remove_process("deaf")
    assert start_time(pid) is None
    assert "deaf did not end within" in light.log_file("supervisor").read_text()


def test_processes_start_in_order_and_end_in_reverse(light: Stack, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    code = (
        "import signal, sys, time\n"
        "def say(text): open(sys.argv[1], 'a').write(text + sys.argv[2] + '\\n')\n"
        "def end(*_): time.sleep(0.2); say('-'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); say('+'); open(sys.argv[3], 'w').close(); time.sleep(1000)"
    )
    for name, after in (("a", ()), ("b", ("a",)), ("c", ("b",))):
        ready = tmp_path / name
        argv = (sys.executable, "-c", code, str(trace), name, str(ready))
        light.add_process(name, argv, ready=[Probe("file", str(ready))], after=after)
    light.down()
    assert trace.read_text().split() == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_many_restarts_of_long_ago_are_not_held_against_a_process(light: Stack) -> None:
    light.add_process("often", SLEEP)
    for _ in range(5):
        light.wait_restarted("often", light.kill("often"))
    light.kill("often")
    light.wait_ready(["often"])


def test_what_never_becomes_ready_is_reported_with_the_end_of_its_log(light: Stack) -> None:
    code = "print('the reason', flush=True); raise SystemExit(3)"
    with pytest.raises(StackError, match=r"(?s)broken ended with code 3.*the reason.*whole log is"):
        light.add_process("broken", (sys.executable, "-c", code), ready=[Probe("tcp", "127.0.0.1:1")], timeout=20)
    assert light.process("broken").restarts >= 1
    light.remove_process("broken")
    with pytest.raises(StackError, match="no process broken"):
        light.process("broken")


def test_a_program_that_does_not_exist_is_reported(light: Stack) -> None:
    with pytest.raises(StackError, match=r"(?s)could not be started: .*No such file"):
        light.add_process("ghost", ("/no/such/program",), timeout=20)


def test_changing_one_process_leaves_the_others_alone(light: Stack) -> None:
    first = light.add_process("first", SLEEP)
    light.add_process("second", SLEEP)
    changed = light.add_process("second", SLEEP, {"A": "1"})
    assert light.pid("first") == first
    assert light.pid("second") == changed
    light.remove_process("second")
    assert [status.name for status in light.status()] == ["first"]


def test_up_starts_a_changed_process_anew_and_says_so(light: Stack, outside: Outside) -> None:
    class Told(Silent):
        def __init__(self) -> None:
            self.names: list[str] = []

        def finish(self, name: str, detail: str) -> None:
            self.names.append(name)

    def up(code: str) -> tuple[list[str], int, int]:
        told = Told()
        specs = [ProcessSpec("same", SLEEP), ProcessSpec("worker", SLEEP, {"BERTH_CODE": code})]
        light.up(outside.options, told, lambda endpoints: specs)
        return told.names, light.pid("same"), light.pid("worker")

    _, same, worker = up("1")
    assert up("1") == ([], same, worker)
    names, still, fresh = up("2")
    assert names == ["worker"]
    assert still == same
    assert fresh != worker


def _up(root: Path, options: UpOptions) -> None:
    Stack(root).up(options)


def test_a_stack_whose_data_folder_was_removed_ends(light: Stack) -> None:
    child = light.add_process("child", SLEEP)
    shutil.rmtree(light.layout.root)
    wait_for(lambda: start_time(child) is None)
    assert not light.down()


def test_two_ups_at_once_make_one_stack(tmp_path: Path, outside: Outside) -> None:
    options = outside.options
    quiet = UpOptions(cluster=options.cluster, temporal=options.temporal)
    spawn = multiprocessing.get_context("spawn")
    ups = [spawn.Process(target=_up, args=(tmp_path / "data", quiet)) for _ in range(3)]
    for each in ups:
        each.start()
    for each in ups:
        each.join(60)
    stack = Stack(tmp_path / "data")
    try:
        assert [each.exitcode for each in ups] == [0, 0, 0]
        log = stack.log_file("supervisor").read_text()
        assert log.count("plan ") == 1, "the second and third found everything as they wanted it"
    finally:
        stack.down()


def _up_and_wait(root: Path, options: UpOptions) -> None:
    stack = Stack(root)
    stack.up(options)
    stack.add_process("child", SLEEP)
    time.sleep(1000)


def test_a_stack_ends_with_its_caller(tmp_path: Path, outside: Outside) -> None:
    options = outside.options
    caller = multiprocessing.get_context("spawn").Process(target=_up_and_wait, args=(tmp_path / "data", options))
    caller.start()
    stack = Stack(tmp_path / "data")
    wait_for(lambda: stack.layout.plan.is_file() and any(each.ready for each in stack.status()))
    child, started = stack.process("child").pid, stack.process("child").started
    assert child is not None
    assert started is not None
    caller.kill()
    caller.join()
    wait_for(lambda: not stack.running)
    assert not alive(child, started)


def test_logs_stay_bounded(light: Stack) -> None:
    code = "import time\nwhile True: print('x' * 1000000, flush=True); time.sleep(0.02)"
    light.add_process("chatter", (sys.executable, "-c", code), stop_timeout=0.2)
    log = light.log_file("chatter")
    old = log.with_suffix(".log.1")
    wait_for(old.is_file, timeout=30)
    light.kill("chatter", signal.SIGSTOP)
    wait_for(lambda: log.stat().st_size <= 16 * 1024 * 1024)
    assert old.stat().st_size == 16 * 1024 * 1024
    light.remove_process("chatter")
