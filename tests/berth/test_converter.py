"""What the worker's converter keeps, and that it says the same as pydantic's, in which all histories are written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from activities.messages import PlacementState, WorkloadState
from activities.signatures import Followed, WorkloadRef
from berth.converter import SharedPayloadConverter, data_converter
from berth.process import ProcessOptions, connect_temporal
from planning.model import Ledger, Turn, Verdict

VALUES: Sequence[Any] = (
    WorkloadState(WorkloadRef("u", "ns", "w"), Turn(2, 1), {"jobs": 7}, due=1.5),
    PlacementState(ledger=Ledger(turns={"u": Turn(1, 1)}), versions={"jobs": 3}),
    Followed("retry", "Pending", "soon", Turn(1, 1), 0.5),
    Verdict("u", "ns", "w", Turn(), "NoSuitableNode", "none", 1),
    {"plain": [1, "two", None]},
    b"bytes",
    None,
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
async def test_it_reads_and_writes_what_pydantics_own_does(value: Any) -> None:
    mine, theirs = await data_converter.encode([value]), await pydantic_data_converter.encode([value])
    assert mine == theirs
    assert await data_converter.decode(theirs, [type(value)]) == [value]


async def test_what_is_no_such_value_is_refused() -> None:
    payload = Payload(metadata={"encoding": b"json/plain"}, data=b'{"ref": 7}')
    with pytest.raises(ValidationError, match="ref"):
        await data_converter.decode([payload], [WorkloadState])


async def test_a_type_is_examined_once_however_many_workflows_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = []
    init = TypeAdapter.__init__

    def counted(self: TypeAdapter[Any], type: Any, **options: Any) -> None:
        examined.append(type)
        init(self, type, **options)

    monkeypatch.setattr(TypeAdapter, "__init__", counted)
    payloads = await data_converter.encode([VALUES[0]])

    def load(_: int) -> Any:
        return SharedPayloadConverter().from_payloads(payloads, [WorkloadState])[0]

    assert load(0) == VALUES[0]
    del examined[:]
    with ThreadPoolExecutor(4) as threads:
        assert set(map(repr, await asyncio.to_thread(lambda: list(threads.map(load, range(50)))))) == {repr(VALUES[0])}
    assert examined == []


async def test_every_process_of_berth_uses_it() -> None:
    client: Client = await connect_temporal(ProcessOptions(temporal_address="127.0.0.1:1"))
    assert client.data_converter is data_converter
