"""AMD's GPUs: what amd-smi prints in its releases, and programs in its place that fail, hang or never stop printing."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.hardware.amd_smi import ARGUMENTS, AmdSmi, read
from nodeworkers.hardware.provider import MOST_TEXT, HardwareError, fingerprint
from planning.caches.compatibility import GPU, Target

WARNING = "WARNING: User is missing the following required groups: render, video. Please add user to these groups.\n"


def entry(index: int = 0, arch: Any = "gfx942", serial: Any = "0x4162405E51BB99B0", **more: Any) -> dict[str, Any]:
    return {
        "gpu": index,
        "asic": {
            "market_name": "AMD Instinct MI300X",
            "vendor_id": "0x1002",
            "asic_serial": serial,
            "oam_id": "N/A",
            "num_compute_units": 304,
            "target_graphics_version": arch,
        },
        "bus": {"bdf": f"0000:{index:02x}:00.0", "max_pcie_width": 16},
        "driver": {"name": "amdgpu", "version": "6.10.5"},
        **more,
    }


def printed(*entries: Any) -> bytes:
    return json.dumps({"gpu_data": list(entries)}, indent=4).encode()


# --- what it prints ------------------------------------------------------------------------------------------------


def test_what_a_gpu_is() -> None:
    (gpu,) = read(printed(entry()))
    assert gpu == GPU("0x4162405E51BB99B0", "AMD Instinct MI300X", "hip", "gfx942", 64, "6.10.5")


def test_a_list_alone_as_older_releases_print_it() -> None:
    assert read(json.dumps([entry()]).encode()) == read(printed(entry()))


def test_warnings_before_the_json() -> None:
    assert read(WARNING.encode() + printed(entry())) == read(printed(entry()))


@pytest.mark.parametrize(
    ("told", "arch", "wave"),
    [
        ("gfx908", "gfx908", 64),
        ("gfx90a", "gfx90a", 64),
        ("gfx90a:sramecc+:xnack-", "gfx90a", 64),
        ("GFX940", "gfx940", 64),
        ("gfx950", "gfx950", 64),
        ("gfx1030", "gfx1030", 32),
        ("gfx1100", "gfx1100", 32),
        ("gfx1151", "gfx1151", 32),
        ("gfx1201", "gfx1201", 32),
        # Releases of 2024, which write the stepping in decimal.
        ("gfx9010", "gfx90a", 64),
        ("gfx9008", "gfx908", 64),
        ("gfx11000", "gfx1100", 32),
        ("gfx11001", "gfx1101", 32),
        ("gfx12001", "gfx1201", 32),
    ],
)
def test_architecture_and_wave_size(told: str, arch: str, wave: int) -> None:
    """Upstream derives the architecture from the product's name and takes every wave for 64: RDNA never matched."""
    (gpu,) = read(printed(entry(arch=told)))
    assert (gpu.arch, gpu.warp_size) == (arch, wave)
    assert gpu.target == Target("hip", arch, wave)


@pytest.mark.parametrize("told", ["N/A", "", None, 942, "gfx18446744073709551615", "gfxN/A", "Unknown", "sm_90"])
def test_a_gpu_without_an_architecture_is_listed_and_fits_no_kernels(told: object) -> None:
    (gpu,) = read(printed(entry(arch=told)))
    assert gpu.id == "0x4162405E51BB99B0" and gpu.target is None


def test_a_generation_whose_waves_are_unknown_fits_no_kernels() -> None:
    (gpu,) = read(printed(entry(arch="gfx1300")))
    assert (gpu.arch, gpu.warp_size, gpu.target) == ("gfx1300", 0, None)


def test_a_wave_size_that_is_told_counts() -> None:
    told = entry(arch="gfx1300")
    told["asic"]["wavefront_size"] = 32
    assert read(printed(told))[0].target == Target("hip", "gfx1300", 32)
    told["asic"]["wavefront_size"] = "N/A"
    assert read(printed(told))[0].target is None


def test_na_everywhere() -> None:
    """APUs and partitions tell little: what is missing has a name, and the GPU one by its address."""
    nothing = {"gpu": 0, "asic": {"market_name": "N/A", "asic_serial": "N/A"}, "bus": {"bdf": "0000:c4:00.0"}}
    assert read(printed(nothing, {"gpu": 1, "asic": "N/A", "bus": "N/A", "driver": "N/A"})) == (
        GPU("0000:c4:00.0", "unknown", "hip", "N/A", 0, "unknown"),
        GPU("amd-gpu-1", "unknown", "hip", "N/A", 0, "unknown"),
    )


