"""CudaDriver over the real cuda-bindings and a libcuda.so.1 that is made here: what arrives in the C calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent / "simulated_libcuda.c"
ONE, TWO = "GPU-a1000000-0000-0000-0000-0000000000a2", "GPU-b1000000-0000-0000-0000-0000000000b2"
PRELUDE = """
import json, threading, time, types
import pynvml
from nodeworkers.seats.helper import cuda_driver
from nodeworkers.seats.helper.driver import DriverError

MEMORY = {"one": types.SimpleNamespace(free=3, total=10), "two": types.SimpleNamespace(free=10, total=10)}
USERS = {"one": [types.SimpleNamespace(pid=5, usedGpuMemory=7), types.SimpleNamespace(pid=6, usedGpuMemory=None)]}
pynvml.nvmlInit = lambda: None
pynvml.nvmlSystemGetDriverVersion = lambda: "580.65.06"
pynvml.nvmlDeviceGetCount = lambda: 2
pynvml.nvmlDeviceGetHandleByIndex = lambda number: ["one", "two"][number]
pynvml.nvmlDeviceGetUUID = lambda handle: {"one": ONE, "two": TWO}[handle]
def by_uuid(uuid):
    if uuid not in (ONE, TWO):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return {ONE: "one", TWO: "two"}[uuid]
pynvml.nvmlDeviceGetHandleByUUID = by_uuid
pynvml.nvmlDeviceGetMemoryInfo = lambda handle: MEMORY[handle]
pynvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: USERS.get(handle, [])

driver = cuda_driver.CudaDriver()

def error(call, *arguments):
    try:
        call(*arguments)
    except DriverError as raised:
        return [raised.code, raised.timed_out]
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", SOURCE], check=True)
    return folder


def told(libcuda: Path, code: str) -> tuple[Any, list[str]]:
    """What `code` prints, in a process that finds this libcuda, and what was called there."""
    log = libcuda / "log"
    log.unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, "-c", f"ONE, TWO = {ONE!r}, {TWO!r}\n{PRELUDE}\nprint(json.dumps({code}))"],
        env=os.environ | {"LD_LIBRARY_PATH": str(libcuda), "SIMULATED_LIBCUDA_LOG": str(log)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), log.read_text().splitlines()


def test_states(libcuda: Path) -> None:
    found, calls = told(libcuda, "[driver.state(pid) for pid in (100, 101, 102, 103, 104, 110, 7)]")
    assert found == ["RUNNING", "LOCKED", "CHECKPOINTED", "FAILED", "state 4", None, None]
    assert calls == ["init"], "once, and first"


def test_calls_arrive_as_they_are_meant(libcuda: Path) -> None:
    found, calls = told(
        libcuda,
        "[driver.lock(101, 10), driver.checkpoint(102), driver.restore(103, {}),"
        " driver.restore(103, {ONE: TWO, TWO: ONE}), driver.unlock(104)]",
    )
    assert found == [None] * 5
    assert calls[1:] == [
        "lock 101 10000 zeroed",
        "checkpoint 102 zeroed",
        "restore 103 0 zeroed",
        "restore 103 2 zeroed a1a2>b1b2 b1b2>a1a2",
        "unlock 104 zeroed",
    ]


def test_errors_have_the_drivers_names(libcuda: Path) -> None:
    found, calls = told(
        libcuda, "[error(driver.lock, 120, 0.0001), error(driver.checkpoint, 140), error(driver.memory, ['GPU-c'])]"
    )
    assert found == [["CUDA_ERROR_NOT_READY", True], ["CUDA_ERROR_ILLEGAL_STATE", False], ["Not Found", False]]
    assert "lock 120 1 zeroed" in calls, "0 would wait for ever"


def test_what_the_driver_shows(libcuda: Path) -> None:
    found, _ = told(
        libcuda,
        "[driver.version(), driver.devices(),"
        " {card: [each.free, each.total, each.holders] for card, each in driver.memory([ONE, TWO]).items()}]",
    )
    assert found == ["580.65.06", [ONE, TWO], {ONE: [3, 10, {"5": 7, "6": 0}], TWO: [10, 10, {}]}]


def test_others_are_answered_while_a_call_goes_on(libcuda: Path) -> None:
    code = (
        "(lambda thread: (thread.start(), time.sleep(0.05), time.monotonic(), driver.state(101), time.monotonic(),"
        " thread.is_alive(), thread.join()))(threading.Thread(target=driver.lock, args=(130, 10)))"
    )
    (_, _, before, state, after, going_on, _), _ = told(libcuda, code)
    assert (state, going_on) == ("LOCKED", True) and after - before < 0.3


def test_a_machine_without_the_driver_is_told(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    ended = subprocess.run(
        [sys.executable, "-m", "nodeworkers.seats.helper", "--socket", tmp_path / "s", "--driver", "cuda"],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("The GPUs' driver cannot be used: ") and "Traceback" not in ended.stderr
