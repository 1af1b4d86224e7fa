"""NVIDIA's GPUs as a source of the watcher: what there is, what speaks against it, and that one never costs another."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.hardware import nvidia, nvidia_cards, nvidia_links
from nodeworkers.hardware.machine_nvidia import NvidiaMachine
from nodeworkers.hardware.machine_nvml import SimulatedNvml
from nodeworkers.hardware.nvidia import Nvidia
from nodeworkers.hardware.nvidia_faults import APPLICATION_XIDS
from nodeworkers.hardware.provider import HardwareError
from nodeworkers.hardware.source import Source
from nodeworkers.hardware.wire import decode, encode
from planning.devices.cards import Card, Link, Sight
from tests.nodeworkers.hardware.nvidia_rig import Rig, gpus, uuid

UNKNOWN_ERROR = 999


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def reasons(sight: Sight) -> dict[str, str]:
    return {name: trouble.reason for name, trouble in sight.troubles.items()}


def hear(rig: Rig) -> Sight:
    """What is seen after what was reported has been heard."""
    rig.source.wait(0.001)
    return rig.source.look()


class TestCards:
    def test_what_a_gpu_is(self, folder: Path) -> None:
        source: Source = Rig(folder, {"gpus": [{"product": "H100", "numa": 1, "pids": [77, 12]}]}).source
        sight = source.look()
        assert sight.vendor == source.vendor == "nvidia" and sight.simulated and not sight.problem
        assert sight.cards == (
            Card(
                id=uuid(0),
                vendor="nvidia",
                product="NVIDIA H100 80GB HBM3 (simulated)",
                resource="nvidia.com/gpu",
                index=0,
                address="0000:10:00.0",
                numa=1,
                memory_mib=81_559,
                nodes=(str(folder / "dev/nvidia0"),),
                arch="90",
                driver="590.44.01-simulated",
            ),
        )
        reading = sight.readings[uuid(0)]
        assert (reading.temperature, reading.power, reading.memory_used_mib, reading.pids) == (41, 400, 1024, (12, 77))
        assert sight.troubles == {}
        assert sight.host == {"driver": "590.44.01-simulated", "cuda": "13.1", "persistence": "on"}

    def test_a_numa_node_below_zero_is_none(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none"))
        (folder / "sys/bus/pci/devices/0000:10:00.0/numa_node").write_text("-1\n")
        assert rig.source.look().cards[0].numa is None

    def test_instances_of_a_gpu_are_cards_of_their_own_and_the_gpu_is_not_offered(self, folder: Path) -> None:
        machine = {"gpus": [{"mig": ["1g.10gb", "1g.10gb+me", "1c.3g.40gb"]}, {}]}
        whole, *instances, other = Rig(folder, machine).source.look().cards
        assert whole.resource == "" and whole.id == uuid(0) and other.resource == "nvidia.com/gpu"
        assert [each.resource for each in instances] == [
            "nvidia.com/mig-1g.10gb",
            "nvidia.com/mig-1g.10gb.me",
            "nvidia.com/mig-1c.3g.40gb",
        ]
        assert {each.parent for each in instances} == {uuid(0)}
        assert all(each.id.startswith("MIG-5170") and each.address == whole.address for each in instances)
        assert instances[0].memory_mib == 9_850 and instances[0].numa == whole.numa and instances[0].arch == "90"
        caps = folder / "dev/nvidia-caps"
        assert instances[0].nodes == (str(caps / "nvidia-cap3"), str(caps / "nvidia-cap4"))
        assert instances[1].nodes == (str(caps / "nvidia-cap5"), str(caps / "nvidia-cap6"))
        assert all(Path(node).exists() for each in (whole, *instances, other) for node in each.nodes)

    def test_instances_without_a_profile_in_their_name_are_named_by_their_slices(self, folder: Path) -> None:
        rig = Rig(folder, {"gpus": [{"product": "H100", "mig": ["1g.10gb", "3g.40gb", "1c.3g.40gb", "7g.80gb"]}]})
        rig.nvml.failing["nvmlDeviceGetName", None] = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert [each.resource for each in rig.source.look().cards[1:]] == [
            "nvidia.com/mig-1g.10gb",
            "nvidia.com/mig-3g.40gb",
            "nvidia.com/mig-1c.3g.40gb",
            "nvidia.com/mig-7g.80gb",
        ]

    @pytest.mark.parametrize("uuid_told", ["MIG-GPU-1/7/0", "x" * 200, "GPU-\n\x00é", "-.-GPU", "…"])
    def test_an_id_can_be_written_anywhere(self, uuid_told: str) -> None:
        name = nvidia_cards.identity(uuid_told)
        assert len(name) <= 63 and name.isascii() and all(each.isalnum() or each in "._-" for each in name)

    def test_an_old_driver_tells_less_and_is_believed(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "none"))
        told = {"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"}
        for name in sorted(called() - told):
            rig.nvml.failing[name, None] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        sight = rig.source.look()
        assert [each.id for each in sight.cards] == [uuid(0), uuid(1)] and sight.troubles == {}
        assert sight.cards[0].product == "unknown" and sight.cards[0].nodes == () and sight.cards[0].arch == ""

    def test_two_gpus_with_one_uuid_are_one_and_told(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "none"))
        rig.simulated.nvmlDeviceGetUUID = lambda handle: "GPU-1"  # type: ignore[method-assign]
        sight = rig.source.look()
        assert len(sight.cards) == 1 and "has the UUID of another" in sight.problem


class TestDriver:
    def test_no_driver_is_no_gpus_until_there_is_one(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", driver="none"))
        assert rig.source.look() == Sight("nvidia", simulated=True)
        rig.source.wait(0.001)
        rig.change(gpus("none"))
        assert len(rig.source.look().cards) == 1
        rig.change(gpus("none", driver="none"))
        assert rig.source.look().cards == ()

    def test_no_library_is_no_gpus(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none"))
        rig.nvml.failing["nvmlInit", None] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        assert rig.source.look().cards == ()

    @pytest.mark.parametrize(
        ("code", "advice"),
        [(18, "drain the node and restart it"), (4, "/dev/nvidiactl"), (999, "run nvidia-smi on the node")],
    )
    @pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
    def test_a_driver_that_fails_says_what_to_do_and_is_tried_again(
        self, folder: Path, function: str, code: int, advice: str
    ) -> None:
        rig = Rig(folder, gpus("none"))
        rig.nvml.failing[function, None] = code
        with pytest.raises(HardwareError, match=advice):
            rig.source.look()
        rig.nvml.failing.clear()
        assert len(rig.source.look().cards) == 1

    def test_a_session_lasts_until_gpus_come_or_go(self, folder: Path) -> None:
        """NVML itself never lists a GPU that came after it was initialised."""
        rig = Rig(folder, gpus("none"))
        for _ in range(3):
            rig.source.look()
        assert rig.nvml.calls.count("nvmlInit") == 1
        rig.change(gpus("none", "none"))
        assert len(rig.source.look().cards) == 2
        assert rig.nvml.calls.count("nvmlInit") == 2 and rig.nvml.calls.count("nvmlShutdown") == 1
        rig.source.close()
        assert rig.nvml.calls.count("nvmlShutdown") == 2
        assert len(rig.source.look().cards) == 2, "and may be opened again"

    def test_the_wiring_is_read_once_for_each_set_of_gpus(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "none", "none"))
        for _ in range(3):
            rig.source.look()
        assert rig.nvml.calls.count("nvmlDeviceGetTopologyCommonAncestor") == 3, "the pairs of three"
        rig.change(gpus("none", "none", "lost"))
        assert rig.source.look().links == (Link(uuid(0), uuid(1), "single-switch"),)
        rig.change(gpus("none", "none", "none"))
        assert len(rig.source.look().links) == 3

    def test_on_this_machine(self) -> None:
        """With a driver or without one, the real NVML gives cards or none."""
        source = Nvidia()
        sight = source.look()
        assert not sight.simulated and all(card.id for card in sight.cards)
        source.wait(0.001)
        source.close()


class TestErrors:
    @pytest.mark.parametrize("xid", sorted(APPLICATION_XIDS))
    def test_what_applications_do_is_not_held_against_a_gpu(self, folder: Path, xid: int) -> None:
        rig = Rig(folder, gpus("none", "none"))
        rig.source.look()
        rig.change(gpus("none", f"xid:{xid}"))
        sight = hear(rig)
        assert sight.troubles == {} and not any(key.startswith("attention") for key in sight.host)

    def test_an_xid_counts_against_its_gpu_alone_until_the_gpu_is_reset(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "none"))
        rig.source.look()
        rig.change(gpus("none", "xid:95"))
        trouble = hear(rig).troubles[uuid(1)]
        assert trouble.reason == "Xid95" and trouble.sure
        assert "not contained" in trouble.message and "reset the GPU" in trouble.message
        rig.clock.now += 100_000
        assert reasons(rig.source.look()) == {uuid(1): "Xid95"}, "the driver still asks for a reset"
        rig.change(gpus("none", "none"))
        assert rig.source.look().troubles == {}, "no restart is needed (NVIDIA's plugin needs one)"

    def test_with_an_old_driver_an_xid_ends_when_nothing_more_is_heard(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", driver="550.90.07"))
        rig.source.look()
        rig.change(gpus("xid:119", driver="550.90.07"))
        assert reasons(hear(rig)) == {uuid(0): "Xid119"}
        rig.clock.now += 599
        assert reasons(rig.source.look()) == {uuid(0): "Xid119"}
        rig.clock.now += 1
        assert rig.source.look().troubles == {}

    def test_what_people_should_know_is_told_and_does_not_condemn(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "remap-pending"))
        assert "RemapPending" in rig.source.look().host[f"attention/{uuid(1)}"]
        rig.change(gpus("xid:94", "remap-pending"))
        sight = hear(rig)
        assert sight.troubles == {} and "XID 94: a memory error was contained" in sight.host[f"attention/{uuid(0)}"]

    @pytest.mark.parametrize(
        ("fault", "reason", "sure"),
        [
            ("remap-failed", "RowRemapFailed", True),
            ("hot", "Hot", False),
            ("lost", "GpuLost", True),
            ("xid:79", "GpuLost", True),
            ("xid:48", "Xid48", True),
            ("ecc", "Xid48", True),
            ("xid:4711", "Xid4711", False),
        ],
    )
    def test_faults(self, folder: Path, fault: str, reason: str, sure: bool) -> None:
        rig = Rig(folder, gpus("none", "none", "none"))
        before = rig.source.look()
        rig.change(gpus("none", fault, "none"))
        sight = hear(rig)
        assert reasons(sight) == {uuid(1): reason} and sight.troubles[uuid(1)].sure is sure
        assert sight.cards == before.cards, "none is hidden, and the bad one is still known"
        rig.change(gpus("none", "none", "none"))
        rig.clock.now += 60
        rig.source.look()
        rig.source.wait(0.001)
        rig.clock.now += 60
        assert rig.source.look() == before

    def test_a_gpu_lost_before_it_was_known_is_told(self, folder: Path) -> None:
        sight = Rig(folder, gpus("none", "lost", "none")).source.look()
        assert [card.id for card in sight.cards] == [uuid(0), uuid(2)]
        assert sight.problem.startswith("NVIDIA GPU 1 of 3 does not answer: GPU is lost; it fell off the bus")

    def test_a_gpu_that_answers_in_part_is_still_what_it_was(self, folder: Path) -> None:
        rig = Rig(folder, {"gpus": [{"mig": ["1g.10gb"]}, {}]})
        before = rig.source.look()
        for name in ("nvmlDeviceGetName", "nvmlDeviceGetMigMode", "nvmlDeviceGetTemperature"):
            rig.nvml.failing[name, 0] = UNKNOWN_ERROR
        sight = rig.source.look()
        assert sight.cards == before.cards, "above all, it is not offered as a whole GPU"
        assert sight.links == before.links
        assert set(reasons(sight)) == {card.id for card in before.cards[:2]}
        trouble = sight.troubles[uuid(0)]
        assert trouble.reason == "NotAnswering" and not trouble.sure and "Unknown Error" in trouble.message
        assert sight.readings[uuid(0)].temperature is None and sight.readings[uuid(0)].power == 70

    @pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPowerUsage"])
    def test_a_gpu_that_says_that_it_needs_a_reset(self, folder: Path, function: str) -> None:
        rig = Rig(folder, gpus("none", "none"))
        rig.source.look()
        rig.nvml.failing[function, 1] = pynvml.NVML_ERROR_RESET_REQUIRED
        sight = rig.source.look()
        assert reasons(sight) == {uuid(1): "ResetRequired"} and sight.troubles[uuid(1)].sure

    def test_ecc_errors_are_seen_without_events(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", driver="550.90.07"))
        rig.nvml.failing["nvmlEventSetCreate", None] = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert "reports no errors of its GPUs" in rig.source.look().problem
        rig.change(gpus("ecc", driver="550.90.07"))
        assert reasons(hear(rig)) == {uuid(0): "DoubleBitEcc"}
        rig.change(gpus("none", driver="550.90.07"))
        assert rig.source.look().troubles == {}, "the counter fell: it was reset"

    def test_an_error_of_a_gpu_that_is_not_listed_condemns_none(self, folder: Path) -> None:
        """NVIDIA's plugin condemns all."""
        rig = Rig(folder, gpus("none", "none"))
        rig.source.look()
        rig.simulated.nvmlDeviceGetUUID = lambda handle: "GPU-somebody-elses"  # type: ignore[method-assign]
        rig.simulated.apply(rig.simulated._machine.model_validate(gpus("none", "xid:48")))
        rig.source.wait(0.001)
        del rig.simulated.nvmlDeviceGetUUID
        rig.change(gpus("none", "none"))
        sight = rig.source.look()
        assert (
            sight.troubles == {}
            and "XID 48 of a GPU that it does not list (GPU-somebody-elses)" in sight.host["attention"]
        )

    def test_events_that_cannot_be_waited_for_condemn_none(self, folder: Path) -> None:
        """NVIDIA's plugin condemns all."""
        rig = Rig(folder, gpus("none", "none"))
        rig.source.look()
        rig.nvml.failing["nvmlEventSetWait", None] = UNKNOWN_ERROR
        sight = hear(rig)
        assert sight.troubles == {} and "reports no errors of its GPUs" in sight.problem
        rig.nvml.failing.clear()
        assert hear(rig).problem == ""

    def test_a_lost_gpu_does_not_deafen_the_others(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "none"))
        rig.source.look()
        rig.change(gpus("none", "lost"))
        hear(rig)
        rig.change(gpus("xid:62", "lost"))
        assert reasons(hear(rig)) == {uuid(0): "Xid62", uuid(1): "GpuLost"}
        assert hear(rig).problem == ""

    def test_a_gpu_that_reports_nothing_is_judged_by_its_answers_and_told(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "none"))
        rig.nvml.failing["nvmlDeviceGetSupportedEventTypes", 1] = pynvml.NVML_ERROR_NOT_SUPPORTED
        sight = rig.source.look()
        assert sight.troubles == {} and "judged by its answers alone" in sight.host[f"attention/{uuid(1)}"]
        rig.change(gpus("xid:48", "none"))
        assert reasons(hear(rig)) == {uuid(0): "Xid48"}

    def test_waiting_ends_when_an_error_is_reported(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none"))
        rig.source.look()
        began = time.monotonic()
        striking = threading.Timer(0.05, rig.change, [gpus("xid:48")])
        striking.start()
        rig.source.wait(60)
        striking.join()
        assert time.monotonic() - began < 30
        assert reasons(rig.source.look()) == {uuid(0): "Xid48"}

    def test_an_error_of_an_instance_is_its_own_unless_the_whole_gpu_is_affected(self, folder: Path) -> None:
        rig = Rig(folder, {"gpus": [{"mig": ["1g.10gb", "1g.10gb"]}]})
        _, first, second = rig.source.look().cards
        whole = rig.simulated.nvmlEventSetWait

        def of_the_second(events: int, milliseconds: int) -> Any:
            event = whole(events, milliseconds)
            event.gpuInstanceId, event.computeInstanceId = 2, 0
            return event

        rig.simulated.nvmlEventSetWait = of_the_second  # type: ignore[method-assign]
        rig.change({"gpus": [{"mig": ["1g.10gb", "1g.10gb"], "fault": "xid:4711"}]})
        assert reasons(hear(rig)) == {second.id: "Xid4711"}
        rig.change({"gpus": [{"mig": ["1g.10gb", "1g.10gb"], "fault": "xid:95"}]})
        assert reasons(hear(rig)) == {uuid(0): "Xid95", first.id: "Xid95", second.id: "Xid95"}

    def test_a_fabric_that_is_not_ready_counts_where_nvlinks_lead_into_it(self, folder: Path) -> None:
        rig = Rig(folder, gpus("none", "none", topology="nvswitch"))
        assert rig.source.look().host["clique"] == "51700000-0000-4000-8000-000000000000.1"
        told = rig.simulated.nvmlDeviceGetGpuFabricInfoV

        def not_ready(handle: Any, info: Any) -> int:
            told(handle, info)
            info._obj.state = pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
            return 0

        rig.simulated.nvmlDeviceGetGpuFabricInfoV = not_ready  # type: ignore[method-assign]
        sight = rig.source.look()
        assert set(reasons(sight).values()) == {"FabricNotReady"} and "clique" not in sight.host
        assert sight.host[f"fabric/{uuid(1)}"] == "in progress"
        rig.nvml.failing["nvmlDeviceGetNvLinkState", None] = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert rig.provider().look().troubles == {}, "a GPU of its own, as a virtual machine has it"


def called() -> set[str]:
    """The functions of NVML that the provider uses."""
    names: set[str] = set()
    for module in (nvidia, nvidia_cards, nvidia_links):
        names |= used(module)
    return {name for name in names if name.startswith("nvml") and callable(getattr(pynvml, name, None))}


def used(module: Any) -> set[str]:
    """The attributes that a module takes of pynvml, or of what serves as it."""
    attributes = (each for each in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(each, ast.Attribute))
    return {each.attr for each in attributes if ast.unparse(each.value).endswith(("nvml", "pynvml"))}


class TestTheRealLibrary:
    def test_has_what_the_provider_uses(self) -> None:
        names = {name for module in (nvidia, nvidia_cards, nvidia_links) for name in used(module)} - {"simulated"}
        assert len(called()) > 30 and {"NVML_ERROR_GPU_IS_LOST", "nvmlEventTypeXidCriticalError"} <= names
        for name in names | set(nvidia_cards._NOT_TOLD):
            assert hasattr(pynvml, name), name

    @pytest.mark.parametrize("name", sorted(name for name in vars(SimulatedNvml) if name.startswith("nvml")))
    def test_has_the_same_functions_as_the_simulated_one(self, name: str) -> None:
        real, simulated = (
            inspect.signature(getattr(library, name)) for library in (pynvml, SimulatedNvml(NvidiaMachine()))
        )
        assert len(real.parameters) == len(simulated.parameters)
        required = [
            sum(each.default is inspect.Parameter.empty for each in signature.parameters.values())
            for signature in (real, simulated)
        ]
        assert required[0] == required[1]

    def test_the_simulated_one_has_what_is_called_and_no_more(self) -> None:
        assert {name for name in vars(SimulatedNvml) if name.startswith("nvml")} == called()


CODES = sorted({value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")})
ABOUT_A_GPU = sorted(name for name in called() if name.startswith("nvmlDevice") and name != "nvmlDeviceGetCount")
OTHERS = sorted(called() - set(ABOUT_A_GPU))


class TestNothingSpreads:
    @settings(max_examples=150, deadline=None)
    @given(
        failing=st.dictionaries(st.sampled_from(ABOUT_A_GPU), st.sampled_from(CODES), max_size=len(ABOUT_A_GPU)),
        known=st.booleans(),
    )
    def test_whatever_fails_of_one_gpu_costs_no_other(
        self, tmp_path_factory: pytest.TempPathFactory, failing: dict[str, int], known: bool
    ) -> None:
        machine = {"gpus": [{}, {"mig": ["1g.10gb", "2g.20gb"]}, {}], "topology": "nvlink-pairs"}
        rig = Rig(tmp_path_factory.mktemp("rig"), machine)
        whole = rig.provider().look()
        if known:
            rig.source.look()
        rig.nvml.failing = {(name, 1): code for name, code in failing.items()}
        for _ in range(3):
            sight = hear(rig)
            mine = {card.id for card in sight.cards if uuid(1) in (card.id, card.parent)}
            assert [card for card in sight.cards if card.id not in mine] == [whole.cards[0], whole.cards[-1]]
            assert set(sight.troubles) <= mine
            assert {name: sight.readings[name] for name in (uuid(0), uuid(2))} == {
                name: whole.readings[name] for name in (uuid(0), uuid(2))
            }
            assert {each for each in whole.links if uuid(1) not in (each.a, each.b)} <= set(sight.links)
            assert uuid(1) in mine or not known, "what was known stays"
            assert uuid(1) in mine or sight.problem
        rig.nvml.failing = {}
        hear(rig)
        assert hear(rig).cards == whole.cards

    @settings(max_examples=150, deadline=None)
    @given(st.dictionaries(st.sampled_from(sorted(called())), st.sampled_from(CODES), max_size=len(called())))
    def test_whatever_fails_is_told_in_a_sentence(
        self, tmp_path_factory: pytest.TempPathFactory, failing: dict[str, int]
    ) -> None:
        rig = Rig(tmp_path_factory.mktemp("rig"), {"gpus": [{}, {"mig": ["1g.10gb"]}]})
        rig.nvml.failing = {(name, None): code for name, code in failing.items()}
        for _ in range(2):
            sentence = ""
            try:
                sentence = rig.source.look().problem
            except HardwareError as error:
                sentence = str(error)
            assert not sentence or sentence.endswith(".")
            rig.source.wait(0.001)
        rig.source.close()


NUMBERS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"-1", b"1", b"9" * 30, b"9" * 5000, b"1_0", "\u0661".encode(), b"\x00"]),
)
MINORS = st.lists(
    st.tuples(st.sampled_from([b"gpu0/gi1/access", b"gpu0/gi1/ci0/access", b"x"]), NUMBERS), max_size=4
).map(lambda lines: b"".join(b"%s %s\n" % line for line in lines))