def test_partitions_share_a_serial_number_and_no_id() -> None:
    shared = [entry(index, serial="0x01") for index in (0, 1)]
    assert [gpu.id for gpu in read(printed(*shared, entry(2)))] == [
        "0000:00:00.0",
        "0000:01:00.0",
        "0x4162405E51BB99B0",
    ]
    for each in shared:
        each["bus"] = "N/A"
    assert [gpu.id for gpu in read(printed(*shared))] == ["amd-gpu-0", "amd-gpu-1"]


def test_a_serial_number_of_zeros_is_none() -> None:
    assert [gpu.id for gpu in read(printed(entry(serial="0x0000000000000000")))] == ["0000:00:00.0"]


def test_different_gpus_of_one_node_are_all_listed() -> None:
    """Upstream's summary holds the first one only."""
    mixed = read(printed(entry(0, serial="0x1"), entry(1, arch="gfx1100", serial="0x2")))
    assert [str(gpu.target) for gpu in mixed] == ["hip gfx942 with warps of 64", "hip gfx1100 with warps of 32"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"no GPUs today",
        b"\xff\xfe{",
        b"{",
        b"[" * 200_000,
        b"[" + b"9" * 10_000 + b"]",
        b"null",
        b'"gpu_data"',
        b"{}",
        b'{"gpu_data": {}}',
        b"[1]",
        b'[{"gpu": 0}]',
        b"[]]",
    ],
    ids=lambda garbage: repr(garbage[:16]),
)
def test_garbage_is_told(garbage: bytes) -> None:
    with pytest.raises(HardwareError, match=r"amd-smi printed .* on the node"):
        read(garbage)


def test_an_error_in_json_is_told() -> None:
    with pytest.raises(HardwareError, match="reports an error: Permission Denied; run it"):
        read(b'{"error": "Permission Denied.", "code": -10}')
    with pytest.raises(HardwareError, match="it does not say why"):
        read(b'{"error": null}')


KEYS = ["gpu_data", "gpu", "asic", "bus", "driver", "market_name", "asic_serial", "bdf", "version", "error"]
KEYS += ["target_graphics_version", "wavefront_size", "driver_version"]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
scalars |= st.sampled_from(
    ["N/A", "gfx90a", "gfx9010", "gfx1100", "0x1", "0000:03:00.0", "amd-gpu-0", "\ud800", 64, 32]
)
documents = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS), inner), max_leaves=30
)
entries = st.fixed_dictionaries({"asic": documents}, optional={"bus": documents, "driver": documents})
sections = st.fixed_dictionaries(
    {"asic": st.dictionaries(st.sampled_from(KEYS), scalars)},
    optional={each: st.dictionaries(st.sampled_from(KEYS), scalars) for each in ("bus", "driver")},
)


def answers(output: bytes) -> None:
    """GPUs that can go anywhere, or a HardwareError with a sentence."""
    try:
        gpus = read(output)
    except HardwareError as error:
        sentence = str(error)
    else:
        sentence = "."
        fit_for_a_status(gpus)
    assert sentence.endswith(".") and sentence.isprintable()


