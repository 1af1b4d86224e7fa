"""The admission webhooks of one controller process: what they know of the cluster, kept by watches, and their server.

Every replica serves, also one that does not lead: an answer costs no request. Whatever is missing (rights, the Secret,
a port) is told and waited for, and keeps the controller from nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from activities.cache import namespace_strategy
from controller.webhooks import reviews
from controller.webhooks.material import SECRET_NAME, SECRET_NAMESPACE, Secret, secret
from controller.webhooks.seats import SeatPreferences
from controller.webhooks.server import Server
from crds.settings import SETTINGS_NAME, SETTINGS_NAMESPACE, Settings
from kube.client import KubeClient
from kube.errors import KubeError
from kube.reflector import Change, Reflector
from kube.resources import (
    CONFIGMAPS,
    DEVICECLASSES,
    GPUQUOTAS,
    GPURESERVATIONS,
    NAMESPACES,
    NODES,
    RESOURCESLICES,
    SECRETS,
)
from planning.accelerators import seat_size
from planning.admission import Installation
from planning.devices.prefer_group import DRIVER, SeatClass, seat_class
from planning.model import NodeView, QuotaView
from planning.podspecs import mapping, mappings
from planning.settings import read_settings
from planning.views import node_view, quota_view, reservation_view
from planning.windows import ReservationView

log = logging.getLogger(__name__)

VALIDATE, DEFAULT, PREFER_GROUP = "/validate", "/default", "/prefer-group"
_TIDY = 600.0  # seconds between two looks for claim templates that no pod needs any more
_PORT_PAUSE = 10.0


class Webhooks:
    """`run` watches and serves until cancelled. `renewed` is set whenever the Secret changed."""

    def __init__(self, kube: KubeClient, bind: str, port: int) -> None:
        self.renewed = asyncio.Event()
        self._loaded = asyncio.Event()
        self._trouble = ""
        self._port = port
        self._settings = Settings()
        # The DeviceClasses of seats; a cluster before 1.34 knows none.
        self.seat_classes: Reflector[SeatClass] = Reflector(kube, DEVICECLASSES, project=seat_class, optional=True)
        # Every cluster has those classes, but not nodes that offer seats by DRA: a claim would wait there for ever.
        self.seat_slices: Reflector[frozenset[str]] = Reflector(
            kube, RESOURCESLICES, project=seats_in_slice, optional=True
        )
        self._preferences = SeatPreferences(kube, self._offered)
        self.server = Server(
            bind,
            port,
            {
                VALIDATE: lambda body: reviews.validate(body, self.installation),
                DEFAULT: lambda body: reviews.fill_in(body, self.installation),
                PREFER_GROUP: self._preferences.answer,
            },
        )
        self.namespaces: Reflector[tuple[str, str]] = Reflector(
            kube, NAMESPACES, project=_with_strategy, metadata_only=True
        )
        self.quotas: Reflector[QuotaView] = Reflector(kube, GPUQUOTAS, project=_quota)
        self.reservations: Reflector[ReservationView] = Reflector(kube, GPURESERVATIONS, project=_reservation)
        self.nodes: Reflector[NodeView] = Reflector(
            kube, NODES, project=lambda raw: node_view(raw, self._settings.gpu_resource)
        )
        named = partial(Reflector[Any], kube)
        self.settings_map: Reflector[Mapping[str, Any]] = named(
            CONFIGMAPS,
            namespace=SETTINGS_NAMESPACE,
            field_selector=f"metadata.name={SETTINGS_NAME}",
            project=lambda raw: raw.get("data") or {},
            on_change=self._settings_changed,
        )
        self.secret: Reflector[Secret] = named(
            SECRETS,
            namespace=SECRET_NAMESPACE,
            field_selector=f"metadata.name={SECRET_NAME}",
            project=secret,
            on_change=self._secret_changed,
        )

    @property
    def reflectors(self) -> dict[str, Reflector[Any]]:
        return {
            "namespaces": self.namespaces,
            "gpuquotas": self.quotas,
            "gpureservations": self.reservations,
            "nodes": self.nodes,
            "configmaps": self.settings_map,
            "secrets": self.secret,
            "deviceclasses": self.seat_classes,
            "resourceslices": self.seat_slices,
        }

    def _offered(self) -> Iterable[SeatClass]:
        """The classes of those seats that some node offers by DRA."""
        offered = frozenset[str]().union(*self.seat_slices.items.values())
        return [each for each in self.seat_classes.items.values() if each.resource in offered]

    @property
    def installation(self) -> Installation:
        return Installation(
            self._settings,
            dict(self.namespaces.items.values()),
            tuple(self.quotas.items.values()),
            tuple(self.reservations.items.values()),
            tuple(self.nodes.items.values()),
            time.time(),
        )

    @property
    def trouble(self) -> str:
        """Why nothing, or something old, is served; '' if all is well."""
        if self._trouble or self._loaded.is_set() or not self.secret.synced.is_set():
            return self._trouble
        return f"there is no certificate in Secret {SECRET_NAMESPACE}/{SECRET_NAME} yet"

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve())
                group.create_task(self._tidy())
                group.create_task(self.settings_map.run())
                await self.settings_map.synced.wait()  # it says which resource counts as a GPU
                for reflector in self.reflectors.values():
                    if reflector is not self.settings_map:
                        group.create_task(reflector.run())
        finally:
            await self.server.close()
            log.info("admission webhooks have stopped; API servers take writes unchecked where nobody else answers")

    async def _serve(self) -> None:
        for reflector in self.reflectors.values():
            await reflector.synced.wait()
        await self._loaded.wait()
        while True:
            try:
                await self.server.listen()
                break
            except OSError as taken:
                self._say(f"cannot listen on port {self._port}: {taken.strerror or taken}")
                await asyncio.sleep(_PORT_PAUSE)
        self._say("")
        log.info("admission webhooks listen on port %d", self._port)

    async def _tidy(self) -> None:
        """Every replica does: to remove what another has removed is no harm."""
        while True:
            await asyncio.sleep(_TIDY)
            try:
                if self.seat_classes.items and (gone := await self._preferences.tidy(time.time())):
                    log.info("%d claim templates of seats were removed: no pod needs them", gone)
            except KubeError as failed:
                log.warning("claim templates of seats cannot be looked after: %s", failed)

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("admission webhooks: %s", trouble)
        self._trouble = trouble

    def _settings_changed(self, change: Change[Mapping[str, Any]]) -> None:
        settings, problem = read_settings(change.new)
        if settings is None:
            log.warning("%s; the last valid settings stay in force", problem)
        else:
            self._settings = settings

    def _secret_changed(self, change: Change[Secret]) -> None:
        self.renewed.set()
        material = change.new.material if change.new else None
        if material is None or not material.servable:
            return
        try:
            self.server.use(material)
        except (OSError, ValueError) as unusable:  # ssl's own errors are OSErrors, and name no content
            self._say(f"the certificate in Secret {SECRET_NAMESPACE}/{SECRET_NAME} cannot be used: {unusable}")
        else:
            self._say("")
            self._loaded.set()


def _quota(raw: dict[str, Any]) -> QuotaView:
    """Without its status, which changes all the time and decides nothing here."""
    return quota_view({**raw, "status": {}})


def _reservation(raw: dict[str, Any]) -> ReservationView:
    return reservation_view({**raw, "status": {}})


def seats_in_slice(raw: Mapping[str, Any]) -> frozenset[str] | None:
    """The resources of the seats in a ResourceSlice of berth's; None where it has none."""
    spec = mapping(raw.get("spec"))
    if spec.get("driver") != DRIVER:
        return None
    found = set()
    for device in mappings(spec.get("devices")):
        resource = mapping(mapping(device.get("attributes")).get("resource")).get("string")
        if isinstance(resource, str) and seat_size(resource):
            found.add(resource)
    return frozenset(found) or None


def _with_strategy(raw: dict[str, Any]) -> tuple[str, str] | None:
    name, strategy = namespace_strategy(raw)
    return (name, strategy) if strategy else None
