"""Where no helper can be begun, asking time and again begins none each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeworkers.seats.helper import client as clients
from nodeworkers.seats.helper.client import HelperClient, HelperError


async def test_a_driver_that_is_none_is_told_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = 0
    begin = HelperClient._begin

    def counted(self: HelperClient) -> int:
        nonlocal begun
        begun += 1
        return begin(self)

    monkeypatch.setattr(HelperClient, "_begin", counted)
    client = HelperClient(tmp_path / "helper.sock", "nonsense")
    told = set()
    for _ in range(3):
        with pytest.raises(HelperError, match="There is no driver 'nonsense'") as refused:
            await client.read([])
        told.add(str(refused.value))
    assert (begun, len(told)) == (1, 1)
    monkeypatch.setattr(clients, "_PAUSE", 0.0)
    client._again = 0.0
    for _ in range(2):
        with pytest.raises(HelperError):
            await client.read([])
    assert begun == 3
    log = tmp_path / "helper.log"
    log.write_bytes(b"x" * (clients._MOST_LOG + 1))
    with pytest.raises(HelperError):
        await client.read([])
    assert log.stat().st_size < clients._MOST_LOG, "a log that grows begins anew"