def fit_for_a_status(gpus: tuple[GPU, ...]) -> None:
    assert len({gpu.id for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        for text in (gpu.id, gpu.product, gpu.arch, gpu.driver):
            assert text and text.isprintable() and len(text) <= MOST_TEXT
            text.encode("utf-8")
        assert gpu.warp_size in (0, 32, 64)
    assert fingerprint(gpus) == fingerprint(reversed(gpus))


@given(documents | st.lists(entries | sections) | st.fixed_dictionaries({"gpu_data": st.lists(entries | sections)}))
def test_whatever_json_it_prints(document: object) -> None:
    answers(json.dumps(document).encode())


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_whatever_it_prints(output: bytes) -> None:
    answers(output)
    answers(b"[" + output)


# --- programs in its place -----------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    folder = tmp_path / "amdgpu"
    folder.mkdir()
    return folder


def installed(tmp_path: Path, script: str) -> str:
    program = tmp_path / "amd-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(tmp_path)


def test_the_program_is_asked(tmp_path: Path, driver: Path) -> None:
    (tmp_path / "answer").write_bytes(printed(entry()))
    path = installed(
        tmp_path,
        f'echo "$@" > {tmp_path}/asked\nenv > {tmp_path}/environment\necho SyntaxWarning >&2\ncat {tmp_path}/answer',
    )
    assert AmdSmi(path, driver).gpus() == read(printed(entry()))
    assert (tmp_path / "asked").read_text().split() == list(ARGUMENTS)
    names = {line.split("=")[0] for line in (tmp_path / "environment").read_text().splitlines()}
    assert names <= {"PATH", "LC_ALL", "PWD", "SHLVL", "OLDPWD", "_"}, "nothing of the node process's environment"


def test_no_program_or_no_driver_is_no_gpus(tmp_path: Path, driver: Path) -> None:
    assert AmdSmi(str(tmp_path), driver).gpus() == ()
    path = installed(tmp_path, f"touch {tmp_path}/ran")
    assert AmdSmi(path, tmp_path / "no driver").gpus() == ()
    assert not (tmp_path / "ran").exists()


def test_the_environments_path_is_not_searched(tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", installed(tmp_path, "exit 1"), prepend=os.pathsep)
    assert AmdSmi(str(empty), driver).gpus() == ()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo one >&2; echo 'ERROR: no devices.' >&2; exit 255", "status 255: ERROR: no devices; run it"),
        ("echo 'error on stdout'; exit 3", "status 3: error on stdout; run it"),
        ("exit 3", "status 3: it does not say why; run it"),
        ("kill -9 $$", "status -9: "),
        ("exit 0", "printed no JSON"),
    ],
)
def test_a_program_that_fails_is_told(tmp_path: Path, driver: Path, script: str, told: str) -> None:
    with pytest.raises(HardwareError, match=told):
        AmdSmi(installed(tmp_path, script), driver).gpus()


def test_a_program_that_cannot_be_started(tmp_path: Path, driver: Path) -> None:
    path = installed(tmp_path, "")
    (tmp_path / "amd-smi").write_bytes(b"\x7fELF, or not")
    with pytest.raises(HardwareError, match=r"amd-smi cannot be started: .*; install it anew"):
        AmdSmi(path, driver).gpus()


@pytest.mark.parametrize("output", ["", ">&2"], ids=["stdout", "stderr"])
def test_a_program_that_never_stops_printing_is_stopped(tmp_path: Path, driver: Path, output: str) -> None:
    path = installed(tmp_path, f"exec yes {tmp_path} {output}")
    with pytest.raises(HardwareError, match="printed more than 1048576 bytes"):
        AmdSmi(path, driver).gpus()
    assert gone(str(tmp_path))


@pytest.mark.parametrize("script", ["exec {sleep}", "exec >&- 2>&-; exec {sleep}", "{sleep} & echo '[]'"])
def test_a_program_that_hangs_is_stopped_with_all_it_started(tmp_path: Path, driver: Path, script: str) -> None:
    """Also one that has closed its output, and one that is gone but left a child behind that holds it."""
    sleep = f"sleep 600.{os.getpid()}{time.monotonic_ns()}"  # like no other process
    path = installed(tmp_path, script.format(sleep=sleep))
    began = time.monotonic()
    with pytest.raises(HardwareError, match=r"did not answer within 0\.5 seconds"):
        AmdSmi(path, driver, timeout=0.5).gpus()
    assert time.monotonic() - began < 20
    assert gone(str(tmp_path)) and gone(sleep.split()[1])


def gone(argument: str) -> bool:
    """Whether no process with that in its command line runs any more; what was killed may need a moment."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(argument in line for line in command_lines()):
            return True
        time.sleep(0.02)
    return False


def command_lines() -> Iterator[str]:
    """Of all processes; those of zombies are empty."""
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) != os.getpid():
            with contextlib.suppress(OSError):
                yield (Path("/proc") / pid / "cmdline").read_text(errors="replace")


def test_a_path_with_spaces(tmp_path: Path, driver: Path) -> None:
    """No shell takes it apart."""
    folder = tmp_path / "a b; exit 1"
    folder.mkdir()
    answer = tmp_path / "answer"
    answer.write_bytes(printed(entry()))
    assert len(AmdSmi(installed(folder, f"cat {shlex.quote(str(answer))}"), driver).gpus()) == 1