@settings(max_examples=100, deadline=None)
@given(numa=NUMBERS, minors=st.binary(max_size=60) | MINORS)
def test_whatever_stands_in_the_kernels_files_a_look_is_one_and_comes_over(
    tmp_path_factory: pytest.TempPathFactory, numa: bytes, minors: bytes
) -> None:
    rig = Rig(tmp_path_factory.mktemp("rig"), {"gpus": [{"mig": ["1g.10gb"]}, {}]})
    whole = rig.source.look()
    for device in (rig.folder / "sys/bus/pci/devices").iterdir():
        (device / "numa_node").write_bytes(numa)
    (rig.folder / "proc/driver/nvidia-caps/mig-minors").write_bytes(minors)
    sight = rig.source.look()
    rig.source.close()
    assert decode(encode(sight), "nvidia") == sight
    assert [card.id for card in sight.cards] == [card.id for card in whole.cards]
    assert all(card.numa is None or card.numa < 4096 for card in sight.cards)


@pytest.mark.parametrize(("fault", "ends"), [("crash", -signal.SIGSEGV), ("hang", None)])
def test_what_takes_the_process_with_it_is_simulated_as_such(folder: Path, fault: str, ends: int | None) -> None:
    """The watcher is a process of its own because of these."""
    code = (
        "from pathlib import Path; from tests.nodeworkers.hardware.nvidia_rig import Rig, gpus\n"
        f"rig = Rig(Path({str(folder)!r}), gpus('none')); rig.source.look()\n"
        f"rig.change(gpus({fault!r})); print('looking', flush=True); rig.source.look()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path.cwd()) as child:
        assert child.stdout is not None and child.stdout.readline() == b"looking\n"
        if ends is not None:
            assert child.wait(30) == ends
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.3)
            os.kill(child.pid, signal.SIGKILL)
