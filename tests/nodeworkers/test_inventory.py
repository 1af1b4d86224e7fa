"""The node's GPUs as they are remembered, and when the control plane is to look again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeworkers.hardware.detected import Detected
from nodeworkers.hardware.provider import HardwareError
from nodeworkers.inventory import Hardware
from planning.caches.compatibility import GPU

ONE = GPU("GPU-1", "H100", "cuda", "90", 32, "580.10")
TWO = replace(ONE, id="GPU-2")


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
    failed = HardwareError("The driver hangs: reboot the node.", (replace(TWO, driver="581"),))
    hardware = Hardware(Driver((ONE, TWO), failed, (ONE,)), "a" * 32)
    assert not hardware.fingerprint and hardware.problem
    await hardware.look()
    assert len(hardware.gpus or ()) == 2 and not hardware.problem
    await hardware.look()
    assert hardware.gpus == (ONE, replace(TWO, driver="581")) and "reboot" in hardware.problem
    await hardware.look()
    assert len(hardware.gpus or ()) == 1 and not hardware.problem, "a driver that answers is believed"


async def test_what_was_never_known_is_not_no_gpus() -> None:
    hardware = Hardware(Driver(HardwareError("No answer."), ()), "a" * 32)
    await hardware.look()
    assert hardware.gpus is None and hardware.problem == "No answer."
    await hardware.look()
    assert hardware.gpus == () and hardware.fingerprint


async def test_one_vendor_of_several_fails() -> None:
    hardware = Hardware(Detected([Driver((ONE,), HardwareError("It hangs.")), Driver((), ())]), "a" * 32)
    await hardware.look()
    await hardware.look()
    assert hardware.gpus == (ONE,) and "It hangs." in hardware.problem


async def test_a_mistake_in_a_provider_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The kubelet is answered by the same process."""
    mistakes = [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte") for _ in range(2)]
    hardware = Hardware(Detected([Driver((ONE,), *mistakes, (ONE,)), Driver((TWO,), (TWO,))]), "a" * 32)
    for _ in range(3):
        await hardware.look()
    assert hardware.gpus == (ONE, TWO) and "could not look at them: UnicodeDecodeError" in hardware.problem
    assert caplog.text.count("Traceback") == 1
    await hardware.look()
    assert hardware.problem == ""


async def test_the_fingerprint_is_of_hardware_driver_and_ledger() -> None:
    async def of(identity: str, *gpus: GPU) -> str:
        hardware = Hardware(Driver(gpus), identity)
        await hardware.look()
        return hardware.fingerprint

    same = await of("a" * 32, ONE, TWO)
    assert same == await of("a" * 32, TWO, ONE)
    others = [
        await of("b" * 32, ONE, TWO), await of("a" * 32, ONE), await of("a" * 32, ONE, replace(TWO, driver="581"))
    ]  # fmt: skip
    assert len({same, *others}) == 4
