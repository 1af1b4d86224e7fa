"""The GPUs that were found last, and the fingerprint by which the control plane notices that they, or what the node
remembers, are others. For the process of the node, which looks from time to time, and for its activities.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from nodeworkers.hardware.detected import Detected
from nodeworkers.hardware.provider import HardwareError, Provider, fingerprint
from planning.caches.compatibility import GPU

_log = logging.getLogger(__name__)


class GPUs(Protocol):
    """What a look at the hardware found last; None before the first that succeeded, and `problem` says why."""

    @property
    def gpus(self) -> tuple[GPU, ...] | None: ...

    @property
    def problem(self) -> str: ...

    @property
    def simulated(self) -> bool: ...


class Hardware:
    """The GPUs of a provider, remembered. `identity` is the ledger's: a node that lost its memory is another."""

    def __init__(self, provider: Provider, identity: str) -> None:
        self._provider = provider
        self._identity = identity
        self.gpus: tuple[GPU, ...] | None = None
        self.problem = "The node's GPUs were not looked at yet."

    @property
    def simulated(self) -> bool:
        return self._provider.simulated

    @property
    def fingerprint(self) -> str:
        """Of GPUs, drivers and ledger; '' while the GPUs are not known."""
        return "" if self.gpus is None else f"{fingerprint(self.gpus)}-{self._identity[:16]}"

    async def look(self) -> None:
        """Looks again. A driver that fails takes away no GPU that is known: `problem` says that it failed."""
        try:
            found = await asyncio.to_thread(self._provider.gpus)
            problem = " ".join(self._provider.problems) if isinstance(self._provider, Detected) else ""
        except HardwareError as error:
            found, problem = error.gpus, str(error)
        except Exception as error:  # a mistake of ours: this process answers the kubelet all the same
            found, problem = (), f"berth could not look at them: {error!r:.256}. Its log has the rest."
            if problem != self.problem:
                _log.exception("berth could not look at the node's GPUs")
        if problem and self.gpus is not None:
            answered = {gpu.id: gpu for gpu in found}
            found = tuple(answered.pop(gpu.id, gpu) for gpu in self.gpus) + tuple(answered.values())
        if problem and problem != self.problem:
            _log.warning("the node's GPUs: %s", problem)
        if found or not problem or self.gpus is not None:
            self.gpus = found
        self.problem = problem
