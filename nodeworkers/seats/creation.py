"""Answers the container runtime whether a container with a seat may be created now (NRI): where seats are claimed by
DRA nobody else asks before a start.

Answered at once, for the runtime waits for nobody. What a pod says of its seat in its environment is held against who
holds it: whoever names another's is taken for a pod without a seat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from nodeworkers.devices.holdings import Holder
from nodeworkers.nri.values import Adjustment, Container, Happening, Pod, Refused
from nodeworkers.seats.gate import Gate
from planning.devices import offers


class Holdings(Protocol):
    """Who holds which device (`nodeworkers.devices.holdings`)."""

    @property
    def held(self) -> Mapping[str, Holder]:
        """By the device's id."""

    async def look(self) -> None:
        """Asks the kubelet now."""


class Creation:
    """For one node's NRI plugin. `group`: a seat's, '' for what is no seat of this node; `news`: something happened to
    a container.
    """

    def __init__(self, gate: Gate, holdings: Holdings, group: Callable[[str], str], news: Callable[[], None]) -> None:
        self._gate, self._holdings, self._group, self._news = gate, holdings, group, news

    async def decide(self, seat: str, pod: Pod, container: Container) -> Adjustment:
        """Nothing is changed of a container that may be created. Raises Refused."""
        group = self._group(seat)
        if not group or not await self._holds(seat, pod):
            return Adjustment()
        try:
            self._gate.ask(group, seat)
        except offers.Refused as refused:
            raise Refused(str(refused)) from refused
        return Adjustment()

    def observe(self, happening: Happening) -> None:
        self._news()

    async def _holds(self, seat: str, pod: Pod) -> bool:
        """Raises Refused where the kubelet has not said yet whose it is."""
        holder = self._holdings.held.get(seat)
        if holder is None or not holder.pod:
            await self._holdings.look()
            holder = self._holdings.held.get(seat)
        if holder is not None and not holder.pod:
            raise Refused(f"{seat} is held, and the kubelet has not said yet by whom. It is asked again.")
        return holder is not None and (holder.namespace, holder.pod) == (pod.namespace, pod.name)
