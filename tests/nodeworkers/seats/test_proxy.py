"""The node's side of the proxy's socket, against a proxy that says anything but what it should."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_words import Answer, ProxyAway, ProxyError, Quiet, Route, State, models

Say = Callable[[dict[str, Any]], bytes]


@asynccontextmanager
async def pretending(path: Path, say: Say) -> AsyncIterator[ProxyControl]:
    """Somebody on the socket who answers each request with what `say` makes of it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            said = say(json.loads(line))
            writer.write(said)
            if not said:
                break
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        async with ProxyControl(path) as control:
            yield control
    finally:
        server.close()
        os.unlink(path)


def answered(**fields: Any) -> Say:
    return lambda asked: json.dumps({"v": 1, "id": asked["id"], "ok": True, **fields}).encode() + b"\n"


async def test_nobody_on_the_socket(tmp_path: Path) -> None:
    async with ProxyControl(tmp_path / "none.sock") as control:
        with pytest.raises(ProxyAway, match=r"does not answer on .*none\.sock: No such file"):
            await control.hello()
        with pytest.raises(ProxyAway):
            async for _ in control.watch():
                pass


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seats": None},
        {"seats": [{}]},
        {"seats": [{"route": {}, "traffic": {}}]},
        {"seats": [{"route": {"quiet": [], "blocked": [], "state": "odd"}, "traffic": {}}]},
        {"seats": {"a": 1}},
    ],
)
async def test_an_answer_of_another_shape_is_a_sentence(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with pretending(tmp_path / "p.sock", answered(**fields)) as control:
        for call in (control.state, control.metrics):
            with pytest.raises(ProxyError, match="does not understand"):
                await call()


@pytest.mark.parametrize("said", [b"", b"garbage\n", b"[]\n", b"{\n", b'{"id": 1'])
async def test_a_connection_that_breaks_or_babbles_is_made_anew(tmp_path: Path, said: bytes) -> None:
    async with pretending(tmp_path / "p.sock", lambda _: said) as control:
        if said.endswith(b"\n") or not said:
            for _ in range(3):
                with pytest.raises(ProxyAway):
                    await control.hello()
    async with pretending(tmp_path / "p.sock", answered(version="1", pid=7, up=1.5)) as control:
        assert (await control.hello()).pid == 7


async def test_calls_overlap_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    waiting: list[dict[str, Any]] = []

    def say(asked: dict[str, Any]) -> bytes:
        waiting.append(asked)
        if len(waiting) < 3:
            return b'{"id": "not ours"}\n'
        lines = [{"id": each["id"], "ok": True, "left": each["epoch"], "cut": 0} for each in reversed(waiting)]
        return b"".join(json.dumps(each).encode() + b"\n" for each in lines)

    async with pretending(tmp_path / "p.sock", say) as control:
        drained = await asyncio.gather(*(control.drain("s", epoch, 1) for epoch in (5, 6, 7)))
    assert [each.left for each in drained] == [5, 6, 7]


async def test_what_is_too_long_is_not_sent(tmp_path: Path) -> None:
    answer = Answer(body="x" * 300_000)
    route = Route("s", 1, "127.0.0.1:1", None, State.HELD, 1, 1, quiet=(Quiet("/v1/models", answer),))
    async with pretending(tmp_path / "p.sock", answered()) as control:
        with pytest.raises(ProxyError, match="300"):
            await control.set(route)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.one_of(st.binary(max_size=40), st.sampled_from([b'{"id":1,"ok":false}', b'{"id":1,"ok":true,"seats":[7]}']))
)
async def test_nothing_that_is_said_gets_through_as_another_error(tmp_path: Path, said: bytes) -> None:
    async with pretending(tmp_path / "p.sock", lambda _: said.replace(b"\n", b"") + b"\n") as control:
        with pytest.raises(ProxyError):
            await control.state()


def test_models_are_listed_and_told_one_by_one() -> None:
    listed, single = models(["a-1", "org/b"], 17)
    assert (listed.path, single.path) == ("/v1/models", "/v1/models/a-1")
    assert listed.answer is not None and single.answer is not None
    assert [each["id"] for each in json.loads(listed.answer.body)["data"]] == ["a-1", "org/b"]
    assert json.loads(single.answer.body) == {"id": "a-1", "object": "model", "created": 17, "owned_by": "berth"}
