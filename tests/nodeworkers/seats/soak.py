"""Asks all servers of a group without end while whoever can be killed is, and tells what became of the requests. For
the test that nothing wrong comes of it, and for `benchmarks.seats_soak`.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

from stack import StackError
from tests.nodeworkers.seats.whole import NAMES, Seated, server

CLIENTS = 2  # of each server
HONEST = frozenset(
    {
        "seat_away", "seat_queue_full", "seat_wait_timeout", "seat_connections_full", "seat_removed", "proxy_ending",
        "server_unreachable",
    }
)  # fmt: skip
BROKEN = frozenset({"server_broke_off", "server_silent"})
_PAUSE = (4.0, 9.0)  # seconds between two kills


@dataclass
class Seen:
    """What became of requests: answered by whom they were meant for, refused with a reason and a Retry-After, broken
    off (which under kills a connection may be), or wrong: sentences. `victims`: how often each was killed; `waits`:
    seconds of those that were answered.
    """

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    wrong: list[str] = field(default_factory=list)
    victims: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    turn: Lock = field(default_factory=Lock)


class _Client(Thread):
    def __init__(self, name: str, address: str, seen: Seen, over: Event) -> None:
        super().__init__(daemon=True)
        self._server, self._address, self._seen, self._over = name, address, seen, over

    def run(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            self._one(f"{self.ident}-{number}")
            self._over.wait(random.uniform(0.0, 0.4))  # load, no secret

    def _one(self, id: str) -> None:
        began = time.monotonic()
        connection = http.client.HTTPConnection(self._address, 80, timeout=150)
        try:
            connection.request("POST", "/v1/completions", json.dumps({"user": id, "max_tokens": 2}))
            answer = connection.getresponse()
            status, after, body = answer.status, answer.getheader("Retry-After"), answer.read()
        except (OSError, http.client.HTTPException):
            with self._seen.turn:
                self._seen.broken += 1
            self._over.wait(0.5)
            return
        finally:
            connection.close()
        self._judge(id, status, after, body, time.monotonic() - began)
        if status != 200:
            self._over.wait(0.5)

    def _judge(self, id: str, status: int, after: str | None, body: bytes, seconds: float) -> None:
        seen = self._seen
        try:
            told = json.loads(body)
        except ValueError:
            told = {}
        with seen.turn:
            if status == 200 and (told.get("model"), told.get("id")) == (self._server, id):
                seen.answered += 1
                seen.waits.append(seconds)
                return
            code = told.get("error", {}).get("code", "") if isinstance(told.get("error"), dict) else ""
            if status == 503 and code in HONEST and after:
                seen.refused[code] += 1
            elif code in BROKEN:
                seen.broken += 1
            else:
                seen.wrong.append(f"{self._server} was asked {id} and got {status}: {body[:200]!r}")


def soak(node: Seated, seconds: float, *, kills: bool, seen: Seen | None = None) -> Seen:
    """Asks for so long, and adds to what was `seen`. Asserts nothing."""
    seen, over = seen or Seen(), Event()
    addresses = {name: node.node.get("service", name)["spec"]["clusterIP"] for name in NAMES}
    clients = [_Client(name, addresses[name], seen, over) for name in NAMES for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    deadline = time.monotonic() + seconds
    victims = _victims(node)
    try:
        while time.monotonic() < deadline:
            time.sleep(min(random.uniform(*_PAUSE), max(0.0, deadline - time.monotonic())))
            if kills:
                # Each in turn, in another order each time.
                least = min(seen.victims[name] for name in victims)
                name = random.choice([each for each in victims if seen.victims[each] == least])
                with suppress(ProcessLookupError):
                    victims[name]()
                seen.victims[name] += 1
    finally:
        over.set()
        for client in clients:
            client.join(160)
    return seen


def _victims(node: Seated) -> dict[str, Callable[[], None]]:
    stack = node.node.stack

    def restarted(name: str) -> Callable[[], None]:
        def kill() -> None:
            with suppress(StackError):
                stack.wait_restarted(name, stack.kill(name), 60)

        return kill

    def process(words: str) -> Callable[[], None]:
        def kill() -> None:
            found = node.processes(words)
            if found:
                os.kill(random.choice(found), signal.SIGKILL)

        return kill

    def pod() -> None:
        name = random.choice(NAMES)
        node.node.stack.kubectl("delete", "pod", name, "--timeout=60s", check=False)
        node.node.apply(server(name, node.folder))

    return {
        "berth node": restarted("node"),
        "worker": restarted("worker"),
        "temporal": restarted("temporal"),
        "proxy": process("seat-proxy --control"),
        "helper": process("nodeworkers.seats.helper"),
        "server": process("simulated_gpu.server"),
        "pod": pod,
    }
