"""What berth asks of model servers that can let go of their GPUs by themselves, for `engine_sleep.py`: a GET or POST,
and what its answer means. Nothing here decides anything.

Sources: vLLM's sleep mode (POST /sleep, POST /wake_up, GET /is_sleeping; there with --enable-sleep-mode and
VLLM_SERVER_DEV_MODE=1), SGLang's memory saver (POST /release_memory_occupation, POST /resume_memory_occupation; there
with --enable-memory-saver). SGLang does not tell whether it sleeps.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

_MOST_ANSWER = 64 * 1024  # bytes; the rest is not read
_MOST_SHOWN = 200
_CONNECT = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class EngineApi:
    """Paths, and what a server needs so that they are there; `asks`: whether it sleeps, '' where it does not say."""

    sleep: str
    wake: str
    asks: str
    needs: str


VLLM = EngineApi(
    "/sleep?level=1", "/wake_up", "/is_sleeping", "start it with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"
)
SGLANG = EngineApi("/release_memory_occupation", "/resume_memory_occupation", "", "start it with --enable-memory-saver")
APIS = {"vllm": VLLM, "sglang": SGLANG}


class NotSentError(Exception):
    """The server takes no connection: it has seen nothing of the call."""


class UnansweredError(Exception):
    """The call was sent, and nobody knows what became of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`body`: its first bytes as text."""

    status: int
    body: str

    @property
    def told(self) -> str:
        """For people."""
        said = "".join(each if each.isprintable() else " " for each in self.body[:_MOST_SHOWN]).strip()
        return f"status {self.status}" + (f" ({said})" if said else "")


async def ask(method: str, address: str, path: str, seconds: float) -> Answer:
    """Of the server on `address` ("ip:port"). Raises NotSentError, UnansweredError. Redirects are answers like others:
    a server does not send berth elsewhere.
    """
    limits = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, trust_env=False) as session,
            session.request(
                method, f"http://{address}{path}", allow_redirects=False, json={} if method == "POST" else None
            ) as response,
        ):
            read = await response.content.read(_MOST_ANSWER)
            return Answer(response.status, read.decode(errors="replace"))
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
        raise NotSentError(f"The server on {address} takes no connection: {error}") from error
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        why = f"not within {seconds:g} s" if isinstance(error, asyncio.TimeoutError) else f"{error}"
        raise UnansweredError(f"The server on {address} did not answer {method} {path}: {why}.") from error
