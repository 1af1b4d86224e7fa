"""seat-init: as if it were the program that it runs, until the node orders otherwise."""

from __future__ import annotations

import os
import platform
import pty
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.nri import seat_init
from tests.nodeworkers.nri.seat_init_rig import AS_FIRST, Held, alive, children, descendants, eventually, name
from tests.nodeworkers.nri.stepping import CLONE, WAIT4, at_entry

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
Run = Callable[..., Held]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
BOTH = [pytest.param((), id="beside-others"), pytest.param(AS_FIRST, id="as-first", marks=as_root)]
only_here = pytest.mark.skipif(platform.machine() != "x86_64", reason="ptrace is used as on x86-64")
SERVER = 'echo $$ >> $LOG; trap "echo ended >> $LOG; exit 7" TERM; while :; do sleep 0.05; done'
STUBBORN = 'trap "echo told >> $LOG" TERM; echo $$ >> $LOG; while :; do sleep 0.05; done'


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("seat-init") / "seat-init"
    seat_init.build(target)
    return target


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Iterator[Run]:
    """Starts one, by default with the order to run."""
    running: list[Held] = []

    def start(*arguments: str, order: Callable[[Path], None] | None = seat_init.run, **options: object) -> Held:
        (tmp_path / "slot").mkdir(exist_ok=True)
        if order is not None:
            order(tmp_path / "slot")
        running.append(Held(program, tmp_path, arguments, **options))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for each in running:
        each.end()


def test_it_is_small_static_and_needs_nothing(program: Path) -> None:
    assert program.stat().st_size < 20_000
    assert b"ld-linux" not in program.read_bytes()


def test_a_machine_without_a_compiler_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(seat_init.SeatInitError, match="Install gcc or clang"):
        seat_init.build(tmp_path / "seat-init", compiler="no-such-compiler")
    with pytest.raises(seat_init.SeatInitError, match="false says"):
        seat_init.build(tmp_path / "seat-init", compiler="false")
    assert not list(tmp_path.iterdir())


def test_a_new_build_takes_nothing_from_those_who_run_the_one_before(tmp_path: Path) -> None:
    seat_init.build(tmp_path / "seat-init")
    with (tmp_path / "seat-init").open("rb") as before:
        seat_init.build(tmp_path / "seat-init")
        assert before.read(4) == b"\x7fELF"
        assert os.fstat(before.fileno()).st_nlink == 0


# --- as if it were the program ---


@pytest.mark.parametrize("before", BOTH)
@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_its_status_is_the_programs(run: Run, code: int, before: tuple[str, ...]) -> None:
    assert run("sh", "-c", f"exit {code}", before=before).ended() == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_program_that_a_signal_ended_is_128_and_the_signal(run: Run, number: int) -> None:
    assert run("sh", "-c", f"kill -{int(number)} $$").ended() == 128 + number


def test_arguments_and_environment_arrive_as_they_are(run: Run) -> None:
    held = run("sh", "-c", 'printf "%s|" "$@" "$A" "$(pwd)" > $LOG', "sh", "", "two words", "-x", env={
        "PATH": "/bin:/usr/bin", "LOG": "log", "A": "b=c"})  # fmt: skip
    assert held.ended() == 0
    assert held.log.read_text() == f"|two words|-x|b=c|{held.log.parent}|"


@pytest.mark.parametrize("before", BOTH)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGRTMIN + 3])
def test_signals_reach_the_program(run: Run, number: int, before: tuple[str, ...]) -> None:
    name = int(number)
    held = run("sh", "-c", f'trap "exit 9" {name}; echo up >> $LOG; while :; do sleep 0.05; done', before=before)
    held.until_lines(1)
    os.kill(held.pid, number)
    assert held.ended() == 9


