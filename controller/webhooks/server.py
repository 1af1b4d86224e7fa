"""The webhooks' HTTPS server: bounded in time and memory whoever calls, and served with certificates that change while
it runs. It knows bytes only; what is answered comes from `controller.webhooks.reviews`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

from aiohttp import web
from aiohttp.http import HttpProcessingError
from opentelemetry import metrics

from controller.webhooks.material import Material
from controller.webhooks.reviews import Answer

MEGABYTE = 1024 * 1024
# The API server takes requests of 3 MiB, and objects of half of that; a review holds one or two of them.
BODY_LIMIT = 3 * MEGABYTE
# Of all bodies that are being read or answered: what a flood of them may cost.
HELD_LIMIT = 32 * MEGABYTE
# The API server waits 2 s (deploy/webhooks); whoever sends its question more slowly has nobody to answer to.
READ_SECONDS = 2.0

_meter = metrics.get_meter("berth.controller")
_reviews = _meter.create_counter("berth_admission_reviews", description="Questions of API servers, by kind and result")
_seconds = _meter.create_histogram("berth_admission_duration", unit="s", description="From a question to its answer")


Webhook = Callable[[bytes], Answer | Awaitable[Answer]]


class Server:
    """`use` what to serve with, `listen`, and `close`. `webhooks`: path → what answers a body."""

    def __init__(self, bind: str, port: int, webhooks: Mapping[str, Webhook]) -> None:
        self._bind, self._port = bind, port
        self._held = 0
        self._context = _context()
        app = web.Application(client_max_size=BODY_LIMIT)
        for path, answer in webhooks.items():
            app.router.add_post(path, self._handler(path.removeprefix("/"), answer))
        # A body that is packed is none of the API server's, and would be larger than it says.
        self._runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, shutdown_timeout=2.0, logger=_log_of_errors()
        )

    def use(self, material: Material) -> None:
        """Serves new connections with this certificate. OSError or ValueError: it is unusable, the last one stays."""
        for context in (_context(), self._context):  # the first one only tries
            with _in_memory(material.certificate) as certificate, _in_memory(material.key) as key:
                context.load_cert_chain(certificate, key, password="")  # else it would ask the terminal

    async def listen(self) -> None:
        """OSError: the port cannot be had; may be tried again."""
        if self._runner.server is None:
            await self._runner.setup()
        await start_site(web.TCPSite(self._runner, self._bind, self._port, ssl_context=self._context))

    async def close(self) -> None:
        """Answers what was asked before, and no more."""
        await self._runner.cleanup()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(each[0], each[1]) for each in self._runner.addresses]

    def _handler(self, webhook: str, answer: Webhook) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            began = time.perf_counter()
            size = request.content_length
            if size is None:
                return _refused(411, "say Content-Length: the length of the body")
            if size > BODY_LIMIT:
                return _refused(413, f"a review has at most {BODY_LIMIT // MEGABYTE} MiB, not {size} bytes")
            if self._held + size > HELD_LIMIT:
                return _refused(503, "too many at once; ask again")
            self._held += size
            try:
                async with asyncio.timeout(READ_SECONDS):
                    body = await request.read()
                found = answer(body)
                told = found if isinstance(found, Answer) else await found
            except TimeoutError:
                return _refused(408, f"the body did not come within {READ_SECONDS:.0f} s")
            finally:
                self._held -= size
            _reviews.add(1, {"webhook": webhook, "kind": told.kind, "result": told.result})
            _seconds.record(time.perf_counter() - began, {"webhook": webhook})
            kind = "application/json" if told.status == 200 else "text/plain"
            return web.Response(status=told.status, body=told.body, content_type=kind)

        return handle


async def start_site(site: web.BaseSite) -> None:
    """Starts it whole or not at all: its runner's cleanup does not know a socket whose start was cancelled midway."""
    starting = asyncio.ensure_future(site.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        raise


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n")


def _log_of_errors() -> logging.Logger:
    """aiohttp's log, without a traceback for whatever anybody sends that is no HTTP: the sender was told."""
    log = logging.getLogger(f"{__name__}.http")

    def ours(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    log.addFilter(ours)
    return log


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """A file that is on no disk: keys are read from files only."""
    descriptor = os.memfd_create("berth-webhooks")
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
