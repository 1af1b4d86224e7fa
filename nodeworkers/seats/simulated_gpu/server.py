"""A model server on simulated GPUs: a real process with real HTTP and memory that is really held, whose requests wait
while it is parked. In the shapes of OpenAI's API and of vLLM's sleep; stdlib only, so that any Python runs it.

`python -m nodeworkers.seats.simulated_gpu.server --folder F --cards UUID,UUID --bytes N --port P`
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nodeworkers.seats.simulated_gpu.device import SimulatedDevice
from nodeworkers.seats.simulated_gpu.machine import SimulatedOutOfMemoryError

_MOST_BODY = 16 * 2**20


class Model:
    """What answers requests: this process's device, and those of its other ranks, which work in step."""

    def __init__(self, name: str, device: SimulatedDevice, ranks: Sequence[socket.socket]) -> None:
        self.name, self.asleep, self.answered = name, False, 0
        self._device, self._ranks = device, ranks
        self._step, self._began = threading.Lock(), 0.0

    def token(self) -> None:
        """One step of all ranks. It waits while one of them is locked or parked, and for ever if one died."""
        with self._step:
            self._began = time.monotonic()
            self._device.work()
            for rank in self._ranks:
                try:
                    rank.sendall(b".")
                    alive = rank.recv(1)
                except OSError:
                    alive = b""
                while not alive:
                    time.sleep(1)
            self._began = 0.0

    def watch(self, seconds: float) -> None:
        """As engines' watchdogs do: ends the process once a step takes longer."""
        while not self._began or time.monotonic() - self._began < seconds:
            time.sleep(seconds / 10)
        os._exit(1)

    def sleep(self) -> None:
        """As vLLM's sleep mode."""
        if not self.asleep:
            self._device.put_to_sleep()
            self.asleep = True

    def wake(self) -> None:
        """Raises SimulatedOutOfMemoryError."""
        if self.asleep:
            self._device.wake_up()
            self.asleep = False


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1."""

    protocol_version = "HTTP/1.1"
    model: Model
    seconds: float  # that a token takes

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/health":
                self._say(200, {})
            case "/v1/models":
                self._say(200, {"object": "list", "data": [{"id": self.model.name, "object": "model"}]})
            case "/is_sleeping":
                self._say(200, {"is_sleeping": self.model.asleep})
            case "/metrics":
                self._answer(200, "text/plain", f"simulated_requests_total {self.model.answered}\n".encode())
            case _:
                self._say(404, {"error": "there is nothing here"})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(min(length, _MOST_BODY))
        match self.path.partition("?")[0]:
            case "/v1/completions":
                try:
                    asked = json.loads(body)
                    self._complete(asked)
                except (ValueError, AttributeError):
                    self._say(400, {"error": "no completion request"})
            case "/sleep":
                self.model.sleep()
                self._say(200, {})
            case "/wake_up":
                try:
                    self.model.wake()
                    self._say(200, {})
                except SimulatedOutOfMemoryError as error:
                    self._say(500, {"error": str(error)})
            case _:
                self._say(404, {"error": "there is nothing here"})

    def _complete(self, asked: Mapping[str, Any]) -> None:
        tokens, stream = int(asked.get("max_tokens", 1)), bool(asked.get("stream"))
        words = []
        if stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        for number in range(tokens):
            self.model.token()
            time.sleep(self.seconds)
            words.append(str(number))
            if stream:
                self._event(json.dumps(self._said(asked, str(number))))
        self.model.answered += 1
        if stream:
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._say(200, self._said(asked, " ".join(words)))

    def _said(self, asked: Mapping[str, Any], text: str) -> dict[str, Any]:
        return {"model": self.model.name, "id": asked.get("user", ""), "choices": [{"index": 0, "text": text}]}

    def _event(self, data: str) -> None:
        chunk = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        self.wfile.flush()

    def _say(self, status: int, told: Mapping[str, Any]) -> None:
        self._answer(status, "application/json", json.dumps(told).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as a proxy opens."""

    daemon_threads = True
    request_queue_size = 256

    def server_bind(self) -> None:
        """Without asking for the host's name: in a pod without DNS the answer takes half a minute."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "simulated", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulated-model-server")
    parser.add_argument("--folder", type=Path, required=True, help="of the simulated GPUs")
    parser.add_argument("--cards", default=os.environ.get("CUDA_VISIBLE_DEVICES", ""), help="UUIDs, with commas")
    parser.add_argument("--bytes", type=int, required=True, help="on each card")
    parser.add_argument("--port", type=int, default=0, help="0: none, it computes for itself")
    parser.add_argument("--name", default=os.environ.get("KYB_GPU_SEAT", "simulated"))
    parser.add_argument("--start", type=float, default=0.0, help="seconds that loading takes")
    parser.add_argument("--token", type=float, default=0.0, help="seconds that a token takes")
    parser.add_argument("--watchdog", type=float, help="seconds after which a step that hangs ends the process")
    parser.add_argument("--ranks", action="store_true", help="a process for each card")
    parser.add_argument("--rank", type=int, default=0, help="(of one such process: the descriptor of its socket)")
    options = parser.parse_args()
    cards = options.cards.split(",")
    mine = cards[:1] if options.ranks or options.rank else cards
    device = SimulatedDevice(options.folder, options.name)
    time.sleep(options.start)
    try:
        for card in mine:
            device.allocate(card, options.bytes)
    except SimulatedOutOfMemoryError as error:
        print(f"{options.name}: out of memory: {error}", file=sys.stderr)
        return 1
    if options.rank:
        with socket.socket(fileno=options.rank) as first:
            while first.recv(1):
                device.work()
                first.sendall(b".")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ranks = [_rank(options, card) for card in cards[1:]] if options.ranks else []
    model = Model(options.name, device, ranks)
    if options.watchdog is not None:
        threading.Thread(target=model.watch, args=(options.watchdog,), daemon=True).start()
    if not options.port:
        while True:
            model.token()
            time.sleep(max(options.token, 0.01))
    handler = type("BoundHandler", (Handler,), {"model": model, "seconds": options.token})
    print(f"{options.name} serves on port {options.port}", flush=True)
    Server(("", options.port), handler).serve_forever()
    return 0


def _rank(options: argparse.Namespace, card: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [
                sys.executable, "-m", "nodeworkers.seats.simulated_gpu.server", "--rank", str(theirs.fileno()),
                "--folder", str(options.folder), "--cards", card, "--bytes", str(options.bytes), "--name", options.name,
            ],
            pass_fds=[theirs.fileno()],
        )  # fmt: skip
    return ours


if __name__ == "__main__":
    sys.exit(main())
