"""What the proxy is to serve is kept true, and a proxy is kept running, by whoever is the node's process just now."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_process import ProxyProcess
from nodeworkers.seats.proxy_words import News, ProxyError, Route, StaleEpoch, State
from nodeworkers.seats.routes import Routes
from tests.native.rig import Proxy, free_port, until

A, B = "kyb-G01-s1", "kyb-G01-s2"


def route(seat: str, epoch: int = 1, state: State = State.HELD) -> Route:
    return Route(seat, epoch, f"127.0.0.1:{free_port()}", "127.0.0.1:1", state, 3.0, 30.0)


@asynccontextmanager
async def following(control: ProxyControl) -> AsyncIterator[tuple[Routes, list[News]]]:
    heard: list[News] = []
    routes = Routes(control, heard.append)
    task = asyncio.create_task(routes.run())
    try:
        yield routes, heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def served(control: ProxyControl) -> dict[str, Route]:
    try:
        return {seat: state.route for seat, state in (await control.state()).items()}
    except ProxyError:
        return {}


async def test_a_proxy_that_was_started_anew_is_told_everything(proxy: Proxy) -> None:
    async with following(proxy.control) as (routes, heard):
        wanted = {A: route(A, state=State.OPEN), B: route(B)}
        for each in wanted.values():
            await routes.put(each)
        await proxy.kill()
        await proxy.start()

        async def again() -> bool:
            return await served(proxy.control) == wanted

        await until(again, "the new proxy serves the same")
        await until(lambda: any({each.seat for each in news.traffic} == {A, B} for news in heard), "news are heard")


async def test_what_could_not_be_said_is_said_later(proxy: Proxy) -> None:
    first, second = route(A), route(B)
    async with following(proxy.control) as (routes, _):
        await routes.put(first)
        await proxy.kill()
        with pytest.raises(ProxyError):
            await routes.put(second)
        with pytest.raises(ProxyError):
            await routes.remove(A, 1)
        await proxy.start()
        await until(lambda: _is(proxy.control, {B: second}), "the new proxy serves what was said last")


async def _is(control: ProxyControl, expected: dict[str, Route]) -> bool:
    return await served(control) == expected


async def test_a_proxy_that_went_on_forgets_what_was_removed_meanwhile(proxy: Proxy) -> None:
    """The node's process was gone, came back, and the seat is not there any more."""
    gone, stays = route(A), route(B)
    for each in (gone, stays):
        await proxy.control.set(each)
    routes = Routes(proxy.control, lambda news: None)
    await routes.put(stays)
    await routes.keep({B})
    assert await served(proxy.control) == {B: stays}


async def test_a_change_of_no_matter_leaves_a_drain_alone(proxy: Proxy) -> None:
    async with following(proxy.control) as (routes, _):
        opened = route(A, state=State.OPEN)
        await routes.put(opened)
        draining = asyncio.create_task(routes.drain(A, 1, 5.0))
        await asyncio.sleep(0)
        await routes.amend(replace(opened, retry_after=9.0))
        assert (await draining).left == 0
        assert (await served(proxy.control))[A].retry_after == 3.0
        await routes.amend(replace(opened, state=State.HELD, retry_after=9.0))
        assert (await served(proxy.control))[A].retry_after == 9.0


async def test_an_older_epoch_is_refused(proxy: Proxy) -> None:
    async with following(proxy.control) as (routes, _):
        await routes.put(route(A, epoch=5))
        with pytest.raises(StaleEpoch):
            await routes.put(route(A, epoch=4))


@pytest.fixture
async def left(tmp_path: Path) -> AsyncIterator[list[int]]:
    """Processes to be ended after the test: a proxy outlives whoever began it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_a_proxy_is_begun_found_again_and_begun_anew(proxy: Proxy, tmp_path: Path, left: list[int]) -> None:
    socket, log = tmp_path / "own" / "proxy.sock", tmp_path / "own" / "proxy.log"
    async with ProxyControl(socket) as control:
        keeping = asyncio.create_task(ProxyProcess(proxy.program, socket, log, control).run())
        left.append(await _pid(control))
        keeping.cancel()
        await asyncio.wait([keeping])
        other = ProxyProcess(proxy.program, socket, log, control)
        keeping = asyncio.create_task(other.run())
        await until(lambda: not other.trouble, "it is found")
        assert (await control.hello()).pid == left[0], "the proxy outlives whoever began it"
        os.kill(left[0], signal.SIGKILL)

        async def another() -> bool:
            with contextlib.suppress(ProxyError):
                return (await control.hello()).pid != left[0]
            return False

        await until(another, "another one is begun")
        left.append((await control.hello()).pid)
        keeping.cancel()
        await asyncio.wait([keeping])


async def _pid(control: ProxyControl) -> int:
    found: list[int] = []

    async def answers() -> bool:
        with contextlib.suppress(ProxyError):
            found.append((await control.hello()).pid)
        return bool(found)

    await until(answers, "the proxy answers")
    return found[0]


async def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    async with ProxyControl(tmp_path / "proxy.sock") as control:
        process = ProxyProcess(tmp_path / "none", tmp_path / "proxy.sock", tmp_path / "log", control)
        keeping = asyncio.create_task(process.run())
        await until(lambda: "cannot be started: No such file" in process.trouble, "it is told")
        keeping.cancel()
        await asyncio.wait([keeping])