def test_a_program_begins_with_the_signals_that_seat_init_began_with(run: Run, tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        held = run("cp", "/proc/self/status", str(tmp_path / "log"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert held.ended() == 0
    assert f"SigBlk:\t{1 << signal.SIGUSR2 - 1:016x}" in held.lines()


@pytest.mark.parametrize("before", BOTH)
def test_orphans_are_waited_for(run: Run, before: tuple[str, ...]) -> None:
    held = run(
        "sh", "-c", "for i in 1 2 3 4 5; do (sleep 0.1 & ) ; done; echo up >> $LOG; exec sleep 100", before=before
    )
    held.until_lines(1)
    pid = held.pid
    eventually(lambda: len(children(pid)) == 1, "only the program is left")


@as_root
def test_processes_that_the_program_leaves_end_with_it(run: Run) -> None:
    held = run("sh", "-c", "sleep 100 & echo $! >> $LOG; exit 4", before=AS_FIRST)
    assert held.ended() == 4
    assert not descendants(held.process.pid)


def test_a_terminals_interrupt_is_for_the_program_alone(run: Run) -> None:
    main, terminal = pty.openpty()
    try:
        held = run(
            "sh", "-c", 'trap "echo once >> $LOG" INT; echo up >> $LOG; for i in 1 2 3 4; do sleep 0.1; done; exit 5',
            before=("setsid", "--ctty", "--wait"), stdin=terminal,
        )  # fmt: skip
        held.until_lines(1)
        os.write(main, b"\x03")
        assert held.ended() == 5
        assert held.lines() == ["up", "once"]
    finally:
        os.close(main)
        os.close(terminal)


# --- finding the program ---


def script(path: Path, mode: int = 0o755, text: str = "#!/bin/sh\nexit 6\n") -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_program_is_found_by_path_and_relative_to_the_working_folder(run: Run, tmp_path: Path) -> None:
    script(tmp_path / "first" / "server", 0o644)  # not executable: the next one is taken
    script(tmp_path / "second" / "server")
    env = {"PATH": f"/no/such/folder:{tmp_path}/first::{tmp_path}/second"}
    assert run("server", env=env).ended() == 6
    assert run("./second/server", env=env).ended() == 6
    assert run(str(tmp_path / "second" / "server"), env={}).ended() == 6


@pytest.mark.parametrize(
    ("program_", "status", "said"),
    [
        ("nonesuch", 127, 'exec: "nonesuch": executable file not found in $PATH'),
        ("./nonesuch", 127, 'exec: "./nonesuch": no such file or directory'),
        ("/etc/passwd/x", 127, 'exec: "/etc/passwd/x": not a directory'),
        ("/etc/passwd", 126, 'exec: "/etc/passwd": permission denied'),
        ("./empty", 126, 'exec: "./empty": exec format error'),
        ("", 127, 'exec: "": executable file not found in $PATH'),
        ("here", 127, 'exec: "here": executable file not found in $PATH'),
    ],
)
def test_a_program_that_cannot_be_run_ends_the_container_with_a_reason(
    run: Run, tmp_path: Path, program_: str, status: int, said: str
) -> None:
    script(tmp_path / "empty", text="\0\0")
    script(tmp_path / "here")  # in the working folder, which PATH must not mean
    held = run(program_, env={"PATH": ".::/usr/bin:/bin"})
    assert held.ended() == status
    assert said in held.said()


def test_without_a_path_nothing_is_found(run: Run) -> None:
    assert run("sh", env={}).ended() == 127


def test_without_arguments_it_says_how_it_is_used(program: Path) -> None:
    result = subprocess.run([program, "/tmp"], capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "usage" in result.stderr


# --- orders ---


@pytest.mark.parametrize("before", BOTH)
def test_a_server_ends_by_order_and_starts_anew(run: Run, before: tuple[str, ...]) -> None:
    held = run("sh", "-c", SERVER, before=before)
    first = held.until_lines(1)
    for cycle in range(1, 4):
        seat_init.down(held.orders, 10)
        held.until_alone()
        assert held.until_lines(2 + 3 * (cycle - 1) - (cycle - 1))[-1] == "ended"
        assert held.process.poll() is None
        seat_init.run(held.orders)
        held.until_lines(1 + 2 * cycle)
    assert len({*held.lines()} - {"ended"}) == 4, f"four servers, the first {first}"
    assert "ended with status 7 without its seat" in held.said()
    os.kill(held.pid, signal.SIGTERM)
    assert held.ended() == 7


@pytest.mark.parametrize("before", BOTH)
def test_what_does_not_end_is_killed_with_all_that_it_started(run: Run, before: tuple[str, ...]) -> None:
    nested = f"(setsid sh -c '{STUBBORN}' &); (sh -c '{STUBBORN}' &); {STUBBORN}"
    held = run("sh", "-c", nested, before=before)
    held.until_lines(3)
    theirs = descendants(held.pid)
    assert [name(pid) for pid in theirs].count("sh") == 3
    seat_init.down(held.orders, 1)
    eventually(lambda: "told" in held.lines(), "SIGTERM comes first")
    held.until_alone()
    assert not any(map(alive, theirs))
    assert held.process.poll() is None
    seat_init.run(held.orders)
    eventually(lambda: len(held.lines()) >= 7, "all three anew")


def test_less_patience_counts_at_once(run: Run) -> None:
    held = run("sh", "-c", STUBBORN)
    held.until_lines(1)
    seat_init.down(held.orders, 3600)
    held.until_lines(2)
    seat_init.down(held.orders, 0)
    held.until_alone()


@pytest.mark.parametrize("before", BOTH)
def test_a_stopped_server_ends_too(run: Run, before: tuple[str, ...]) -> None:
    held = run("sh", "-c", SERVER, before=before)
    held.until_lines(1)
    os.kill(held.child(), signal.SIGSTOP)
    seat_init.down(held.orders, 10)
    assert held.until_lines(2)[1] == "ended"
    held.until_alone()


def test_an_order_that_is_taken_back_starts_it_anew_all_the_same(run: Run) -> None:
    held = run(
        "sh", "-c", 'echo up >> $LOG; trap "echo told >> $LOG; sleep 0.3; exit 0" TERM; while :; do sleep 0.05; done'
    )
    held.until_lines(1)
    seat_init.down(held.orders, 10)
    held.until_lines(2)
    seat_init.run(held.orders)
    assert held.until_lines(3) == ["up", "told", "up"]
    assert held.process.poll() is None


@pytest.mark.parametrize("order", [seat_init.hold, lambda orders: seat_init.down(orders, 5)])
def test_nothing_starts_before_it_is_granted(run: Run, order: Callable[[Path], None]) -> None:
    held = run("sh", "-c", SERVER, order=order)
    held.until_said("the seat is not granted yet")
    assert not children(held.pid) and not held.lines()
    seat_init.run(held.orders)
    held.until_lines(1)


def test_nothing_starts_without_an_order(run: Run) -> None:
    held = run("sh", "-c", SERVER, order=None)
    held.until_said("nothing says yet whether the seat is granted")
    for bad in (
        b"",
        b"run",
        b"run\nrun\n",
        b"RUN\n",
        b"down\n",
        b"down -1\n",
        b"down 99999999999999999999\n",
        b"\xff" * 5000,
    ):
        (held.orders / "order").write_bytes(bad)
        time.sleep(0.02)
    assert not held.lines() and held.process.poll() is None
    seat_init.run(held.orders)
    held.until_lines(1)


@pytest.mark.parametrize("before", BOTH)
def test_a_server_that_dies_while_its_seat_is_parked_is_waited_for(run: Run, before: tuple[str, ...]) -> None:
    held = run("sh", "-c", SERVER, before=before)
    held.until_lines(1)
    seat_init.hold(held.orders)
    os.kill(held.child(), signal.SIGKILL)
    held.until_said("ended with status 137 without its seat")
    held.until_alone()
    seat_init.run(held.orders)
    held.until_lines(2)
    os.kill(held.child(), signal.SIGKILL)
    assert held.ended() == 137, "awake it is the container's end, for the kubelet to count"


def test_a_held_server_goes_on(run: Run) -> None:
    held = run("sh", "-c", SERVER)
    held.until_lines(1)
    child = held.child()
    for _ in range(3):
        seat_init.hold(held.orders)
        time.sleep(0.02)
        seat_init.run(held.orders)
    assert held.child() == child and len(held.lines()) == 1


def test_an_order_that_goes_or_is_spoilt_changes_nothing(run: Run) -> None:
    held = run("sh", "-c", SERVER)
    held.until_lines(1)
    (held.orders / "order").write_text("nonsense\n")
    (held.orders / "order").unlink()
    (held.orders / "order").mkdir()
    time.sleep(0.05)
    os.kill(held.pid, signal.SIGTERM)
    assert held.ended() == 7


# --- the kubelet's end ---


@pytest.mark.parametrize("before", BOTH)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_container_that_waits_ends_at_once(run: Run, number: int, before: tuple[str, ...]) -> None:
    held = run("sh", "-c", SERVER, order=seat_init.hold, before=before)
    held.until_said("not granted yet")
    os.kill(held.pid, number)
    assert held.ended() == 128 + number


def test_a_container_that_is_told_to_end_does_not_wait_for_its_seat(run: Run) -> None:
    held = run("sh", "-c", SERVER)
    held.until_lines(1)
    seat_init.hold(held.orders)
    os.kill(held.pid, signal.SIGTERM)
    assert held.ended() == 7


def test_other_signals_end_nobody_that_waits(run: Run) -> None:
    held = run("sh", "-c", SERVER, order=seat_init.hold)
    held.until_said("not granted yet")
    for number in (signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG):
        os.kill(held.pid, number)
    seat_init.run(held.orders)
    held.until_lines(1)


@pytest.mark.parametrize("before", BOTH)
def test_a_killed_seat_init_leaves_nobody(run: Run, before: tuple[str, ...]) -> None:
    held = run("sh", "-c", SERVER, before=before)
    held.until_lines(1)
    child = held.child()
    os.kill(held.pid, signal.SIGKILL)
    held.ended()
    eventually(lambda: not alive(child), "the program is gone")


# --- never two ---


@only_here
def test_whoever_finds_nobody_after_an_order_to_hold_is_right(run: Run) -> None:
    """The order is taken back at the last moment: when it has been read, and no process is there yet."""
    held = run("sh", "-c", SERVER, order=seat_init.hold)
    held.until_said("not granted yet")

    def take_back() -> None:
        assert not children(held.pid)
        seat_init.hold(held.orders)

    at_entry(held.pid, CLONE, lambda: seat_init.run(held.orders), take_back)
    held.until_alone()
    assert not held.lines() and held.process.poll() is None
    seat_init.run(held.orders)
    held.until_lines(1)


@only_here
def test_an_order_that_comes_just_before_a_servers_death_counts(run: Run) -> None:
    held = run("sh", "-c", SERVER)
    held.until_lines(1)
    child = held.child()

    def park_and_die() -> None:
        seat_init.hold(held.orders)
        os.kill(child, signal.SIGKILL)
        eventually(lambda: not alive(child), "it is dead")

    at_entry(held.pid, WAIT4, lambda: None, park_and_die)
    held.until_said("ended with status 137 without its seat")
    assert held.process.poll() is None


def test_orders_that_change_as_fast_as_can_be_start_one_at_most(run: Run) -> None:
    held = run("sh", "-c", "echo $$ >> $LOG; exec sleep 100", order=seat_init.hold)
    held.until_said("not granted yet")
    pid, seed = held.pid, random.Random(7)
    for _ in range(60):
        seat_init.run(held.orders)
        began, wait = time.perf_counter(), seed.random() * 0.0015
        while time.perf_counter() - began < wait:
            pass
        seat_init.hold(held.orders)
        assert len(children(pid)) <= 1
        seat_init.down(held.orders, 0)
        held.until_alone()


@settings(max_examples=12)
@given(orders=st.lists(st.sampled_from(["run", "hold", "down 0", "down 1", "rubbish", ""]), min_size=1, max_size=12))
def test_no_series_of_orders_ends_it_or_runs_two(
    program: Path, tmp_path_factory: pytest.TempPathFactory, orders: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("orders")
    held = Held(program, folder, ["sleep", "100"])
    try:
        for order in orders:
            (held.orders / ".order").write_text(f"{order}\n")
            (held.orders / ".order").replace(held.orders / "order")
            time.sleep(0.003)
            assert len(children(held.pid)) <= 1
        seat_init.run(held.orders)
        held.child()
        seat_init.down(held.orders, 0)
        held.until_alone()
        assert held.process.poll() is None
    finally:
        held.end()
