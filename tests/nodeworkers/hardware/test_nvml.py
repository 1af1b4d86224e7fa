"""NVIDIA's GPUs, against a stand-in for the module pynvml, and once against the real one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from nodeworkers.hardware.nvml import Nvml
from nodeworkers.hardware.provider import HardwareError
from planning.caches.compatibility import GPU, Target


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML's words for {value}")
        self.value = value


@dataclass
class Board:
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    slices: int = 0  # MIG devices
    fails: int = 0


@dataclass
class Library:
    """pynvml, as far as it is used: its functions and codes, and errors where a test wants them."""

    boards: list[Board] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    open: int = 0
    NVMLError: type[NVMLError] = NVMLError
    NVML_ERROR_NO_PERMISSION: int = 4
    NVML_ERROR_DRIVER_NOT_LOADED: int = 9
    NVML_ERROR_LIBRARY_NOT_FOUND: int = 12
    NVML_ERROR_GPU_IS_LOST: int = 15
    NVML_ERROR_RESET_REQUIRED: int = 16
    NVML_ERROR_LIB_RM_VERSION_MISMATCH: int = 18

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            raise NVMLError(self.failing[name])

    def nvmlInit(self) -> None:
        self._may_fail("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1
        self._may_fail("nvmlShutdown")

    def nvmlSystemGetDriverVersion(self) -> str:
        self._may_fail("nvmlSystemGetDriverVersion")
        return "590.44.01"

    def nvmlDeviceGetCount(self) -> int:
        self._may_fail("nvmlDeviceGetCount")
        assert self.open, "asked before nvmlInit"
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        if self.boards[index].fails:
            raise NVMLError(self.boards[index].fails)
        return self.boards[index]

    def nvmlDeviceGetMigMode(self, board: Board) -> tuple[int, int]:
        return (1, 1) if board.slices else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, board: Board) -> int:
        return board.slices

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board: Board, index: int) -> Board:
        return Board(f"MIG-{index}", f"{board.name} MIG 1g.10gb", board.capability)

    def nvmlDeviceGetUUID(self, board: Board) -> str:
        return board.uuid

    def nvmlDeviceGetName(self, board: Board) -> str:
        return board.name

    def nvmlDeviceGetCudaComputeCapability(self, board: Board) -> tuple[int, int]:
        return board.capability


def test_what_a_gpu_is() -> None:
    library = Library([Board("GPU-1"), Board("GPU-2", "NVIDIA A10", (8, 6)), Board("GPU-3", "NVIDIA B200", (10, 0))])
    assert Nvml(library).gpus() == (
        GPU("GPU-1", "NVIDIA H100 80GB HBM3", "cuda", "90", 32, "590.44.01"),
        GPU("GPU-2", "NVIDIA A10", "cuda", "86", 32, "590.44.01"),
        GPU("GPU-3", "NVIDIA B200", "cuda", "100", 32, "590.44.01"),
    )
    assert not Nvml.simulated


def test_a_gpu_in_mig_mode_is_one_gpu_of_its_parents_architecture() -> None:
    """Kernels are compiled for an architecture, not for a slice of it."""
    (gpu,) = Nvml(Library([Board("GPU-1", slices=7)])).gpus()
    assert gpu.id == "GPU-1" and gpu.target == Target("cuda", "90", 32)


@pytest.mark.parametrize("code", [9, 12])
def test_no_driver_is_no_gpus(code: int) -> None:
    library = Library([Board("GPU-1")], {"nvmlInit": code})
    assert Nvml(library).gpus() == ()
    assert library.open == 0, "what was not opened is not closed"


@pytest.mark.parametrize("where", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", None])
def test_what_was_opened_is_closed(where: str | None) -> None:
    library = Library([Board("GPU-1")], {where: 999} if where else {})
    if where is None:
        assert Nvml(library).gpus()
    else:
        with pytest.raises(HardwareError, match="NVML's words for 999"):
            Nvml(library).gpus()
    assert library.open == 0


def test_an_error_at_the_end_loses_nothing() -> None:
    assert len(Nvml(Library([Board("GPU-1")], {"nvmlShutdown": 999})).gpus()) == 1


@pytest.mark.parametrize(
    ("code", "advice"),
    [(18, "drain the node and restart it"), (4, "/dev/nvidiactl"), (999, "run nvidia-smi on the node")],
)
def test_a_driver_that_fails_says_what_to_do(code: int, advice: str) -> None:
    with pytest.raises(HardwareError, match=advice) as caught:
        Nvml(Library([Board("GPU-1")], {"nvmlInit": code})).gpus()
    assert caught.value.gpus == ()


def test_a_lost_gpu_is_told_and_does_not_hide_the_others() -> None:
    library = Library([Board("GPU-1"), Board("GPU-2", fails=15), Board("GPU-3")])
    with pytest.raises(HardwareError, match=r"NVIDIA GPU 1 of 3 does not answer: .*fell off the bus") as caught:
        Nvml(library).gpus()
    assert [gpu.id for gpu in caught.value.gpus] == ["GPU-1", "GPU-3"]
    assert library.open == 0


def test_the_real_library_has_what_is_used() -> None:
    """Everything that the stand-in has is there under the same name and value."""
    pynvml = pytest.importorskip("pynvml")
    for name in dir(Library):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))
        elif name.startswith("NVML_ERROR"):
            assert getattr(pynvml, name) == getattr(Library, name)
    assert pynvml.NVMLError(15).value == 15


def test_the_real_library_on_this_machine() -> None:
    """With a driver or without one, the answer is GPUs that kernels can be for, or none."""
    assert all(gpu.target is not None for gpu in Nvml().gpus())
