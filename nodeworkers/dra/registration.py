"""Tells the kubelet about the DRA driver: it finds our socket in its folder of plugins and asks who we are.

A kubelet that starts anew looks into the folder again, and deletes the node's ResourceSlices meanwhile: whoever
publishes them hears of every registration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc.aio

from nodeworkers.rpc import pluginregistration_pb2
from planning.devices.slices import DRIVER

SERVICES: Final = ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
"""As the kubelet names them (k8s.io/kubelet/pkg/apis/dra/v1, dra-health/v1alpha1); it takes the first that it knows."""

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Registration:
    """pluginregistration.Registration. `registered` is what the kubelet said last; None: nothing yet."""

    def __init__(self, endpoint: Path, on_registered: Callable[[], None]) -> None:
        """`endpoint` is the socket of the driver's services."""
        self.endpoint, self._on_registered = endpoint, on_registered
        self.registered: bool | None = None
        self.error = ""

    async def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: Context
    ) -> pluginregistration_pb2.PluginInfo:
        """What is registered."""
        return pluginregistration_pb2.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self.endpoint), supported_versions=SERVICES
        )

    async def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: Context
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        """How it went. The kubelet tries again by itself."""
        self.registered, self.error = request.plugin_registered, request.error[:1024]
        if request.plugin_registered:
            _log.info("The kubelet has registered %s.", DRIVER)
            self._on_registered()
        else:
            _log.error("The kubelet has not registered %s: %s", DRIVER, self.error)
        return pluginregistration_pb2.RegistrationStatusResponse()
