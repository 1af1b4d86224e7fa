"""CSI's identity service: who answers here, and whether it can."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from google.protobuf.wrappers_pb2 import BoolValue

from nodeworkers.ledger import Ledger, LedgerError
from nodeworkers.rpc import csi_pb2
from planning.caches.volumes import DRIVER

Context = grpc.aio.ServicerContext[Any, Any]


class Identity:
    """csi.v1.Identity. There is no controller: volumes live and die with their pods."""

    def __init__(self, ledger: Ledger, version: str) -> None:
        self.ledger = ledger
        self.version = version

    async def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, context: Context
    ) -> csi_pb2.GetPluginInfoResponse:
        """The driver's name and berth's version."""
        return csi_pb2.GetPluginInfoResponse(name=DRIVER, vendor_version=self.version)

    async def GetPluginCapabilities(
        self, request: csi_pb2.GetPluginCapabilitiesRequest, context: Context
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        """None: neither a controller nor topology."""
        return csi_pb2.GetPluginCapabilitiesResponse()

    async def Probe(self, request: csi_pb2.ProbeRequest, context: Context) -> csi_pb2.ProbeResponse:
        """Ready while the ledger can be read: nothing else is needed for an answer."""
        try:
            await asyncio.to_thread(self.ledger.volumes)  # a writer may have it for as long as the disk takes
        except LedgerError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return csi_pb2.ProbeResponse(ready=BoolValue(value=True))
