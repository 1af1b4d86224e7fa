"""Knows who holds which of the node's devices, for the allocation core: the kubelet says so (podresources), after each
Allocate has said so for a while. Tells where the two disagree.

Allocate carries no pod and there is no call for giving back, so the kubelet's list is the truth, with two limits: it
shows a device some time after it was given, and a kubelet that was away tells nothing, which is not that nobody holds
anything. A device that counts as held too long costs little; one given twice costs a tenant.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, Protocol

from nodeworkers.devices.records import Records
from nodeworkers.ledger import LedgerError

POLL_SECONDS = 10.0
# For which a device counts as held after it was given, and each that was held after the kubelet came back, whatever it
# shows: a kubelet that has just started knows its pods only when the API server has told it.
GRACE_SECONDS = 60.0
MISSES = 2  # lists in a row without a device, until it counts as free
_ANSWER_SECONDS = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holding:
    """A device that a container has, as the kubelet lists it."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str


class PodResources(Protocol):
    """The kubelet's podresources service (v1)."""

    async def list(self) -> Sequence[Holding]:
        """All devices that containers have. Raises PodResourcesError where the kubelet does not answer."""


class PodResourcesError(Exception):
    """The kubelet does not tell who holds which device. The text says why."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a device. `pod` is '' for as long as the kubelet has not shown it, `shown` whether its last list did;
    `claim` is the uid of the DRA claim, '' without.
    """

    resource: str
    namespace: str = ""
    pod: str = ""
    containers: tuple[str, ...] = ()
    claim: str = ""
    shown: bool = False


DriftKind = Literal["NeverShown", "NotGiven", "Doubled"]


@dataclass(frozen=True, slots=True)
class Drift:
    """A device of which the kubelet and this node's record disagree; `message` says what that means."""

    kind: DriftKind
    device_id: str
    message: str


@dataclass(slots=True)
class _State:
    """What is known of one device that the device plugin gave or the kubelet showed."""

    holder: Holder
    given: float | None  # on the monotonic clock; None: not by this process
    misses: int = 0


@dataclass(slots=True)
class _Pods:
    """The pods that a list shows with one device."""

    resource: str
    containers: dict[tuple[str, str], list[str]] = field(default_factory=dict)


