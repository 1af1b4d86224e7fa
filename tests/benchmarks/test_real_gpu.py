"""The comparison of real GPUs with nvidia-smi, against what nvidia-smi prints and a simulated machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks import real_gpu
from nodeworkers.hardware.nvidia import Nvidia
from planning.devices.cards import Sight
from tests.nodeworkers.hardware.nvidia_rig import Rig, gpus, uuid

# Of nvidia-smi 580, shortened.
QUERY = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
  <timestamp>Sun Nov 22 10:00:00 2026</timestamp>
  <driver_version>590.44.01-simulated</driver_version>
  <cuda_version>13.1</cuda_version>
  <attached_gpus>2</attached_gpus>
  <gpu id="00000000:10:00.0">
    <product_name>NVIDIA H100 80GB HBM3 (simulated)</product_name>
    <uuid>{uuid(0)}</uuid>
    <minor_number>0</minor_number>
    <pci><pci_bus_id>00000000:10:00.0</pci_bus_id></pci>
    <fb_memory_usage><total>81559 MiB</total><reserved>495 MiB</reserved></fb_memory_usage>
  </gpu>
  <gpu id="00000000:11:00.0">
    <product_name>NVIDIA H100 80GB HBM3 (simulated)</product_name>
    <uuid>{uuid(1)}</uuid>
    <minor_number>1</minor_number>
    <pci><pci_bus_id>00000000:11:00.0</pci_bus_id></pci>
    <fb_memory_usage><total>81559 MiB</total><reserved>495 MiB</reserved></fb_memory_usage>
  </gpu>
</nvidia_smi_log>
"""
MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tPXB\t0-31\t0\t\tN/A
GPU1\tNV4\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.fixture
def sight(tmp_path: Path) -> Sight:
    return Rig(tmp_path, gpus("none", "none", topology="nvlink-pairs")).source.look()


def test_what_nvidia_smi_prints_is_what_is_seen(sight: Sight) -> None:
    assert real_gpu.matrix(MATRIX) == {(0, 1): ("nvlink", 4)}
    assert real_gpu.disagreements(sight, real_gpu.described(QUERY), real_gpu.matrix(MATRIX)) == []


def test_each_difference_is_told(sight: Sight) -> None:
    theirs = real_gpu.described(QUERY.replace("<minor_number>1", "<minor_number>3"))
    assert real_gpu.disagreements(sight, theirs, real_gpu.matrix(MATRIX.replace("NV4", "SYS"))) == [
        f"{uuid(1)}: index is 1 to berth and 3 to nvidia-smi.",
        "GPU 0 and 1 are connected by ('nvlink', 4) to berth and by ('cross-cpu', 0) to nvidia-smi.",
    ]
    fewer = dataclasses.replace(sight, cards=sight.cards[:1])
    assert f"{uuid(1)} is listed by nvidia-smi alone." in real_gpu.disagreements(fewer, theirs, {})
    assert f"{uuid(1)} is listed by berth alone." in real_gpu.disagreements(sight, {uuid(0): theirs[uuid(0)]}, {})


def test_a_machine_without_a_gpu_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(tmp_path, gpus(driver="none"))
    monkeypatch.setattr(real_gpu, "Nvidia", lambda: rig.source)
    monkeypatch.setattr(sys, "argv", ["real_gpu"])
    assert real_gpu.main() == 2
    assert capsys.readouterr().out.startswith("This machine has no NVIDIA GPU with a driver")


def test_all_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(tmp_path, gpus("none", "remap-failed", topology="nvlink-pairs"))
    monkeypatch.setattr(real_gpu, "Nvidia", lambda: rig.source)
    monkeypatch.setattr(real_gpu, "smi", lambda *options: QUERY if "-q" in options else MATRIX)
    monkeypatch.setattr(sys, "argv", ["real_gpu", "--looks", "3", "--json", str(tmp_path / "out.json")])
    assert real_gpu.main() == 0
    assert "RowRemapFailed" in capsys.readouterr().out
    assert '"disagreements": []' in (tmp_path / "out.json").read_text()
    assert isinstance(rig.source, Nvidia)
