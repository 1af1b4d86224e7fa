"""v1.DRAPlugin, which the kubelet calls for every claim of a pod before its containers start, and after they are gone.

Law 3 has one exception here: what the scheduler gave to a claim stands in the ResourceClaim alone, so a claim that
comes for the first time is read from the API server, once and with a short deadline. (The kubelet has just read the
same object from it.) What is prepared is on record, and from then on every call is answered from that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc.aio

from kube.client import KubeClient
from kube.errors import KubeError, NotFound
from kube.resources import Resource
from nodeworkers.device_plugin.beside import Beside
from nodeworkers.devices.frontend import Devices
from nodeworkers.dra.prepared import Given, Part, Prepared, PreparedClaims, edits
from nodeworkers.ledger import LedgerError
from nodeworkers.rpc import dra_pb2
from planning.devices.claims import CDI_KIND, Portion, Result, cdi_device, portions, results
from planning.devices.offers import Held, Refused

RESOURCECLAIMS: Final = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim", True)
READ_SECONDS: Final = 8.0
"""How long the API server has for a claim; the kubelet waits 45 s for the whole call."""

RETURN_SECONDS: Final = 8.0
"""How long devices of a claim that is being given back are waited for: a kubelet that was refused tries again only
after a minute or more.
"""

READY_SECONDS: Final = 26.0
"""How long cards have to be made ready, which takes 25 s at most; with the others it is less than 45 s."""

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Plugin:
    """k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin. What goes wrong with a claim is told of that claim alone, in a sentence
    that ends in an Event of the pod; the kubelet comes again.
    """

    def __init__(self, kube: KubeClient, node: str, devices: Devices, claims: PreparedClaims) -> None:
        self._kube, self._node, self._devices, self._claims = kube, node, devices, claims
        self._turn = asyncio.Lock()  # claims come one after the other to the ledger, as the kubelet's admissions do
        self._under_way: dict[str, asyncio.Task[Prepared]] = {}
        self._given_back = asyncio.Event()  # another one each time
        self._unwanted: set[str] = set()  # claims that are to be given back while they are handed out
        self._beside = Beside()

    async def NodePrepareResources(
        self, request: dra_pb2.NodePrepareResourcesRequest, context: Context
    ) -> dra_pb2.NodePrepareResourcesResponse:
        """Hands out the devices of claims; of one that is prepared, says again what it got."""
        told = await asyncio.gather(*(_answered(self._prepare, claim) for claim in request.claims))
        answer = dra_pb2.NodePrepareResourcesResponse()
        for claim, outcome in zip(request.claims, told, strict=True):
            if isinstance(outcome, str):
                _log.warning("The ResourceClaim %s/%s is not prepared: %s", claim.namespace, claim.name, outcome)
                answer.claims[claim.uid].error = outcome
            else:
                answer.claims[claim.uid].devices.extend(_device(given) for given in outcome)
        return answer

    async def NodeUnprepareResources(
        self, request: dra_pb2.NodeUnprepareResourcesRequest, context: Context
    ) -> dra_pb2.NodeUnprepareResourcesResponse:
        """Takes the devices of claims back. A claim that nobody knows was given back before."""
        told = await asyncio.gather(*(_answered(self._unprepare, claim) for claim in request.claims))
        answer = dra_pb2.NodeUnprepareResourcesResponse()
        for claim, outcome in zip(request.claims, told, strict=True):
            if isinstance(outcome, str):
                _log.warning("The ResourceClaim %s/%s is not given back: %s", claim.namespace, claim.name, outcome)
                answer.claims[claim.uid].error = outcome
            else:
                answer.claims[claim.uid].SetInParent()  # each has an entry, also where there is nothing to say
        return answer

    async def _prepare(self, asked: dra_pb2.Claim) -> Sequence[Given]:
        known = self._claims.get(asked.uid)
        if known is None:
            given = results(await self._read(asked), asked.uid, self._node)
            task = self._under_way.get(asked.uid)
            if task is None:
                task = self._under_way[asked.uid] = asyncio.create_task(self._hand_out(asked, given))
                task.add_done_callback(lambda _: self._under_way.pop(asked.uid))
            # A kubelet that stops waiting ends the wait alone: what is half handed out would be on no record.
            known = await asyncio.shield(task)
        else:
            await asyncio.to_thread(self._claims.refresh, known)
        return known.devices

    async def _read(self, asked: dra_pb2.Claim) -> dict[str, Any]:
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await self._kube.get(RESOURCECLAIMS, asked.name, asked.namespace)
        except TimeoutError:
            raise Refused(
                f"The API server did not say within {READ_SECONDS:.0f} s which devices the ResourceClaim "
                f"{asked.namespace}/{asked.name} has. It is asked again when the kubelet tries again."
            ) from None
        except NotFound:
            raise Refused(
                f"There is no ResourceClaim {asked.namespace}/{asked.name}: it was deleted. Delete the pod as well."
            ) from None
        except ValueError as wrong:
            raise Refused(f"What the kubelet asked for is not a ResourceClaim: {wrong}.") from wrong

    async def _hand_out(self, asked: dra_pb2.Claim, given: Sequence[Result]) -> Prepared:
        """All of a claim's devices or none: what the ledger has of it is given back if anything goes wrong."""
        known = self._claims.get(asked.uid)
        if known is not None:
            return known
        # A claim whose record was lost may have its devices nevertheless, in a pod that runs: then they stay its own.
        had = self._devices.holds(asked.uid)
        try:
            parts, prepared = await self._allocate_in_turn(asked, given, had=had)
            await self._make_ready(asked, parts)  # cards that are being reset hold up no other claim
            async with self._turn:
                await asyncio.to_thread(self._claims.put, prepared)
        except Exception:
            if not had:
                self._release(asked)
            raise
        return prepared

    async def _allocate_in_turn(
        self, asked: dra_pb2.Claim, given: Sequence[Result], *, had: bool
    ) -> tuple[Sequence[Portion], Prepared]:
        """Waits for claims that are being given back: the scheduler gives their devices away before they are."""
        until = asyncio.get_running_loop().time() + RETURN_SECONDS
        while True:
            try:
                async with self._turn:
                    parts = portions(given, self._devices.offered())
                    return parts, self._allocate(asked, parts)
            except Held:
                if not had:
                    self._devices.release(asked.uid)
                if asked.uid in self._unwanted or not await self._something_returns(until):
                    raise

    async def _something_returns(self, until: float) -> bool:
        try:
            async with asyncio.timeout_at(until):
                await self._given_back.wait()
        except TimeoutError:
            return False
        return True

    async def _make_ready(self, asked: dra_pb2.Claim, parts: Sequence[Portion]) -> None:
        """All at once: what a claim that is refused has begun ends by itself, and begins nothing any more."""
        mine: dict[str, list[str]] = {}
        for part in parts:
            if not part.admin:
                mine.setdefault(part.resource, []).extend(part.ids)
        ready = (
            self._beside.run(
                f"before_start {asked.uid} {resource}",
                partial(self._devices.before_start, resource, ids),
                READY_SECONDS,
            )
            for resource, ids in mine.items()
        )
        try:
            await asyncio.gather(*ready)
        except TimeoutError:
            raise Refused(
                f"{', '.join(id for ids in mine.values() for id in ids)} cannot be made ready for a container within "
                f"{READY_SECONDS:.0f} s. The kubelet tries again; see berth's log on this node."
            ) from None

    def _allocate(self, asked: dra_pb2.Claim, parts: Sequence[Portion]) -> Prepared:
        devices: list[Given] = []
        own: dict[str, dict[str, Any]] = {}
        given: list[Part] = []
        for number, part in enumerate(parts):
            injection = self._devices.allocate(part.resource, part.ids, claim=asked.uid, admin=part.admin)
            if not part.admin:
                given.append(Part(part.resource, part.ids, injection))
            cdi = injection.cdi
            needed = edits(injection)
            if needed:
                name = cdi_device(asked.uid, number)
                own[name] = needed
                cdi = (*cdi, f"{CDI_KIND}={name}")
            for index, result in enumerate(part.results):
                # What a request's devices need together is asked for once, with the first of them.
                names = cdi if index == 0 else ()
                devices.append(Given(result.request, result.pool, result.device, names, result.share))
        return Prepared(asked.uid, asked.namespace, asked.name, tuple(devices), own, tuple(given))

    async def _unprepare(self, asked: dra_pb2.Claim) -> Sequence[Given]:
        await asyncio.shield(self._take_back(asked))
        return ()

    async def _take_back(self, asked: dra_pb2.Claim) -> None:
        """The record goes first: from then on no container starts with what the CDI spec named."""
        if (task := self._under_way.get(asked.uid)) is not None:
            self._unwanted.add(asked.uid)
            self._wake()
            await asyncio.wait([task])
            self._unwanted.discard(asked.uid)
        async with self._turn:
            await asyncio.to_thread(self._claims.remove, asked.uid)
            self._release(asked)

    def _release(self, asked: dra_pb2.Claim) -> None:
        self._devices.release(asked.uid)
        self._wake()

    def _wake(self) -> None:
        """Those who wait for devices look again."""
        self._given_back.set()
        self._given_back = asyncio.Event()


async def _answered(
    work: Callable[[dra_pb2.Claim], Awaitable[Sequence[Given]]], claim: dra_pb2.Claim
) -> Sequence[Given] | str:
    """What became of one claim: its devices, or what went wrong, so that others go on."""
    try:
        return await work(claim)
    except (Refused, KubeError, LedgerError, ValueError) as error:
        return str(error)
    except OSError as error:
        return (
            f"The record of the claim cannot be written ({error.filename or 'disk'}: {error.strerror}). "
            "Make room on the node's disk; the kubelet tries again."
        )
    except Exception as error:
        _log.exception("The ResourceClaim %s/%s (%s):", claim.namespace, claim.name, claim.uid)
        return f"{type(error).__name__}: {error}. This is an error in berth; the node's log says more."


def _device(given: Given) -> dra_pb2.Device:
    return dra_pb2.Device(
        request_names=[given.request] if given.request else [],
        pool_name=given.pool,
        device_name=given.device,
        cdi_device_ids=given.cdi,
        share_id=given.share or None,
    )
