"""Probes in words, and a clean end: what every process of berth does alike."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientSession
from opentelemetry.sdk.trace import TracerProvider

from berth import process
from berth.process import ProcessOptions, ended, run_process, serve_http, until_one_ends, watch_trouble
from stack.ports import is_free


def watch(*, synced: bool = True, silence: float = 0.0, error: str | None = None) -> Any:
    flag = asyncio.Event()
    if synced:
        flag.set()
    return SimpleNamespace(
        synced=flag,
        last_contact=time.monotonic() - silence,
        last_error=error,
        healthy=lambda within: synced and silence < within,
    )


def test_watches_that_do_well_are_no_trouble() -> None:
    assert watch_trouble({"jobs": watch(), "pods": watch(silence=100)}) == ""


def test_trouble_names_the_watch_and_its_last_error() -> None:
    said = watch_trouble(
        {"jobs": watch(silence=200), "pods": watch(synced=False, error="Forbidden"), "nodes": watch()},
    )
    assert said == (
        "waiting for the first list of pods (Forbidden); no contact with the API server on the watch of jobs for 200 s"
    )


def test_a_watch_that_fails_is_told_sooner_than_one_that_is_silent() -> None:
    assert watch_trouble({"jobs": watch(silence=15, error="refused")}) == ""
    said = watch_trouble({"jobs": watch(silence=25, error="refused"), "pods": watch(silence=25)})
    assert said == "no contact with the API server on the watch of jobs for 25 s (refused)"


async def test_only_a_task_that_failed_cannot_recover() -> None:
    async def fail() -> None:
        raise KeyError

    tasks = [asyncio.create_task(fail(), name="pokes"), asyncio.create_task(asyncio.sleep(9), name="sweeps")]
    assert ended(tasks) == ""
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert ended(tasks) == "ended: pokes; the process must be restarted"
    tasks[0].exception()


async def test_a_note_is_told_and_is_no_failure(unused_ports: tuple[int, int]) -> None:
    said = {"ready": "", "note": "", "healthy": ""}
    health, metrics_port = unused_ports
    options = ProcessOptions(health_port=health, metrics_port=metrics_port, bind="127.0.0.1")

    def of(key: str) -> Callable[[], str]:
        return lambda: said[key]

    stop = await serve_http(options, healthy=of("healthy"), ready=of("ready"), note=of("note"))

    async def ask(path: str) -> tuple[int, str]:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{health}{path}") as answer:
            return answer.status, await answer.text()

    try:
        assert await ask("/readyz") == (200, "ok\n")
        said["note"] = "a setting is refused"
        assert await ask("/readyz") == (200, "ok\nnote: a setting is refused\n")
        assert await ask("/healthz") == (200, "ok\n")
        said |= {"ready": "Temporal cannot be reached", "healthy": "ended: pokes"}
        assert await ask("/readyz") == (503, "Temporal cannot be reached\nnote: a setting is refused\n")
        assert await ask("/healthz") == (503, "ended: pokes\n")
    finally:
        await stop()


async def test_what_is_cancelled_or_fails_while_it_begins_leaves_no_port_taken(unused_ports: tuple[int, int]) -> None:
    options = ProcessOptions(health_port=unused_ports[0], metrics_port=unused_ports[1], bind="127.0.0.1")
    for steps in range(20):
        serving = asyncio.create_task(serve_http(options, healthy=str, ready=str))
        for _ in range(steps):
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])
        if not serving.cancelled():
            await serving.result()()
        assert all(map(is_free, unused_ports)), f"cancelled after {steps} rounds of the loop"
    assert not serving.cancelled(), "every moment was tried"
    with pytest.raises(OSError):
        await serve_http(replace(options, metrics_port=options.health_port), healthy=str, ready=str)
    assert is_free(options.health_port)


@pytest.fixture
def unused_ports() -> tuple[int, int]:
    import socket

    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        return a.getsockname()[1], b.getsockname()[1]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process whose spans go to a collector that takes its time; says when they were sent."""
    sent: list[str] = []

    class Provider(TracerProvider):
        def shutdown(self) -> None:
            sent.append("began")
            time.sleep(0.3)
            sent.append("sent")

    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # put back afterwards, together with the stream
    monkeypatch.setattr(process, "set_up_metrics", lambda: None)
    monkeypatch.setattr(process, "set_up_traces", lambda _: Provider(shutdown_on_exit=False))
    return sent


def test_sigterm_lets_the_process_clean_up_and_sends_its_spans(
    spans: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(traced: bool) -> None:
        assert traced
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)
            spans.append("cleaned up")

    run_process("berth-test", ProcessOptions(), main)
    assert spans == ["cleaned up", "began", "sent"]
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "berth-test stopped on request"


def test_a_collector_that_is_away_does_not_hold_up_the_end(spans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SPANS_FLUSH", 0.05)

    async def main(_: bool) -> None:
        return

    run_process("berth-test", ProcessOptions(), main)
    assert spans == ["began"]
    time.sleep(0.4)


def test_a_failure_is_one_json_line_and_a_status(spans: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    async def main(_: bool) -> None:
        raise ValueError("no such kubeconfig")

    with pytest.raises(SystemExit) as end:
        run_process("berth-test", ProcessOptions(), main)
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert said["message"] == "berth-test failed: no such kubeconfig"
    assert "ValueError" in said["exception"]
    assert spans[-1] == "sent"


class _Draining:
    """A worker that lets what runs come to its end when it is cancelled."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.drained, self.broken_off = fails, False, False

    async def run(self) -> None:
        if self.fails:
            raise RuntimeError("Temporal is away")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await asyncio.sleep(0.05)
                self.drained = True
            except asyncio.CancelledError:
                self.broken_off = True
            raise


async def test_workers_that_end_together_are_cancelled_once_each() -> None:
    workers = [_Draining(), _Draining()]
    running = asyncio.create_task(until_one_ends(cast(Any, workers)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(each.drained and not each.broken_off for each in workers)


async def test_where_one_worker_ends_the_others_do_and_it_is_said_why() -> None:
    other = _Draining()
    with pytest.raises(RuntimeError, match="Temporal is away"):
        await until_one_ends(cast(Any, [other, _Draining(fails=True)]))
    assert other.drained
