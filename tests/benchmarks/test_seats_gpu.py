"""The benchmark for a real GPU, rehearsed: its whole run on a simulated one, and its process's memory on a driver that
this test pretends.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cuda_holder
from benchmarks.cuda_holder import CudaMemory, word
from benchmarks.seats_gpu import rates

MIB = 2**20


class PretendedCuda:
    """Of cuda-bindings' driver what the process uses; memory of the GPU is the host's."""

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def __getattr__(self, name: str) -> object:
        return lambda *_: (0, 0)

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        piece = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(piece)] = piece
        return 0, ctypes.addressof(piece)

    def cuMemFree(self, place: int) -> tuple[int]:
        del self.memory[place]
        return (0,)

    def cuMemsetD32(self, place: int, value: int, count: int) -> tuple[int]:
        data = value.to_bytes(4, sys.byteorder) * count
        ctypes.memmove(place, data, len(data))
        return (0,)

    def cuMemcpyDtoH(self, to: int, place: int, size: int) -> tuple[int]:
        ctypes.memmove(to, place, size)
        return (0,)


def test_a_byte_that_is_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_holder, "STRETCH", MIB)
    cuda = PretendedCuda()
    memory = CudaMemory(cuda)
    for size in (4 * MIB, 3 * MIB + 4096, MIB):
        memory.allocate(size)
    assert memory.check() == ""
    place = list(cuda.memory)[1]
    ctypes.memset(place + 3 * MIB + 4095, 0x77, 1)
    assert memory.check() == f"piece 1, at {3 * MIB}: it is not what was written"
    assert memory.drop() == 5 * MIB and memory.check() == "" and len(cuda.memory) == 2


def test_neighbours_differ() -> None:
    assert len({word(piece, stretch) for piece in range(80) for stretch in range(16)}) == 80 * 16


def test_rates() -> None:
    found = rates([{"lock": 0.1, "checkpoint": 2.0}, {"lock": 0.3, "checkpoint": 4.0}], 6 * 10**9)
    assert found["lock"] == {"p50": 0.2, "max": 0.3} and found["checkpoint"]["rate"] == pytest.approx(2.0)
    assert "restore" not in found


def test_a_rehearsal(tmp_path: Path) -> None:
    file = tmp_path / "told.json"
    command = [sys.executable, "-m", "benchmarks.seats_gpu", "--simulated", "--gigabytes", "0.02", "--cycles", "2"]
    ran = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(file.read_text())
    assert {"lock", "checkpoint", "verify", "restore", "unlock"} == set(told["parked and woken"])
    assert len(told["switches"]) == 4 and "simulated" in told["benchmark"]
    assert "before the driver heard of it" in ran.stdout


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_it_says_so() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.seats_gpu"], capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 2 and "There is no GPU that could be parked" in ran.stderr
