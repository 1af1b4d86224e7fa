"""Knows who holds which of the node's devices, for the allocation core: the kubelet says so (podresources), after each
Allocate has said so for a while. Tells where the two disagree.

Allocate carries no pod and there is no call for giving back, so the kubelet's list is the truth, with three limits: it
shows a device some time after it was given; a kubelet that is away tells nothing, which is not that nobody holds
anything; and one that was started while the API server is away lists no pods although their containers run. A device
that counts as held too long costs little; one given twice costs a tenant.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
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
_RELEASED = 4096  # claims given back that are kept in mind
_NAMED = 5  # devices that a sentence names
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holding:
    """A device that a container has, as the kubelet lists it."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """A device that a container has by DRA, as the kubelet lists it: `name` is its name there, and `claim` the UID of
    its claim, '' where the list does not tell.
    """

    namespace: str
    pod: str
    container: str
    name: str
    claim: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """The kubelet's list. `knows`: it has a pod of which only the API server can have told, so that what is not in it
    is nobody's.
    """

    devices: tuple[Holding, ...] = ()
    claimed: tuple[Claimed, ...] = ()
    knows: bool = False


class PodResources(Protocol):
    """The kubelet's podresources service (v1)."""

    async def pods(self) -> Listed:
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
        *,
        kept: Callable[[], Collection[str] | None],
        by_name: Callable[[str], tuple[str, str] | None],
        prepared: Callable[[str], bool],
    ) -> None:
        """Starts from what `records` has, and keeps them: what nobody holds is forgotten there, and what they lack is
        taken from the kubelet. `ours` tells the resources that this node serves by device plugin; `on_drift` is called
        once when a device drifts.

        `kept`: the devices that the kubelet's files say are given, None where they do not tell (Checkpoint.kept);
        called in a thread. `by_name`: the id and the resource of the device with a name in DRA, None for no device.
        `prepared`: whether the claim of a UID is on the record of prepared claims.
        """
        self._podresources, self._records, self._ours, self._on_drift = podresources, records, ours, on_drift
        self._clock, self._wall, self._kept = clock, wall, kept
        self._by_name, self._prepared = by_name, prepared
        self._states: dict[str, _State] = {}
        self._claims: dict[str, dict[str, Holder]] = {}  # by claim and device
        self._released: dict[str, None] = {}  # claims that the kubelet may list for a moment after it gave them back
        self._doubled: frozenset[str] = frozenset()
        self._held: Mapping[str, Holder] | None = None
        self._back = clock()  # since when the kubelet is there
        self._knows: bool | None = None  # whether it knows its pods; None: it has not listed any since it is there
        self.problem = "The kubelet has not been asked yet who holds which device."
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
            self._released.pop(claim, None)
            self._claim(resource, ids, claim)
            return
        now = self._clock()
        self._states.update({id: _State(Holder(resource), now) for id in ids})

    def released(self, claim: str) -> None:
        """Notes that a DRA claim's devices were given back."""
        self._held = None
        self._claims.pop(claim, None)
        self._released[claim] = None
        while len(self._released) > _RELEASED:
            del self._released[next(iter(self._released))]

    def kubelet_restarted(self) -> None:
        """Notes that the kubelet was started anew, which the next list may not show."""
        self._back, self._knows = self._clock(), None

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
                listed = await self._podresources.pods()
        except TimeoutError:
            self._away(f"The kubelet did not say within {_ANSWER_SECONDS:g} s who holds which device.")
        except PodResourcesError as error:
            self._away(str(error))
        else:
            if self.problem:
                self.problem = ""
                self._back = asked
                _log.info("The kubelet tells who holds which device.")
            shown = _by_device(each for each in listed.devices if self._ours(each.resource))
            self._take_in_claimed(listed.claimed, shown)
            self._take_in(shown, asked, await self._unsure(listed, shown, asked))

    def _away(self, problem: str) -> None:
        if problem != self.problem:
            _log.warning("%s What was known before still holds.", problem)
        self.problem, self._knows = problem, None

    async def _unsure(self, listed: Listed, shown: Collection[str], asked: float) -> Collection[str]:
        """The devices of which it does not follow from the list that nobody holds them, though it lacks them.

        A kubelet that has shown one pod of the API server's knows them all until it is started anew. Before, what it
        lacks is free only where its own files do not have it either.
        """
        if listed.knows:
            if self._knows is False:  # it learns of its pods just now, one after the other
                self._back = asked
                _log.info("The kubelet knows its pods again: what it does not show counts as free.")
            self._knows = True
        if self._knows:
            return ()
        missing = self._states.keys() - set(shown)
        kept = await asyncio.to_thread(self._kept) if missing else ()
        unsure = missing if kept is None else missing & set(kept)
        if unsure and self._knows is None:
            _log.warning(
                "The kubelet does not know its pods: it was started while the API server is away, or has none. Held "
                "until it does: %s.",
                _named(unsure),
            )
        self._knows = False
        return unsure

    def _take_in_claimed(self, claimed: Iterable[Claimed], shown: dict[str, _Pods]) -> None:
        """Which pods have the devices of claims; and claims that are on no record, for all records were lost."""
        self._held = None
        lost: dict[tuple[str, str], dict[str, str]] = {}
        for each in claimed:
            if each.claim in self._released or (device := self._by_name(each.name)) is None:
                continue
            id, resource = device
            holder = self._claims.get(each.claim, {}).get(id)
            if holder is not None:
                pod = replace(holder, namespace=each.namespace, pod=each.pod, containers=(each.container,), shown=True)
                self._claims[each.claim][id] = pod
            elif each.claim and not self._prepared(each.claim):  # one that is prepared has it to look at it, no more
                lost.setdefault((each.claim, resource), {})[id] = f"{each.namespace}/{each.pod}"
            elif not each.claim and not any(id in claim for claim in self._claims.values()):
                # For as long as it is shown: when such a claim is given back, nobody knows that it is it.
                pods = shown.setdefault(id, _Pods(resource))
                pods.containers.setdefault((each.namespace, each.pod), []).append(each.container)
        for (claim, resource), devices in lost.items():
            self._claim(resource, devices, claim)
            self._note(resource, list(devices), claim)
            for id, told in devices.items():
                self._tell_not_given(id, resource, told, f" by the claim {claim}")

    def _take_in(self, shown: Mapping[str, _Pods], asked: float, unsure: Collection[str]) -> None:
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
                self._tell_not_given(id, pods.resource, f"{namespace}/{pod}")
        self._look_for_doubled(shown)
        free = self._missed(shown, asked, unsure)
        for id in free:
            del self._states[id]
        if free:
            try:
                self._records.forget(free)
            except LedgerError as error:
                _log.warning("Who holds which device is not on record: %s", error)
        for resource, ids in taken.items():
            self._note(resource, ids)

    def _note(self, resource: str, ids: Collection[str], claim: str = "") -> None:
        try:
            self._records.remember_allocation(resource, ids, None, self._wall(), claim)
        except LedgerError as error:
            _log.warning("Who holds which device is not on record: %s", error)

    def _missed(self, shown: Collection[str], asked: float, unsure: Collection[str]) -> list[str]:
        """The devices that count as free from now on."""
        free = []
        for id, state in self._states.items():
            since = self._back if state.given is None else state.given
            if id in shown or since > asked:  # given while the kubelet made its list
                continue
            state.holder = replace(state.holder, shown=False)
            if id in unsure:
                state.misses = 0
                continue
            state.misses += 1
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

    def _tell_not_given(self, id: str, resource: str, pod: str, by: str = "") -> None:
        self._tell(
            "NotGiven",
            id,
            f"The pod {pod} holds {id} ({resource}){by}, and this node has no record of having given it. It is taken "
            "down as held.",
        )

    def _tell(self, kind: DriftKind, id: str, message: str) -> None:
        _log.warning("%s", message)
        self._on_drift(Drift(kind, id, message))

    def _claim(self, resource: str, ids: Collection[str], claim: str) -> None:
        self._claims.setdefault(claim, {}).update({id: Holder(resource, claim=claim) for id in ids})


def _named(ids: Collection[str]) -> str:
    first = sorted(ids)[:_NAMED]
    return ", ".join(first) + (f" and {len(ids) - len(first)} more" if len(ids) > len(first) else "")


def _by_device(listed: Iterable[Holding]) -> dict[str, _Pods]:
    """A device that several containers of one pod have, an init container's and the next one's, is held once."""
    found: dict[str, _Pods] = {}
    for each in listed:
        pods = found.setdefault(each.device_id, _Pods(each.resource))
        containers = pods.containers.setdefault((each.namespace, each.pod), [])
        if each.container not in containers:
            containers.append(each.container)
    return found
