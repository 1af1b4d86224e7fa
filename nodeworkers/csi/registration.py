"""Tells the kubelet about the driver: it finds our socket in its folder of plugins and asks who we are. No sidecar.

A kubelet that starts anew looks into the folder again, so nothing has to be done for that.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc.aio

from nodeworkers.rpc import pluginregistration_pb2
from planning.caches.volumes import DRIVER

_VERSIONS = ("1.0.0",)  # of CSI: the kubelet takes any 1.x
_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Registration:
    """pluginregistration.Registration. `registered` is what the kubelet said last; None: nothing yet."""

    def __init__(self, endpoint: Path) -> None:
        """`endpoint` is the socket of the driver's services."""
        self.endpoint = endpoint
        self.registered: bool | None = None
        self.error = ""

    async def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: Context
    ) -> pluginregistration_pb2.PluginInfo:
        """What is registered."""
        return pluginregistration_pb2.PluginInfo(
            type="CSIPlugin", name=DRIVER, endpoint=str(self.endpoint), supported_versions=_VERSIONS
        )

    async def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: Context
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        """How it went. The kubelet tries again by itself."""
        self.registered, self.error = request.plugin_registered, request.error[:1024]
        if request.plugin_registered:
            _log.info("The kubelet has registered %s.", DRIVER)
        else:
            _log.error("The kubelet has not registered %s: %s", DRIVER, self.error)
        return pluginregistration_pb2.RegistrationStatusResponse()
