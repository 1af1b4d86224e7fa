"""All GPUs of a node, of every vendor whose driver is there, for the node process. A vendor that fails hides none of
the others' GPUs and is told. A new vendor is one file beside this one, and one line in VENDORS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nodeworkers.hardware.amd_smi import AmdSmi
from nodeworkers.hardware.nvml import Nvml
from nodeworkers.hardware.provider import HardwareError, Provider
from planning.caches.compatibility import GPU

VENDORS: tuple[Callable[[], Provider], ...] = (Nvml, AmdSmi)


class Detected:
    """A provider of all that `providers` (None: every vendor) have, in their order.

    `problems`: a sentence for each that failed at the last call of `gpus`. While there are any, GPUs may be missing.
    """

    simulated = False

    def __init__(self, providers: Sequence[Provider] | None = None) -> None:
        self._providers = [vendor() for vendor in VENDORS] if providers is None else list(providers)
        self.problems: tuple[str, ...] = ()

    def gpus(self) -> tuple[GPU, ...]:
        """The GPUs that answer. Blocks for as long as all drivers together; raises no HardwareError: see `problems`."""
        found: list[GPU] = []
        problems: list[str] = []
        for provider in self._providers:
            try:
                found += provider.gpus()
            except HardwareError as error:
                found += error.gpus
                problems.append(str(error))
        self.problems = tuple(problems)
        return tuple(found)
