"""What the seat proxy adds to a small request, beside a bare proxy in Python (aiohttp) as the peer.

The same request goes directly, through the proxy and through the peer, in turns on connections that are kept. The
server behind all three answers at once (`native/quick-backend`) and the client is a plain socket, so that neither is
the noise. Then requests are held, and measured is how long after the node's word they are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
from aiohttp import web

from benchmarks.report import Report, arguments, progress
from nodeworkers.seats.proxy import ProxyControl
from nodeworkers.seats.proxy_words import ProxyAway, Route, State
from stack import Lines
from stack.native import ensure
from stack.ports import choose

BODY = b'{"model":"llama-3.1-8b","prompt":"The capital of France is","max_tokens":8,"temperature":0}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: model.example\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
END = b'"text":"Paris"}]}'
TURN = 200
"""Requests of one way before the next has its turn."""


class Client:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> float:
        """One request; returns the seconds until its answer was there whole."""
        started = time.perf_counter()
        self._socket.sendall(REQUEST)
        answer = b""
        while not answer.endswith(END):
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError(f"The connection ended after {answer[:200]!r}.")
            answer += data
        return time.perf_counter() - started

    def close(self) -> None:
        """Ends it."""
        self._socket.close()


def percentile(times: list[float], share: float) -> float:
    """The time that `share` of all were at most, in microseconds; the smallest of the ordered times that is."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6


def in_turns(ways: dict[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """`count` times of each way, in turns, so that what else the machine does falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for ask in ways.values():
        for _ in range(TURN):
            ask()
    for _ in range(max(1, count // TURN)):
        for name, ask in ways.items():
            times[name] += [ask() for _ in range(TURN)]
    return times


def throughput(port: int, clients: int, seconds: float) -> float:
    """Requests a second of several connections at once, of one thread each."""
    counts = [0] * clients
    over = time.perf_counter() + seconds

    def run(number: int) -> None:
        client = Client(port)
        while time.perf_counter() < over:
            client.ask()
            counts[number] += 1
        client.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


async def peer(port: int, backend: int) -> None:
    """A bare proxy in Python: body in, body out, connections kept. Serves until it is ended."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            data = await request.read()
            async with session.request(
                request.method, f"http://127.0.0.1:{backend}{request.rel_url}", data=data, headers=request.headers
            ) as answer:
                kind = answer.headers["Content-Type"]
                return web.Response(status=answer.status, body=await answer.read(), headers={"Content-Type": kind})

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def answers(port: int) -> bool:
    """Whether somebody listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process while the block runs."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def seat_proxy(socket_path: Path) -> AsyncIterator[ProxyControl]:
    """A proxy that answers."""
    with running(ensure("seat-proxy", Lines()), "--control", socket_path):
        async with ProxyControl(socket_path) as control:
            for _ in range(1000):
                with contextlib.suppress(ProxyAway):
                    await control.hello()
                    break
                await asyncio.sleep(0.01)
            yield control


async def woken(control: ProxyControl, route: Route, port: int, rounds: int, held: int) -> list[float]:
    """For each round: seconds from the node's word that the seat is open to the last answer of `held` held requests."""
    times = []
    threads = ThreadPoolExecutor(held)
    ask = asyncio.get_running_loop().run_in_executor
    for number in range(1, rounds + 1):
        parked = replace(route, epoch=route.epoch + number, state=State.HELD)
        await control.set(parked)
        clients = [Client(port) for _ in range(held)]
        asked = [ask(threads, client.ask) for client in clients]
        while (await control.state())[route.seat].traffic.held < held:
            await asyncio.sleep(0.001)
        started = time.perf_counter()
        await control.set(replace(parked, state=State.OPEN))
        await asyncio.gather(*asked)
        times.append(time.perf_counter() - started)
        for client in clients:
            client.close()
    threads.shutdown()
    return times


async def measure(report: Report, count: int, seconds: float) -> None:
    """Runs everything and fills the report."""
    ports = choose(["seat", "peer"], {})
    with tempfile.TemporaryDirectory() as folder, running(ensure("quick-backend", Lines())) as server:
        backend = int(server.stdout.readline()) if server.stdout else 0
        itself = (sys.executable, "-m", "benchmarks.seat_proxy", "--peer", str(ports["peer"]), str(backend))
        with running(*itself):
            async with seat_proxy(Path(folder) / "proxy.sock") as control:
                route = Route("kyb-G01-s1", 1, f"127.0.0.1:{ports['seat']}", f"127.0.0.1:{backend}", State.OPEN, 5, 30)
                await control.set(route)
                while not answers(ports["peer"]):
                    await asyncio.sleep(0.05)
                named = {"direct": backend, "seat proxy": ports["seat"], "aiohttp proxy": ports["peer"]}
                progress(f"{count} requests each way, in turns of {TURN}")
                clients = {name: Client(port) for name, port in named.items()}
                tell_latency(report, in_turns({name: client.ask for name, client in clients.items()}, count))
                for client in clients.values():
                    client.close()
                for name, port in named.items():
                    progress(f"8 connections at once, {seconds:.0f} s: {name}")
                    rate = await asyncio.to_thread(throughput, port, 8, seconds)
                    report.note({f"requests_per_second_{key(name)}": rate})
                    report.row(f"8 connections, {name}", f"{rate:,.0f}/s", "by a client in Python on the same CPUs")
                progress("held requests")
                times = await woken(control, route, ports["seat"], 50, 16)
                p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
                report.note({"held_16_answered_p50_us": p50, "held_16_answered_p99_us": p99})
                report.row(
                    "16 held, all answered", f"{p50:,.0f} µs", f"p99 {p99:,.0f}; after the node's word, 50 times"
                )


def key(name: str) -> str:
    """A name for the file."""
    return name.replace(" ", "_")


def tell_latency(report: Report, times: dict[str, list[float]]) -> None:
    """Rows and values of each way, and what it adds to the direct one."""
    direct = {share: percentile(times["direct"], share) for share in (0.5, 0.99)}
    for name, measured in times.items():
        p50, p99 = percentile(measured, 0.5), percentile(measured, 0.99)
        added = {"p50": p50 - direct[0.5], "p99": p99 - direct[0.99]}
        mean = statistics.fmean(measured) * 1e6
        report.note({key(name): {"p50_us": p50, "p99_us": p99, "mean_us": mean, "requests": len(measured)}})
        if name == "direct":
            report.row(name, f"{p50:.0f} µs", f"p50; p99 {p99:.0f}")
        else:
            report.note({f"{key(name)}_adds": {f"{share}_us": value for share, value in added.items()}})
            report.row(name, f"{p50:.0f} µs", f"p50; p99 {p99:.0f}; adds {added['p50']:.0f} and {added['p99']:.0f}")


def main() -> None:
    """The command."""
    parser = arguments("seat_proxy", __doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=20_000, help="of each way")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way with many connections")
    parser.add_argument("--peer", type=int, nargs=2, metavar=("PORT", "BACKEND"), help="only be the peer")
    given = parser.parse_args()
    if given.peer:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(peer(*given.peer))
        return
    report = Report("seat proxy")
    asyncio.run(measure(report, given.requests, given.seconds))
    report.finish(given.json)


if __name__ == "__main__":
    main()
