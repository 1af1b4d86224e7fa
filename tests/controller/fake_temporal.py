"""Temporal as the controller calls it: takes note of pokes, and can be away in both of the client's ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.messages import PlacementState
from planning.model import Ledger, Turn

UNREACHABLE = RuntimeError("Failed client connect: `get_system_info` call error")
UNAVAILABLE = RPCError("tcp connect error", RPCStatusCode.UNAVAILABLE, b"")


class FakeTemporal:
    """`away`: raised by every call while set. `before`: called before each start, to let the world go on meanwhile."""

    def __init__(self) -> None:
        self.away: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.before: Callable[[str], None] = lambda _: None
        self.started: list[tuple[str, Any]] = []
        self.signals: list[tuple[str, str, Any]] = []
        self.calls = 0
        self.open: set[str] = set()
        self.held: dict[str, Turn] = {}

    async def _answer(self) -> None:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.away is not None:
            raise self.away

    async def start_workflow(self, name: str, state: Any, *, id: str, **options: Any) -> None:
        self.before(id)
        await self._answer()
        args = options.get("start_signal_args")
        self.started.append((id, args[0] if args else state))

    async def list_workflows(self, query: str, page_size: int) -> AsyncIterator[SimpleNamespace]:
        await self._answer()
        for uid in self.open:
            yield SimpleNamespace(id=f"gpuworkload/{uid}")

    def get_workflow_handle(self, id: str) -> Any:
        async def signal(name: str, arg: Any, **_: Any) -> None:
            await self._answer()
            self.signals.append((id, name, arg))

        async def query(name: str, result_type: type) -> PlacementState:
            await self._answer()
            return PlacementState(ledger=Ledger(held=dict(self.held)))

        async def describe() -> SimpleNamespace:
            await self._answer()
            if id.removeprefix("gpuworkload/") in self.open:
                return SimpleNamespace(status=WorkflowExecutionStatus.RUNNING)
            raise RPCError("not found", RPCStatusCode.NOT_FOUND, b"")

        return SimpleNamespace(signal=signal, query=query, describe=describe)
