"""gRPC on unix sockets for the fake kubelet. It shares no code with the plugins that it judges, and speaks as Go does:
4 MiB to receive, the authority "localhost", a blocking dial.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

RECEIVE_LIMIT = 4 * 1024 * 1024
"""Bytes of a message that Go's gRPC takes, and so the kubelet: it sets no other limit."""
PATH_LIMIT = 107  # bytes of a socket's name (unix(7))

Context = grpc.aio.ServicerContext[Any, Any]


class CallFailed(Exception):
    """A call to the plugin ended without an answer. `code` is gRPC's name of why, as RESOURCE_EXHAUSTED."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"rpc error: code = {code} desc = {details}")
        self.code = code
        self.details = details


def served_by(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """The methods of a service that an object has as coroutines of the same names."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        if hasattr(servicer, method.name):
            kind = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            methods[method.name] = kind(
                getattr(servicer, method.name),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


async def serve(path: Path, scratch: Path, services: Sequence[tuple[ServiceDescriptor, object]]) -> grpc.aio.Server:
    """Serves on `path`, which must not exist. `scratch`: a free name on the same file system.

    The socket is made under the scratch name and linked into place. So gRPC, which removes the name that it bound when
    the server ends, leaves `path` as a killed process leaves it; and whoever watches the folder sees one creation.
    """
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", RECEIVE_LIMIT)])
    server.add_generic_rpc_handlers([served_by(descriptor, servicer) for descriptor, servicer in services])
    server.add_insecure_port(f"unix:{scratch}")
    os.link(scratch, path)
    os.unlink(scratch)
    await server.start()
    return server


class Caller:
    """A connection to one socket. Calls raise CallFailed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._channel = grpc.aio.insecure_channel(
            f"unix:{path}",
            options=[
                ("grpc.max_receive_message_length", RECEIVE_LIMIT),
                ("grpc.max_send_message_length", -1),
                ("grpc.default_authority", "localhost"),
                ("grpc.use_local_subchannel_pool", 1),  # two kubelets of one process share no connection
            ],
        )

    async def dial(self, seconds: float) -> bool:
        """Waits until connected; False if the first attempt was in vain. Raises CallFailed after `seconds`."""
        at_once = True
        try:
            async with asyncio.timeout(seconds):
                while (state := self._channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    at_once = at_once and state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE
                    await self._channel.wait_for_state_change(state)
        except TimeoutError:
            raise CallFailed("DEADLINE_EXCEEDED", f"nobody serves {self.path} within {seconds:g} s") from None
        return at_once

    async def call(self, method: MethodDescriptor, request: Message, seconds: float | None = None) -> Any:
        """One answer. Without `seconds` it waits for ever, as the kubelet does for most calls."""
        multi: Any = self._channel.unary_unary(*_shape(method))
        try:
            return await multi(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error.code().name, error.details() or "") from error
        except grpc.aio.UsageError as error:  # closed before
            raise CallFailed("CANCELLED", str(error)) from error
        except asyncio.CancelledError:
            _raise_if_cancelled()
            raise CallFailed("CANCELLED", "the connection was closed") from None

    async def stream(self, method: MethodDescriptor, request: Message) -> AsyncIterator[Any]:
        """The answers, until the other side ends the stream or CallFailed is raised."""
        multi: Any = self._channel.unary_stream(*_shape(method))
        try:
            async for answer in multi(request):
                yield answer
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error.code().name, error.details() or "") from error
        except asyncio.CancelledError:
            _raise_if_cancelled()
            raise CallFailed("CANCELLED", "the connection was closed") from None

    async def close(self) -> None:
        """Ends calls and streams."""
        await self._channel.close()


def _shape(method: MethodDescriptor) -> tuple[str, Any, Any]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    return path, GetMessageClass(method.input_type).SerializeToString, GetMessageClass(method.output_type).FromString


def _raise_if_cancelled() -> None:
    """A channel that is closed cancels its calls: that is not this task's own cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
