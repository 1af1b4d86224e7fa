"""A card's reset, against a stand-in for the driver that keeps the rules of tt-kmd."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from nodeworkers.hardware.tenstorrent_reset import (
    ASIC_RESET,
    DEVICE_INFO,
    EXCLUSIVE,
    GET_DEVICE_INFO,
    POST_RESET,
    RESET,
    RESET_DEVICE,
    Kernel,
    Patience,
    ResetError,
    exclusive,
    reset,
)
from planning.devices.cards import Card

ADDRESS = "0000:c3:01.2"
PLACE = 0xC3 << 8 | 1 << 3 | 2
PARITY, CLEAR = bytes(4) + b"\x46\x01", bytes(4) + b"\x06\x01"  # PCI's command register, with the marker and without


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@dataclass
class SimulatedDriver:
    """One card behind /dev/tenstorrent/<index>. `hotplug`: a reset takes it off the bus and back as number 5."""

    root: Path
    place: int = PLACE
    index: int = 0
    hotplug: bool = False
    returns: bool = True  # from its reset
    results: dict[int, int] = field(default_factory=dict)  # of a reset, by its flags
    errors: dict[int, int] = field(default_factory=dict)  # errno of a reset, by its flags
    others: int = 0  # descriptors that others have
    open_errno: int = 0
    descriptors: dict[int, bool] = field(default_factory=dict)  # and whether each is still valid
    asked: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    now: float = 0.0
    coming: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pci = self.root / "sys/bus/pci/devices" / ADDRESS
        self.arrive(0)

    def arrive(self, index: int) -> None:
        (self.pci / f"tenstorrent/tenstorrent!{index}").mkdir(parents=True)
        (self.pci / "config").write_bytes(CLEAR)
        self.index = index

    def leave(self) -> None:
        self.pci.rename(self.root / "gone")
        self.descriptors = dict.fromkeys(self.descriptors, False)

    def open(self, path: str, flags: int) -> int:
        self.flags.append(flags)
        if self.open_errno:
            raise failure(self.open_errno)
        if path != str(self.root / "dev/tenstorrent" / str(self.index)):
            raise failure(errno.ENOENT)
        if self.others or self.descriptors:
            assert flags & os.O_NONBLOCK, "it would wait for ever"
            raise failure(errno.EAGAIN)
        descriptor = 100 + len(self.flags)
        self.descriptors[descriptor] = True
        return descriptor

    def close(self, descriptor: int) -> None:
        del self.descriptors[descriptor]

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> None:
        if not self.descriptors[descriptor]:
            raise failure(errno.ENODEV)
        if request == GET_DEVICE_INFO:
            assert len(argument) == 24 and struct.unpack_from("=I", argument)[0] == 20
            DEVICE_INFO.pack_into(argument, 0, 20, 20, 0x1E52, 0x401E, 0x1E52, 0, self.place, 0, 0, 0)
            return
        assert request == RESET_DEVICE and len(argument) == 16
        size, flags, _, _ = RESET.unpack(argument)
        assert size == 8
        self.asked.append(flags)
        if flags in self.errors:
            raise failure(self.errors[flags])
        RESET.pack_into(argument, 0, size, flags, 8, self.results.get(flags, 0))
        if flags == ASIC_RESET:
            (self.pci / "config").write_bytes(PARITY)
            if self.returns:
                self.coming = [self.leave, lambda: self.arrive(5)] if self.hotplug else [self.cleared]

    def cleared(self) -> None:
        (self.pci / "config").write_bytes(CLEAR)

    def pause(self, seconds: float) -> None:
        assert self.descriptors or self.hotplug, "the card is open to anybody in the middle of its reset"
        self.now += seconds
        if self.coming:
            self.coming.pop(0)()


@pytest.fixture
def driver(tmp_path: Path) -> SimulatedDriver:
    return SimulatedDriver(tmp_path)


def card(driver: SimulatedDriver, version: str = "2.10.1") -> Card:
    node = str(driver.root / "dev/tenstorrent/0")
    return Card("tt-1", "tenstorrent", "n150", "tenstorrent.com/n150", 0, ADDRESS, nodes=(node,), driver=version)


def run(driver: SimulatedDriver, version: str = "2.10.1") -> int:
    return reset(
        card(driver, version),
        sys=driver.root / "sys",
        dev=driver.root / "dev",
        calls=driver,
        patience=Patience(clock=lambda: driver.now, pause=driver.pause),
    )


# --- whether it is free --------------------------------------------------------------------------------------------


def test_it_is_opened_exclusively_and_nobody_waits_for_it() -> None:
    for flag in (os.O_EXCL, os.O_NONBLOCK, os.O_APPEND, os.O_CLOEXEC, os.O_RDWR):
        assert EXCLUSIVE & flag == flag


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY])
def test_somebody_holds_it(driver: SimulatedDriver, code: int) -> None:
    driver.open_errno = code
    with pytest.raises(ResetError, match="a process holds it"):
        run(driver)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EACCES])
def test_one_that_cannot_be_opened_is_left_alone(driver: SimulatedDriver, code: int) -> None:
    driver.open_errno = code
    with pytest.raises(ResetError, match="cannot be opened") as caught:
        run(driver)
    assert not driver.asked and not caught.value.begun


@pytest.mark.parametrize("version", ["2.9.9", "1.34", "", "simulated", "v2.10.1"])
def test_an_older_driver_would_let_anybody_in_so_it_is_not_asked(driver: SimulatedDriver, version: str) -> None:
    with pytest.raises(ResetError, match=r"tt-1 is not reset: its driver .* Update tt-kmd to 2\.10"):
        run(driver, version)
    assert not driver.flags and not driver.asked


@pytest.mark.parametrize("version", ["2.10.0", "2.10.1-pre", "2.10.1-simulated", "2.11", "3.0.0"])
def test_drivers_that_know_exclusive_opening(driver: SimulatedDriver, version: str) -> None:
    assert exclusive(card(driver, version))


def test_without_a_node_it_is_left_alone(driver: SimulatedDriver) -> None:
    with pytest.raises(ResetError, match="has no device node"):
        reset(replace(card(driver), nodes=()), calls=driver)


def test_the_real_calls_reach_a_file(tmp_path: Path) -> None:
    node = tmp_path / "0"
    node.touch()
    calls = Kernel()
    descriptor = calls.open(str(node), EXCLUSIVE)
    with pytest.raises(OSError, match="Inappropriate ioctl"):
        calls.ioctl(descriptor, GET_DEVICE_INFO, bytearray(24))
    calls.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# --- reset ---------------------------------------------------------------------------------------------------------


def test_a_reset_in_place_never_lets_go_of_the_card(driver: SimulatedDriver) -> None:
    assert run(driver) == 0
    assert driver.asked == [ASIC_RESET, POST_RESET]
    assert driver.flags == [EXCLUSIVE] and not driver.descriptors


def test_a_card_that_comes_back_under_another_number_is_found_by_its_address(driver: SimulatedDriver) -> None:
    driver.hotplug = True
    assert run(driver) == 5, "the number that it has now"
    assert driver.asked == [ASIC_RESET, POST_RESET]
    assert driver.index == 5 and not driver.descriptors
    assert all(flags == EXCLUSIVE for flags in driver.flags)


def test_one_that_left_and_came_back_between_two_looks(driver: SimulatedDriver) -> None:
    driver.hotplug = True

    def at_once() -> None:
        driver.leave()
        driver.arrive(5)

    original = driver.ioctl

    def ioctl(descriptor: int, request: int, argument: bytearray) -> None:
        original(descriptor, request, argument)
        if request == RESET_DEVICE and driver.asked == [ASIC_RESET]:
            driver.coming = [at_once]

    driver.ioctl = ioctl  # type: ignore[method-assign]
    run(driver)
    assert driver.asked == [ASIC_RESET, POST_RESET] and not driver.descriptors


def test_a_card_that_is_held_is_never_reset(driver: SimulatedDriver) -> None:
    driver.others = 1
    with pytest.raises(ResetError, match="tt-1 is not reset: a process holds it") as caught:
        run(driver)
    assert not driver.asked and not caught.value.begun


def test_a_number_that_is_another_cards_by_now_is_left_alone(driver: SimulatedDriver) -> None:
    driver.place = 0x04 << 8
    with pytest.raises(
        ResetError, match=r"tt-1 is left alone: .* card at 0000:04:00\.0, not of the one at 0000:c3:01\.2"
    ):
        run(driver)
    assert not driver.asked and not driver.descriptors


def test_nor_is_another_card_that_came_back_in_its_place(driver: SimulatedDriver) -> None:
    driver.hotplug = True
    arrive = driver.arrive

    def another(index: int) -> None:
        arrive(index)
        driver.place = 0x04 << 8

    driver.arrive = another  # type: ignore[method-assign]
    with pytest.raises(ResetError, match="is left alone"):
        run(driver)
    assert driver.asked == [ASIC_RESET] and not driver.descriptors


def test_memory_that_is_mapped_elsewhere(driver: SimulatedDriver) -> None:
    driver.errors[ASIC_RESET] = errno.EBUSY
    with pytest.raises(ResetError, match=r"does not begin its reset: .*busy.*dma-buf"):
        run(driver)
    assert driver.asked == [ASIC_RESET] and not driver.descriptors


@pytest.mark.parametrize(("step", "words"), [(ASIC_RESET, "does not begin"), (POST_RESET, "does not start again")])
def test_a_step_that_fails(driver: SimulatedDriver, step: int, words: str) -> None:
    driver.results[step] = 1
    with pytest.raises(ResetError, match=rf"{words}.*\(result 1\)") as caught:
        run(driver)
    assert driver.asked[-1] == step and not driver.descriptors
    assert caught.value.begun is (step == POST_RESET)


def test_a_card_that_does_not_come_back(driver: SimulatedDriver) -> None:
    driver.returns = False
    with pytest.raises(ResetError, match="has not come back from its reset within 5 s"):
        run(driver)
    assert driver.asked == [ASIC_RESET] and not driver.descriptors and driver.now < 7


def test_a_node_that_does_not_come_back(driver: SimulatedDriver) -> None:
    driver.hotplug = True
    arrive = driver.arrive

    def without_a_node(index: int) -> None:
        arrive(index)
        driver.open_errno = errno.ENXIO

    driver.arrive = without_a_node  # type: ignore[method-assign]
    with pytest.raises(ResetError, match="its device node cannot be opened"):
        run(driver)
    assert driver.asked == [ASIC_RESET] and not driver.descriptors
