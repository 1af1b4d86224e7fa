"""The simulated machine's NVIDIA GPUs: what may be written, what is laid out, and what is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pynvml
import pytest
import yaml
from pydantic import ValidationError

from nodeworkers.hardware.machine_nvidia import MOST_GPUS, NvidiaMachine, lay_out, simulated_gpus
from nodeworkers.hardware.machine_nvml import SimulatedNvml
from tests.nodeworkers.hardware.nvidia_rig import Rig, gpus, uuid


def test_little_needs_to_be_written() -> None:
    machine = NvidiaMachine.model_validate(yaml.safe_load("gpus: [{product: H100, count: 8}]"))
    found = simulated_gpus(machine)
    assert [gpu.numa for gpu in found.values()] == [0] * 4 + [1] * 4
    assert len({gpu.uuid for gpu in found.values()}) == 8 and all(
        gpu.uuid.startswith("GPU-5170") for gpu in found.values()
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpu": []},
        {"gpus": [{"product": "H900"}]},
        {"gpus": [{"count": 0}]},
        {"gpus": [{"count": 100}, {"count": 29}]},
        {"gpus": [{"fault": "xid:"}]},
        {"gpus": [{"fault": "sulking"}]},
        {"gpus": [{"mig": ["9g.1gb"]}]},
        {"gpus": [{"pids": [0]}]},
        {"gpus": [{"count": 2}], "topology": "star"},
        {"gpus": [{"count": 2}], "topology": [{"a": 0, "b": 2}]},
        {"gpus": [{"count": 2}], "topology": [{"a": 1, "b": 1}]},
        {"gpus": [{"count": 2}], "topology": [{"a": 0, "b": 1, "connection": "nvlink"}]},
        {"driver": "newest"},
    ],
)
def test_what_makes_no_machine_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NvidiaMachine.model_validate(wrong)


def test_the_largest_machine(tmp_path: Path) -> None:
    sight = Rig(tmp_path, {"gpus": [{"count": MOST_GPUS}]}).source.look()
    assert len({card.address for card in sight.cards}) == len({card.id for card in sight.cards}) == MOST_GPUS
    assert all(card.numa is not None for card in sight.cards)


def test_device_nodes_are_those_of_null_where_they_may_be_made(tmp_path: Path) -> None:
    lay_out(tmp_path, NvidiaMachine.model_validate(gpus("none", "none")))
    dev = tmp_path / "dev"
    names = {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"}
    assert {each.name for each in dev.iterdir()} == names
    if os.geteuid() == 0:
        for name in names:
            found = (dev / name).stat()
            assert stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3) and found.st_mode & 0o666 == 0o666


def test_plain_files_stand_for_device_nodes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "mknod", refused)
    lay_out(tmp_path, NvidiaMachine.model_validate(gpus("none")))
    assert (tmp_path / "dev/nvidia0").is_file()


def test_what_is_laid_out_follows_the_machine_and_leaves_others_files_alone(tmp_path: Path) -> None:
    others = [tmp_path / "dev/tenstorrent/0", tmp_path / "sys/bus/pci/devices/0000:99:00.0/numa_node"]
    for each in others:
        each.parent.mkdir(parents=True)
        each.write_text("1")
    lay_out(tmp_path, NvidiaMachine.model_validate({"gpus": [{}, {"mig": ["1g.10gb"]}]}))
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    assert minors.read_text() == "gpu1/gi1/access 3\ngpu1/gi1/ci0/access 4\n"
    lay_out(tmp_path, NvidiaMachine.model_validate(gpus("none", "gone")))
    assert {each.name for each in (tmp_path / "dev").glob("nvidia[0-9]*")} == {"nvidia0"}
    assert not list((tmp_path / "dev/nvidia-caps").iterdir()) and minors.read_text() == ""
    assert [each.name for each in (tmp_path / "sys/bus/pci/drivers/nvidia").iterdir()] == ["0000:10:00.0"]
    lay_out(tmp_path, NvidiaMachine.model_validate(gpus("none", driver="none")))
    assert {each.name for each in (tmp_path / "dev").iterdir()} == {"tenstorrent", "nvidia-caps"}
    assert all(each.exists() for each in others)


def test_one_that_is_gone_leaves_the_others_what_they_are(tmp_path: Path) -> None:
    rig = Rig(tmp_path, gpus("none", "none", "none"))
    _, _, third = rig.source.look().cards
    rig.change(gpus("none", "gone", "none"))
    assert [card.id for card in rig.source.look().cards] == [uuid(0), uuid(2)]
    assert rig.source.look().cards[1] == third


def test_errors_are_pynvmls_own() -> None:
    nvml = SimulatedNvml(NvidiaMachine.model_validate(gpus("none", "lost")))
    with pytest.raises(pynvml.NVMLError, match="Uninitialized"):
        nvml.nvmlDeviceGetCount()
    nvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError, match="GPU is lost"):
        nvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(pynvml.NVMLError, match="Timeout"):
        nvml.nvmlEventSetWait(nvml.nvmlEventSetCreate(), 1)
    with pytest.raises(AttributeError, match="the simulated NVML has no nvmlDeviceGetSerial"):
        nvml.nvmlDeviceGetSerial  # noqa: B018
