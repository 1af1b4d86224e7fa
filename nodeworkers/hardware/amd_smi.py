"""AMD's GPUs of a node, by what AMD's own `amd-smi static --json` prints.

Its JSON differs from release to release and says N/A wherever a GPU or a driver does not tell (APUs, partitions), so
that here only the architecture counts: without one a GPU is listed, and no kernels fit it. The architecture is the one
that is reported and never guessed from the product's name.

Source: amdsmi_cli and py-interface/amdsmi_interface.py of ROCm/amdsmi.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodeworkers.hardware.program import PATH, Printed, find, run
from nodeworkers.hardware.provider import NO_ARCH, UNKNOWN, HardwareError, said
from planning.caches.compatibility import GPU

PROGRAM = "amd-smi"
ARGUMENTS = ("static", "--asic", "--bus", "--driver", "--json")
DRIVER = Path("/sys/module/amdgpu")  # there while the driver is
MOST_PRINTED = 1 << 20  # bytes
TIMEOUT = 20.0  # seconds
_ARCH = re.compile(r"gfx(?P<generation>[0-9]{1,2})[0-9a-f]{2}")
# Releases of 2024 write the stepping in decimal, behind a zero too many, where the minor version is 0.
_DECIMAL = re.compile(r"gfx(?P<generation>9|1[0-9])0(?P<stepping>0[0-9]|1[0-5])")
_SERIAL = re.compile(r"(?:0x)?0*[1-9A-Fa-f][0-9A-Fa-f]*")  # all zeros is none
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_WAVES = {6: 64, 7: 64, 8: 64, 9: 64, 10: 32, 11: 32, 12: 32}  # of a generation, as Triton compiles for it
_WAVE_KEYS = ("wavefront_size", "wave_front_size", "wave_size", "warp_size")


class AmdSmi:
    """A provider. `path`: the folders, as in $PATH, where amd-smi is looked for; `driver`: exists while amdgpu is
    loaded; `timeout`: seconds.
    """

    simulated = False

    def __init__(self, path: str = PATH, driver: Path = DRIVER, timeout: float = TIMEOUT) -> None:
        self._path = path
        self._driver = driver
        self._timeout = timeout

    def gpus(self) -> tuple[GPU, ...]:
        """The GPUs that amd-smi lists; () where there is no such program or no driver. Blocks for as long as amd-smi
        takes. Raises HardwareError if it fails or prints what makes no sense.
        """
        program = find(PROGRAM, self._path)
        # Without its driver amd-smi fails; an image that brings it runs on other vendors' nodes as well.
        if program is None or not self._driver.exists():
            return ()
        printed = run([program, *ARGUMENTS], self._timeout, MOST_PRINTED)
        if printed.status:
            raise HardwareError(f"{PROGRAM} failed with status {printed.status}: {_last_words(printed)}")
        return read(printed.stdout)


def read(printed: bytes) -> tuple[GPU, ...]:
    """The GPUs in what amd-smi prints: a list, or an object with that list under `gpu_data`. Raises HardwareError."""
    listed = _json(printed)
    if isinstance(listed, Mapping):
        if "error" in listed:
            told = said(listed["error"]) or "it does not say why"
            raise HardwareError(f"{PROGRAM} reports an error: {told.rstrip('.')}; run it on the node.")
        listed = listed.get("gpu_data")
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) and "asic" in each for each in listed):
        raise _nonsense("no list of GPUs")
    return tuple(_gpu(each, identity) for each, identity in zip(listed, _ids(listed), strict=True))


def _json(printed: bytes) -> Any:
    """What stands after the warnings that some releases print first, such as those about the user's groups."""
    start = re.search(rb"^[ \t]*[\[{]", printed, re.MULTILINE)
    if start is None:
        raise _nonsense("no JSON")
    try:
        return json.loads(printed[start.start() :])
    except (ValueError, RecursionError):
        raise _nonsense("broken JSON") from None


def _nonsense(what: str) -> HardwareError:
    return HardwareError(
        f"{PROGRAM} printed {what}: run `{PROGRAM} {' '.join(ARGUMENTS)}` on the node; if that looks right, its "
        "release is one that berth does not know."
    )


def _last_words(printed: Printed) -> str:
    """The last line of what a failed amd-smi said, and what to do."""
    lines = (printed.stderr.strip() or printed.stdout.strip()).decode("utf-8", "replace").splitlines()
    told = said(lines[-1]) if lines else ""
    return f"{told.rstrip('.') or 'it does not say why'}; run it on the node and look for amdgpu in its kernel log."


def _part(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a GPU's entry; a section may be N/A as a whole."""
    part = entry.get(name)
    return part if isinstance(part, Mapping) else {}


def _ids(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """The serial number of each; its PCI address if it has none, or shares it as partitions do; or its place."""
    serials = [_fit(_SERIAL, _part(each, "asic").get("asic_serial")) for each in listed]
    buses = [_fit(_BUS, _part(each, "bus").get("bdf")) for each in listed]
    times = Counter([*serials, *buses])
    return [
        next((name for name in (serial, bus) if name and times[name] == 1), f"amd-gpu-{index}")
        for index, (serial, bus) in enumerate(zip(serials, buses, strict=True))
    ]


def _fit(form: re.Pattern[str], value: object) -> str:
    text = said(value)
    return text if form.fullmatch(text) else ""


def _gpu(entry: Mapping[str, Any], identity: str) -> GPU:
    asic, driver = _part(entry, "asic"), _part(entry, "driver")
    arch, wave = _arch(said(asic.get("target_graphics_version")))
    told = next((asic[key] for key in _WAVE_KEYS if asic.get(key) in (32, 64)), wave)
    return GPU(
        id=identity,
        product=said(asic.get("market_name")) or UNKNOWN,
        backend="hip",
        arch=arch,
        warp_size=int(told),
        driver=said(driver.get("version")) or said(driver.get("driver_version")) or UNKNOWN,
    )


def _arch(text: str) -> tuple[str, int]:
    """The architecture as compilers name it, and the size of its waves, 0 if unknown.

    `gfx9010` is what some releases make of gfx90a, and gfx18446744073709551615 is their way to say that there is none.
    """
    name = text.lower().split(":")[0]
    if match := _DECIMAL.fullmatch(name):
        name = f"gfx{match['generation']}0{int(match['stepping']):x}"
    match = _ARCH.fullmatch(name)
    return (name, _WAVES.get(int(match["generation"]), 0)) if match else (NO_ARCH, 0)
