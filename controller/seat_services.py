"""Keeps the EndpointSlices of Services whose pods have seats: requests go to the seat proxies of the nodes.

A part of the leader's term, as Kubernetes' own controller is of its: what is to be written follows from what is there,
is looked at anew whenever that changes, and needs no Temporal. Of pods nothing is watched: a node says when a pod has a
seat, and what matters of that pod is not another thing later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from kube.client import KubeClient
from kube.errors import KubeError, NotFound
from kube.events import EventRecorder
from kube.reflector import Change, Reflector
from kube.resources import ENDPOINTSLICES, GPUSEATGROUPS, PODS, SERVICES, ObjectRef
from planning.podspecs import mapping
from planning.seats.endpoints import (
    MANAGER,
    ProxyPort,
    SeatService,
    endpoint_slices,
    proxy_ports,
    seat_pod,
    seat_service,
)

log = logging.getLogger(__name__)

PAUSE = 0.05  # seconds that news waits for company
RESYNC = 300.0  # seconds after which all is looked at again: somebody may have edited a slice, or a pod's labels
_MOST_PAUSE = 15.0  # until what the API server did not take is tried again

Key = tuple[str, str]


class SeatServices:
    """`run` keeps them until cancelled."""

    def __init__(self, kube: KubeClient, events: EventRecorder) -> None:
        self._kube, self._events = kube, events
        self._due: set[Key] = set()
        self._wake = asyncio.Event()
        self._told: dict[Key, str] = {}
        self._services: dict[Key, SeatService] = {}
        self.trouble = ""
        """Why the API server does not take them; '' while it does."""
        self.services: Reflector[SeatService] = Reflector(
            kube, SERVICES, project=seat_service, on_change=self._service_changed
        )
        self.groups: Reflector[tuple[ProxyPort, ...]] = Reflector(
            kube, GPUSEATGROUPS, project=lambda raw: tuple(proxy_ports(raw)), on_change=self._group_changed
        )

    @property
    def reflectors(self) -> dict[str, Reflector[Any]]:
        return {"services": self.services, "gpuseatgroups": self.groups}

    async def run(self) -> None:
        for reflector in self.reflectors.values():
            await reflector.synced.wait()
        pause, all_at = PAUSE, 0.0
        while True:
            if time.monotonic() >= all_at:
                self._due.update(self._services)
                all_at = time.monotonic() + RESYNC
            due, self._due = self._due, set()
            failed = {key for key in sorted(due) if not await self._keep(key)}
            self._due |= failed
            pause = min(2 * pause, _MOST_PAUSE) if failed else PAUSE
            if not failed:
                self.trouble = ""
            self._wake.clear()
            if not self._due:
                try:
                    async with asyncio.timeout(max(0.0, all_at - time.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            await asyncio.sleep(pause)

    def _service_changed(self, change: Change[SeatService]) -> None:
        before, now = change.old, change.new
        if before == now:
            return
        for each in filter(None, (before, now)):
            self._services.pop((each.namespace, each.name), None)
        if now is not None:
            self._services[now.namespace, now.name] = now
        self._concern({(each.namespace, each.name) for each in (before, now) if each is not None})

    def _group_changed(self, change: Change[tuple[ProxyPort, ...]]) -> None:
        """Only what is another thing for endpoints: who is awake is none."""
        before, now = set(change.old or ()), set(change.new or ())
        if before == now:
            return
        namespaces = {each.namespace for each in before ^ now}
        self._concern({key for key in self._services if key[0] in namespaces})

    def _concern(self, keys: set[Key]) -> None:
        if keys:
            self._due |= keys
            self._wake.set()

    async def _keep(self, key: Key) -> bool:
        """One Service's. False where the API server did not take it."""
        namespace, name = key
        service = self._services.get(key)
        try:
            there = await self._there(namespace, name)
            wanted = await self._wanted(service) if service is not None else {}
            # Whoever is ready comes first: between two writes a Service with nobody ready would refuse requests.
            for slice_name, body in sorted(wanted.items(), key=lambda each: (-_ready(each[1]), each[0])):
                if not _same(there.get(slice_name), body):
                    await self._kube.apply(ENDPOINTSLICES, slice_name, namespace, body, field_manager=MANAGER)
            for slice_name, found in there.items():
                if slice_name not in wanted:
                    await self._remove(namespace, slice_name, found)
        except KubeError as error:
            if not self.trouble:
                log.warning("the EndpointSlices of Service %s/%s cannot be written: %s", namespace, name, error)
            self.trouble = str(error)
            return False
        self._tell(key, service)
        return True

    async def _wanted(self, service: SeatService) -> dict[str, dict[str, Any]]:
        if service.problem:
            return {}
        ports = [each for ports in self.groups.items.values() for each in ports if each.namespace == service.namespace]
        if not ports:
            return {}
        selector = ",".join(f"{key}={value}" for key, value in sorted(service.labels.items()))
        pods, _ = await self._kube.list(PODS, service.namespace, label_selector=selector)
        return endpoint_slices(service, filter(None, map(seat_pod, pods)), ports)

    async def _there(self, namespace: str, name: str) -> dict[str, dict[str, Any]]:
        selector = f"kubernetes.io/service-name={name},endpointslice.kubernetes.io/managed-by={MANAGER}"
        found, _ = await self._kube.list(ENDPOINTSLICES, namespace, label_selector=selector)
        return {str(each["metadata"]["name"]): each for each in found}

    async def _remove(self, namespace: str, name: str, found: Mapping[str, Any]) -> None:
        try:
            await self._kube.delete(ENDPOINTSLICES, name, namespace, uid=mapping(found.get("metadata")).get("uid"))
        except NotFound:
            log.debug("EndpointSlice %s/%s was gone already", namespace, name)

    def _tell(self, key: Key, service: SeatService | None) -> None:
        """Its owner hears once what keeps it from having endpoints."""
        problem = service.problem if service is not None else ""
        if problem and service is not None and self._told.get(key) != problem:
            self._events.record(
                regarding=ObjectRef("v1", "Service", service.name, service.namespace, service.uid),
                type="Warning", reason="NoSeatEndpoints", action="KeepEndpoints",
                note=f"Service {service.name} leads to no seats: {problem}.",
            )  # fmt: skip
        if problem:
            self._told[key] = problem
        else:
            self._told.pop(key, None)


def _ready(body: Mapping[str, Any]) -> int:
    return sum(each["conditions"]["ready"] for each in body["endpoints"])


def _same(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether a slice says what it should. The API server adds fields of its own to each part."""
    if found is None:
        return False
    return _within(wanted["endpoints"], found.get("endpoints")) and _within(wanted["ports"], found.get("ports"))


def _within(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_within(value, found.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(_within(mine, theirs) for mine, theirs in zip(wanted, found, strict=True))
        )
    return bool(wanted == found)