class Holdings:
    """Who holds what; for one event loop. `problem` says why the last list was not had, '' while lists come."""

    def __init__(
        self,
        podresources: PodResources,
        records: Records,
        ours: Callable[[str], bool],
        on_drift: Callable[[Drift], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Starts from what `records` has, and keeps them: what nobody holds is forgotten there, and what they lack is
        taken from the kubelet. `ours` tells the resources that this node serves by device plugin; `on_drift` is called
        once when a device drifts.
        """
        self._podresources, self._records, self._ours, self._on_drift = podresources, records, ours, on_drift
        self._clock, self._wall = clock, wall
        self._states: dict[str, _State] = {}
        self._claims: dict[str, dict[str, Holder]] = {}  # by claim and device
        self._doubled: frozenset[str] = frozenset()
        self._held: Mapping[str, Holder] | None = None
        self._back = clock()  # since when the kubelet is there
        self.problem = "The kubelet was not asked yet who holds which device."
        for allocation in records.allocations():
            if allocation.claim:
                self._claim(allocation.resource, allocation.ids, allocation.claim)
            else:
                for id in allocation.ids:
                    self._states[id] = _State(Holder(allocation.resource), None)

    @property
    def held(self) -> Mapping[str, Holder]:
        """Who holds each device that is held, by its id. A pod that the kubelet shows comes before a claim."""
        if self._held is None:
            held = {id: holder for claim in self._claims.values() for id, holder in claim.items()}
            held.update({id: state.holder for id, state in self._states.items() if id not in held or state.holder.pod})
            self._held = MappingProxyType(held)
        return self._held

    def given(self, resource: str, ids: Collection[str], claim: str = "") -> None:
        """Notes that these devices have just been given: held from now on, for a claim until `released`."""
        self._held = None
        if claim:
            self._claim(resource, ids, claim)
            return
        now = self._clock()
        self._states.update({id: _State(Holder(resource), now) for id in ids})

    def released(self, claim: str) -> None:
        """Notes that a DRA claim's devices were given back."""
        self._held = None
        self._claims.pop(claim, None)

    def kubelet_restarted(self) -> None:
        """Notes that the kubelet was started anew, which the next list may not show."""
        self._back = self._clock()

    async def run(self) -> None:
        """Asks the kubelet time and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_SECONDS)

    async def look(self) -> None:
        """Asks the kubelet once. Where it does not answer, all stays as it was."""
        asked = self._clock()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                listed = await self._podresources.list()
        except TimeoutError:
            self._away(f"The kubelet did not tell within {_ANSWER_SECONDS:g} s who holds which device.")
        except PodResourcesError as error:
            self._away(str(error))
        else:
            if self.problem:
                self.problem = ""
                self._back = asked
                _log.info("The kubelet tells who holds which device.")
            self._take_in(_by_device(each for each in listed if self._ours(each.resource)), asked)

    def _away(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("%s What was known of it stays.", problem)
        self.problem = problem

    def _take_in(self, shown: Mapping[str, _Pods], asked: float) -> None:
        self._held = None
        taken: dict[str, list[str]] = {}
        for id, pods in shown.items():
            (namespace, pod), containers = next(iter(pods.containers.items()))
            holder = Holder(pods.resource, namespace, pod, tuple(containers), shown=True)
            state = self._states.get(id)
            if state is not None:
                state.holder, state.misses = holder, 0
                continue
            self._states[id] = _State(holder, None)
            if not any(id in claim for claim in self._claims.values()):
                taken.setdefault(pods.resource, []).append(id)
                self._tell(
                    "NotGiven",
                    id,
                    f"The pod {namespace}/{pod} holds {id} ({pods.resource}), and this node has no record of having "
                    "given it. It is taken down as held.",
                )
        self._look_for_doubled(shown)
        free = self._missed(shown, asked)
        for id in free:
            del self._states[id]
        try:
            if free:
                self._records.forget(free)
            for resource, ids in taken.items():
                self._records.remember_allocation(resource, ids, None, self._wall())
        except LedgerError as error:
            _log.warning("Who holds which device is not on record: %s", error)

    def _missed(self, shown: Collection[str], asked: float) -> list[str]:
        """The devices that count as free from now on."""
        free = []
        for id, state in self._states.items():
            since = self._back if state.given is None else state.given
            if id in shown or since > asked:  # given while the kubelet made its list
                continue
            state.misses += 1
            state.holder = replace(state.holder, shown=False)
            if state.misses < MISSES or asked - max(since, self._back) < GRACE_SECONDS:
                continue
            free.append(id)
            if not state.holder.pod and state.given is not None:
                self._tell(
                    "NeverShown",
                    id,
                    f"{id} ({state.holder.resource}) was given {asked - since:.0f} s ago and the kubelet shows no pod "
                    "that holds it: the pod ended at once, or was not admitted. It counts as free.",
                )
        return free

    def _look_for_doubled(self, shown: Mapping[str, _Pods]) -> None:
        doubled = {id: pods for id, pods in shown.items() if len(pods.containers) > 1}
        for id in sorted(doubled.keys() - self._doubled):
            pods = " and ".join(f"{namespace}/{pod}" for namespace, pod in doubled[id].containers)
            self._tell(
                "Doubled",
                id,
                f"The kubelet shows {id} ({doubled[id].resource}) in more than one pod: {pods}. Before Kubernetes 1.34 "
                "that may be one that has ended; otherwise delete all but one of them.",
            )
        self._doubled = frozenset(doubled)

    def _tell(self, kind: DriftKind, id: str, message: str) -> None:
        _log.warning("%s", message)
        self._on_drift(Drift(kind, id, message))

    def _claim(self, resource: str, ids: Collection[str], claim: str) -> None:
        self._claims.setdefault(claim, {}).update({id: Holder(resource, claim=claim) for id in ids})


def _by_device(listed: Iterable[Holding]) -> dict[str, _Pods]:
    """A device that several containers of one pod have, an init container's and the next one's, is held once."""
    found: dict[str, _Pods] = {}
    for each in listed:
        pods = found.setdefault(each.device_id, _Pods(each.resource))
        containers = pods.containers.setdefault((each.namespace, each.pod), [])
        if each.container not in containers:
            containers.append(each.container)
    return found
