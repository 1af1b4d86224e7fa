"""The calls of the container runtime interface (CRI v1, proto/cri.proto) that seats need: with a deadline each, and
errors that are sentences. For `containers.py` and `following.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from nodeworkers.rpc import cri_pb2 as cri

_MESSAGE_LIMIT = 16 * 1024 * 1024  # as the kubelet has it (cri-client, maxMsgSize)
_SECONDS = 5.0  # for one answer
_SHOWN = 300  # letters of a runtime's own words
_Answer = TypeVar("_Answer", bound=Message)


class CriError(Exception):
    """The runtime does not answer, or with what makes no sense. The text is a sentence."""


class GoneError(CriError):
    """The runtime does not have what is asked for."""


class UnknownCallError(CriError):
    """The runtime does not know this call."""


class Session:
    """Calls on one connection. Each raises CriError."""

    def __init__(self, socket: Path, channel: grpc.aio.Channel, seconds: float) -> None:
        self._socket, self._channel, self._seconds = socket, channel, seconds

    async def version(self) -> cri.VersionResponse:
        """Which runtime it is."""
        return await self._ask("Version", cri.VersionRequest(), cri.VersionResponse)

    async def sandboxes(self, labels: Mapping[str, str]) -> list[cri.PodSandbox]:
        """Pods that have these labels, also those that have ended."""
        request = cri.ListPodSandboxRequest(filter=cri.PodSandboxFilter(label_selector=labels))
        return list((await self._ask("ListPodSandbox", request, cri.ListPodSandboxResponse)).items)

    async def sandbox(self, id: str) -> cri.PodSandboxStatus:
        """Raises GoneError."""
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=id)
        return (await self._ask("PodSandboxStatus", request, cri.PodSandboxStatusResponse)).status

    async def containers(self, labels: Mapping[str, str] | None = None) -> list[cri.Container]:
        """Containers that have these labels, in any state."""
        request = cri.ListContainersRequest(filter=cri.ContainerFilter(label_selector=labels or {}))
        return list((await self._ask("ListContainers", request, cri.ListContainersResponse)).containers)

    async def container(self, id: str, verbose: bool = False) -> cri.ContainerStatusResponse:
        """Raises GoneError."""
        request = cri.ContainerStatusRequest(container_id=id, verbose=verbose)
        return await self._ask("ContainerStatus", request, cri.ContainerStatusResponse)

    async def events(self) -> AsyncIterator[None]:
        """Something is not as it was: once for each event, until the runtime ends it. What an event says is not read,
        for it may be late, doubled or of any size. Raises UnknownCallError where the runtime has no events.
        """
        stream: grpc.aio.UnaryStreamMultiCallable[Message, bytes] = self._channel.unary_stream(
            "/runtime.v1.RuntimeService/GetContainerEvents", request_serializer=cri.GetEventsRequest.SerializeToString
        )
        call = stream(cri.GetEventsRequest())
        try:
            async for _ in call:
                yield
        except grpc.aio.AioRpcError as error:
            raise self._told("GetContainerEvents", error) from error
        finally:
            call.cancel()

    async def _ask(self, method: str, request: Message, answer: type[_Answer]) -> _Answer:
        call: grpc.aio.UnaryUnaryMultiCallable[Message, bytes] = self._channel.unary_unary(
            f"/runtime.v1.RuntimeService/{method}", request_serializer=type(request).SerializeToString
        )
        try:
            raw: bytes = await call(request, timeout=self._seconds)
        except grpc.aio.AioRpcError as error:
            raise self._told(method, error) from error
        try:
            return answer.FromString(raw)
        except DecodeError as error:
            raise CriError(
                f"What the container runtime on {self._socket} answers to {method} is no such message."
            ) from error

    def _told(self, method: str, error: grpc.aio.AioRpcError) -> CriError:
        details = " ".join((error.details() or "").rstrip(".")[:_SHOWN].split())
        match error.code():
            case grpc.StatusCode.NOT_FOUND:
                return GoneError(f"The container runtime does not have it: {details or 'it says no more'}.")
            case grpc.StatusCode.UNIMPLEMENTED:
                return UnknownCallError(f"The container runtime on {self._socket} does not know the call {method}.")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                why = f"within {self._seconds:.0f} s"
            case code:
                why = f"{details or 'no reason given'} ({code.name})"
        return CriError(f"The container runtime does not answer {method} on {self._socket}: {why}.")


class Cri:
    """A container runtime by its socket."""

    def __init__(self, socket: Path, seconds: float = _SECONDS) -> None:
        """`seconds`: for one answer."""
        self._socket, self._seconds = socket, seconds

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A connection of its own: one that is kept may wait long before it finds a runtime that was started anew."""
        options = (("grpc.max_receive_message_length", _MESSAGE_LIMIT), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            yield Session(self._socket, channel, self._seconds)
