"""The GPUs that were found last, for kernel caches, and the fingerprint by which the control plane notices that they,
or what the node remembers, are others. For the process of the node and for its activities.

What a vendor's watcher sees is taken from it, so that no driver is called here. Others are looked at from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from nodeworkers.hardware.provider import NO_ARCH, HardwareError, Provider, fingerprint
from planning.caches.compatibility import GPU
from planning.devices.cards import Sight, Vendor

WATCHED: tuple[Vendor, ...] = ("nvidia",)  # whose cards tell all that kernels ask for
WARP = 32  # of every NVIDIA GPU; NVML does not tell it
_log = logging.getLogger(__name__)


class GPUs(Protocol):
    """What a look at the hardware found last; None before the first that succeeded, and `problem` says why."""

    @property
    def gpus(self) -> tuple[GPU, ...] | None: ...

    @property
    def problem(self) -> str: ...

    @property
    def simulated(self) -> bool: ...


@dataclass(slots=True)
class _Part:
    """What one vendor's look found last."""

    gpus: tuple[GPU, ...] | None = None
    problem: str = "The node's GPUs were not looked at yet."
    simulated: bool = False

    def take(self, found: tuple[GPU, ...], problem: str) -> None:
        """A look that failed takes away no GPU that is known."""
        if problem and self.gpus is not None:
            answered = {gpu.id: gpu for gpu in found}
            found = tuple(answered.pop(gpu.id, gpu) for gpu in self.gpus) + tuple(answered.values())
        if problem and problem != self.problem:
            _log.warning("the node's GPUs: %s", problem)
        if found or not problem or self.gpus is not None:
            self.gpus = found
        self.problem = problem


class Hardware:
    """The GPUs of a node, remembered: those of `provider`, and of the vendors in `watched` what is `seen`. `identity`
    is the ledger's: a node that lost its memory is another.
    """

    def __init__(self, provider: Provider, identity: str, watched: Collection[Vendor] = ()) -> None:
        self._provider = provider
        self._identity = identity
        self._watched = {vendor: _Part() for vendor in watched}
        self._provided = _Part(simulated=provider.simulated)

    @property
    def gpus(self) -> tuple[GPU, ...] | None:
        """Of all vendors that could be looked at; None while none could, or the one that could has none."""
        parts = (*self._watched.values(), self._provided)
        found = tuple(gpu for part in parts for gpu in part.gpus or ())
        return found if found or all(part.gpus is not None for part in parts) else None

    @property
    def problem(self) -> str:
        """What could not be looked at, sentences; '' if all could."""
        told = [part.problem for part in (*self._watched.values(), self._provided)]
        return " ".join(filter(None, dict.fromkeys(told)))

    @property
    def simulated(self) -> bool:
        seen = any(part.simulated and part.gpus for part in self._watched.values())
        return seen or self._provided.simulated

    @property
    def fingerprint(self) -> str:
        """Of GPUs, drivers and ledger; '' while the GPUs are not known."""
        gpus = self.gpus
        return "" if gpus is None else f"{fingerprint(gpus)}-{self._identity[:16]}"

    def seen(self, sight: Sight) -> None:
        """A watcher has looked. One of a vendor that is not `watched` says nothing here."""
        part = self._watched.get(sight.vendor)
        if part is not None:
            part.simulated = sight.simulated
            part.take(_of(sight), sight.problem)

    def silent(self, vendor: Vendor, why: str) -> None:
        """A watcher hangs, or is gone; `why` is a sentence."""
        if (part := self._watched.get(vendor)) is not None:
            part.take((), why)

    async def look(self) -> None:
        """Asks the provider again. `problem` says that it failed."""
        try:
            found, problem = await asyncio.to_thread(self._provider.gpus), ""
        except HardwareError as error:
            found, problem = (), str(error)
        except Exception as error:  # a mistake of ours: this process answers the kubelet all the same
            found, problem = (), f"berth could not look at them: {error!r:.256}. Its log has the rest."
            if problem != self._provided.problem:
                _log.exception("berth could not look at the node's GPUs")
        self._provided.take(found, problem)


def _of(sight: Sight) -> tuple[GPU, ...]:
    """A GPU in MIG mode stays one here: its instances run what it runs, and kernels ask for nothing else."""
    return tuple(
        GPU(card.id, card.product, "cuda", card.arch or NO_ARCH, WARP, card.driver)
        for card in sight.cards
        if not card.parent
    )
