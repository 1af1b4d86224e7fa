"""A candidate's name says which process it is, and nobody is believed to have ended who may live."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from berth import candidate
from berth.candidate import candidate_name, has_ended

TELLS = "from berth.candidate import candidate_name; print(candidate_name(), flush=True); input()"


@contextmanager
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process and its name."""
    with subprocess.Popen(
        [sys.executable, "-c", TELLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_names_differ_and_begin_with_the_host() -> None:
    names = {candidate_name() for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith(f"{os.uname().nodename}_") for name in names)


def test_who_lives_has_not_ended_and_who_was_killed_has() -> None:
    assert not has_ended(candidate_name()), "that is this process"
    with other() as (process, name):
        assert not has_ended(name)
        process.send_signal(signal.SIGSTOP)
        assert not has_ended(name), "it may go on"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(name), "its parent has taken no note yet"
        process.wait()
        assert has_ended(name)


def test_a_process_that_got_the_number_of_another_is_not_that_one() -> None:
    before, _, started = candidate_name().rpartition(".")
    assert has_ended(f"{before}.{int(started) - 1}")


@pytest.mark.parametrize("name", ["", "vm", "vm_1a2b3c4d", "vm_1a2b3c4d_0123456789ab.1.1"])
def test_of_others_nothing_is_known(name: str) -> None:
    assert not has_ended(name)


def test_of_a_process_on_another_machine_or_in_another_container_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other() as (process, name):
        process.kill()
        process.wait()
        for boot, numbering in (("another boot", "pid:[1]"), ("this boot", "pid:[2]")):
            proc = tmp_path / boot
            (proc / "sys/kernel/random").mkdir(parents=True)
            (proc / "sys/kernel/random/boot_id").write_text(boot)
            (proc / "self/ns").mkdir(parents=True)
            (proc / "self/ns/pid").symlink_to(numbering)
            monkeypatch.setattr(candidate, "_PROC", proc)
            assert not has_ended(name)
        monkeypatch.setattr(candidate, "_PROC", tmp_path / "no proc at all")
        assert not has_ended(name)
        assert re.fullmatch(rf"{os.uname().nodename}_[0-9a-f]{{8}}", candidate_name())
