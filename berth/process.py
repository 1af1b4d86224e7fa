"""What `berth controller` and `berth worker` share: connections, health and metrics ports, a clean end on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from temporalio.client import Client
from temporalio.contrib.opentelemetry import TracingInterceptor
from temporalio.envconfig import ClientConfig
from temporalio.worker import Worker

from berth.converter import data_converter
from berth.telemetry import sdk_runtime, set_up_logging, set_up_metrics, set_up_traces
from controller.webhooks.server import start_site
from kube.reflector import Reflector

log = logging.getLogger(__name__)

# A watch hears of the server about every minute (bookmarks), so this long without anything is no coincidence.
SILENCE = 150.0
# Where an error explains the silence, only a server that restarts is waited for.
FAILING = 20.0
SPANS_FLUSH = 3.0


@dataclass(frozen=True)
class ProcessOptions:
    """How a process finds its cluster and Temporal, and where it answers. Port 0 takes a free one."""

    kubeconfig: Path | None = None
    context: str | None = None
    temporal_address: str | None = None
    temporal_namespace: str | None = None
    health_port: int = 8081
    metrics_port: int = 8080
    bind: str = "0.0.0.0"  # noqa: S104  # the kubelet and Prometheus come from outside the pod
    log_level: str = "info"


async def connect_temporal(options: ProcessOptions, *, traced: bool = False, lazy: bool = True) -> Client:
    """Connects lazily, so that a Temporal that is away delays work instead of crashing the process; a worker cannot be
    lazy, so for it an unreachable Temporal is a RuntimeError or RPCError here.

    What the arguments leave open comes from Temporal's own environment configuration (TEMPORAL_ADDRESS,
    TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS_*, or a profile file).
    """
    config = ClientConfig.load_client_connect_config()
    if options.temporal_address:
        config["target_host"] = options.temporal_address
    if options.temporal_namespace:
        config["namespace"] = options.temporal_namespace
    config.setdefault("target_host", "127.0.0.1:7233")
    return await Client.connect(
        **config,
        data_converter=data_converter,
        interceptors=[TracingInterceptor()] if traced else [],
        lazy=lazy,
        runtime=sdk_runtime(),
    )


def ended(tasks: Iterable[asyncio.Task[None]]) -> str:
    """Which of the tasks that should run for ever does not: the process cannot recover from that by itself."""
    dead = [task.get_name() for task in tasks if task.done() and not task.cancelled()]
    return f"ended: {', '.join(dead)}; the process must be restarted" if dead else ""


def watch_trouble(reflectors: Mapping[str, Reflector[Any]], within: float = SILENCE) -> str:
    """Which watches have no complete picture, or have not heard of the API server for `within` seconds (`FAILING` if
    they know why); '' if none.
    """
    waiting, silent = [], []
    for kind, reflector in reflectors.items():
        error = f" ({reflector.last_error})" if reflector.last_error else ""
        if not reflector.synced.is_set():
            waiting.append(kind + error)
        elif not reflector.healthy(FAILING if reflector.last_error else within):
            silence = time.monotonic() - (reflector.last_contact or 0.0)
            silent.append(f"{kind} for {silence:.0f} s{error}")
    said = [f"waiting for the first list of {', '.join(waiting)}"] if waiting else []
    said += [f"no contact with the API server on the watch of {', '.join(silent)}"] if silent else []
    return "; ".join(said)


async def serve_http(
    options: ProcessOptions,
    *,
    healthy: Callable[[], str],
    ready: Callable[[], str],
    note: Callable[[], str] = lambda: "",
) -> Callable[[], Awaitable[None]]:
    """/healthz and /readyz on one port, /metrics on the other. `healthy` and `ready` return what is wrong, or ''; what
    `note` returns is told by /readyz as well, and is no failure.
    """

    def probe(
        check: Callable[[], str], beside: Callable[[], str] = lambda: ""
    ) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            wrong, also = check(), beside()
            text = f"{wrong or 'ok'}\n" + (f"note: {also}\n" if also else "")
            return web.Response(text=text, status=503 if wrong else 200)

        return answer

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    health_app, metrics_app = web.Application(), web.Application()
    health_app.router.add_get("/healthz", probe(healthy))
    health_app.router.add_get("/readyz", probe(ready, note))
    metrics_app.router.add_get("/metrics", metrics)
    runners = list[web.AppRunner]()

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()

    try:
        for app, port in ((health_app, options.health_port), (metrics_app, options.metrics_port)):
            runners.append(web.AppRunner(app, access_log=None))
            await runners[-1].setup()
            await start_site(web.TCPSite(runners[-1], options.bind, port))
    except BaseException:  # the second port is taken, or the process ends
        await stop()
        raise
    return stop


def run_process(name: str, options: ProcessOptions, main: Callable[[bool], Coroutine[Any, Any, None]]) -> None:
    """Runs `main(traced)` until it ends or SIGTERM or SIGINT cancels it; its own cleanup then runs to the end.

    SystemExit(1) when it failed; the log says how, in one line like every other.
    """
    set_up_logging(options.log_level)
    set_up_metrics()
    spans = set_up_traces(name)

    async def supervised() -> None:
        task = asyncio.create_task(main(spans is not None), name=name)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            log.info("%s stopped on request", name)

    try:
        asyncio.run(supervised())
    except Exception as failed:  # whatever it was, the last line of the log tells it as JSON, and the exit code
        log.critical("%s failed: %s", name, failed, exc_info=failed)
        raise SystemExit(1) from None
    finally:
        if spans is not None:
            _send_spans(spans)


def _send_spans(spans: TracerProvider) -> None:
    """Sends what is left. In a thread, because a collector that is away would hold up the end for half a minute."""
    sending = threading.Thread(target=spans.shutdown, name="spans", daemon=True)
    sending.start()
    sending.join(SPANS_FLUSH)


async def until_one_ends(workers: Sequence[Worker]) -> None:
    """Runs them all; where one ends, for Temporal is away, the others end too. Raises what it ended with.

    Each is cancelled once: a worker lets what runs come to its end then, and a second time would break that off.
    """
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
