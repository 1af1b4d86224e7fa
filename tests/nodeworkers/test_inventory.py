"""The node's GPUs as they are remembered, and when the control plane is to look again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeworkers.hardware.machine_nvidia import NvidiaMachine
from nodeworkers.hardware.machine_nvml import SimulatedNvml
from nodeworkers.hardware.nvidia import Nvidia
from nodeworkers.hardware.provider import HardwareError
from nodeworkers.inventory import WATCHED, Hardware
from planning.caches.compatibility import GPU, Target
from planning.devices.cards import Card, Sight, Trouble

ONE = GPU("GPU-1", "H100", "cuda", "90", 32, "580.10")
TWO = replace(ONE, id="GPU-2")
MI210 = GPU("amd-0", "MI210", "hip", "gfx90a", 64, "6.10.5")
CARD = Card("GPU-1", "nvidia", "H100", "nvidia.com/gpu", 0, arch="90", driver="580.10")
SIGHT = Sight("nvidia", (CARD, replace(CARD, id="GPU-2", index=1)))
IDENTITY = "a" * 32


class Driver:
    """Answers what a test says."""

    simulated = False

    def __init__(self, *answers: tuple[GPU, ...] | Exception) -> None:
        self.answers = list(answers)

    def gpus(self) -> tuple[GPU, ...]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_driver_that_fails_takes_away_nothing_that_is_known() -> None:
    hardware = Hardware(Driver((ONE, TWO), HardwareError("The driver hangs: reboot the node."), (ONE,)), IDENTITY)
    assert not hardware.fingerprint and hardware.problem
    await hardware.look()
    assert len(hardware.gpus or ()) == 2 and not hardware.problem
    await hardware.look()
    assert hardware.gpus == (ONE, TWO) and "reboot" in hardware.problem
    await hardware.look()
    assert len(hardware.gpus or ()) == 1 and not hardware.problem, "a driver that answers is believed"


async def test_what_was_never_known_is_not_no_gpus() -> None:
    hardware = Hardware(Driver(HardwareError("No answer."), ()), IDENTITY)
    await hardware.look()
    assert hardware.gpus is None and hardware.problem == "No answer."
    await hardware.look()
    assert hardware.gpus == () and hardware.fingerprint


# --- what a watcher sees -------------------------------------------------------------------------------------------


async def test_gpus_are_those_that_a_watcher_sees_and_no_driver_is_called() -> None:
    hardware = Hardware(Driver(()), IDENTITY, WATCHED)
    await hardware.look()
    assert hardware.gpus is None and "not looked at yet" in hardware.problem, "the other vendor's none is not no GPUs"
    hardware.seen(SIGHT)
    assert hardware.gpus == (ONE, TWO) and not hardware.problem and not hardware.simulated
    hardware.seen(Sight("nvidia"))
    assert hardware.gpus == () and not hardware.problem
    hardware.seen(Sight("tenstorrent", (replace(CARD, vendor="tenstorrent"),)))
    assert hardware.gpus == (), "no kernels are compiled for those"


async def test_both_vendors_are_there_and_one_that_fails_hides_none_of_the_others() -> None:
    hardware = Hardware(Driver((MI210,), HardwareError("amd-smi hangs.")), IDENTITY, WATCHED)
    await hardware.look()
    assert hardware.gpus == (MI210,), "NVIDIA's watcher may hang from the start"
    hardware.silent("nvidia", "Its watcher hangs.")
    assert hardware.gpus == (MI210,) and hardware.problem == "Its watcher hangs."
    hardware.seen(SIGHT)
    await hardware.look()
    assert list(hardware.gpus or ()) == [ONE, TWO, MI210] and hardware.problem == "amd-smi hangs."


def test_a_watcher_that_is_silent_or_sees_less_takes_away_nothing_that_is_known() -> None:
    hardware = Hardware(Driver(), IDENTITY, WATCHED)
    hardware.silent("nvidia", "Its watcher hangs.")
    assert hardware.gpus is None and hardware.problem.startswith("Its watcher hangs.")
    hardware._provided.take((), "")
    hardware.seen(SIGHT)
    hardware.silent("nvidia", "Its watcher hangs.")
    hardware.silent("tenstorrent", "And so does another.")
    assert hardware.gpus == (ONE, TWO) and hardware.problem == "Its watcher hangs."
    newer = replace(SIGHT.cards[1], driver="581")
    hardware.seen(Sight("nvidia", (newer,), problem="NVIDIA GPU 0 of 2 does not answer."))
    assert hardware.gpus == (ONE, replace(TWO, driver="581")) and "does not answer" in hardware.problem
    hardware.seen(Sight("nvidia", (newer,)))
    assert hardware.gpus == (replace(TWO, driver="581"),) and not hardware.problem


def test_a_gpu_that_is_ill_is_the_same_and_a_mig_instance_is_none() -> None:
    """Kernels are compiled for an architecture, not for a slice of it."""
    hardware = Hardware(Driver(), IDENTITY, WATCHED)
    hardware._provided.take((), "")
    hardware.seen(SIGHT)
    before = hardware.fingerprint
    hardware.seen(replace(SIGHT, troubles={"GPU-1": Trouble("GpuLost", "It is gone.")}))
    assert hardware.fingerprint == before
    slice_of_it = replace(CARD, id="MIG-1", resource="nvidia.com/mig-1g.10gb", parent="GPU-1")
    hardware.seen(replace(SIGHT, cards=(*SIGHT.cards, slice_of_it)))
    assert hardware.fingerprint == before
    hardware.seen(Sight("nvidia", (replace(CARD, arch=""),)))
    (untold,) = hardware.gpus or ()
    assert untold.target is None, "what does not tell its architecture fits no kernels"


def test_gpus_of_a_simulated_machine_are_such_and_fit_kernels() -> None:
    gpus = Nvidia(SimulatedNvml(NvidiaMachine.model_validate({"gpus": [{"product": "H100", "count": 2}]})))
    hardware = Hardware(Driver(), IDENTITY, WATCHED)
    hardware._provided.take((), "")
    hardware.seen(gpus.look())
    gpus.close()
    assert hardware.simulated and [gpu.target for gpu in hardware.gpus or ()] == [Target("cuda", "90", 32)] * 2
    hardware.seen(Sight("nvidia", simulated=True))
    assert not hardware.simulated, "there are none"


# --- mistakes, and the fingerprint ---------------------------------------------------------------------------------


async def test_a_mistake_in_a_provider_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The kubelet is answered by the same process."""
    mistakes = [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte") for _ in range(2)]
    hardware = Hardware(Driver((ONE,), *mistakes, (ONE,)), IDENTITY)
    for _ in range(3):
        await hardware.look()
    assert hardware.gpus == (ONE,) and "could not look at them: UnicodeDecodeError" in hardware.problem
    assert caplog.text.count("Traceback") == 1
    await hardware.look()
    assert hardware.problem == ""


async def test_the_fingerprint_is_of_hardware_driver_and_ledger() -> None:
    async def of(identity: str, *gpus: GPU) -> str:
        hardware = Hardware(Driver(gpus), identity)
        await hardware.look()
        return hardware.fingerprint

    same = await of(IDENTITY, ONE, TWO)
    assert same == await of(IDENTITY, TWO, ONE)
    others = [
        await of("b" * 32, ONE, TWO), await of(IDENTITY, ONE), await of(IDENTITY, ONE, replace(TWO, driver="581"))
    ]  # fmt: skip
    assert len({same, *others}) == 4
