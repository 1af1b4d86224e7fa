"""What the node and its seat proxy tell each other: routes, traffic, counters, and the errors.

For `proxy.py`, and for whoever says by it what a seat is to be. The protocol is in `native/seat-proxy/src/wire.rs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

ENGINE_CONTROL = (
    # vLLM, with VLLM_SERVER_DEV_MODE or started for training
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/pause",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/server_info",
    "/start_profile",
    "/stop_profile",
    "/init_weight_transfer_engine",
    "/update_weights",
    "/scale_elastic_ep",
    "/vllm.control",
    # SGLang
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)
"""Paths by which engines are put to sleep, emptied or rewritten: the node's business, and no client's."""


class ProxyError(Exception):
    """The proxy did not do what it was asked. The text says what, and why; `code` is the proxy's word for it."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ProxyAway(ProxyError):
    """Nobody answers on the control socket. The proxy may serve all the same, or be starting: try again."""


class StaleEpoch(ProxyError):
    """Somebody with a higher epoch has spoken for the seat: whoever gets this must stop speaking for it."""


class Overruled(ProxyError):
    """The seat was given a new route while it was drained."""


class State(StrEnum):
    """What the proxy does with a seat's requests: forwards them, keeps them for a while, or refuses them with 503."""

    OPEN = "open"
    HELD = "held"
    AWAY = "away"


@dataclass(frozen=True)
class Answer:
    """What a path is answered with while its seat is not open."""

    status: int = 200
    content_type: str = "application/json"
    body: str = ""


@dataclass(frozen=True)
class Quiet:
    """A path that neither wakes the seat nor waits for it. While the seat is not open it is answered with `answer`;
    without one it is passed on to the parked server, which has 5 s for it.
    """

    path: str
    answer: Answer | None = None


def models(names: Sequence[str], created: int) -> tuple[Quiet, ...]:
    """`/v1/models` and `/v1/models/<name>` as OpenAI's API has them, answered while the seat is parked.

    `created` in seconds since 1970, of the pod say. A name with a slash or another odd letter has no path of its own.
    """
    shown = [{"id": name, "object": "model", "created": created, "owned_by": "berth"} for name in names]
    listed = Quiet("/v1/models", Answer(body=orjson.dumps({"object": "list", "data": shown}).decode()))
    single = tuple(
        Quiet(f"/v1/models/{name}", Answer(body=orjson.dumps(each).decode()))
        for name, each in zip(names, shown, strict=True)
        if name.isascii() and name[:1].isalnum() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    )
    return (listed, *single)


@dataclass(frozen=True)
class Route:
    """Everything the proxy is told of a seat, whole each time. Times are in seconds, addresses `IP:port` (`[IP]:port`).

    `epoch` is the speaker's: the proxy refuses a lower one than it has heard for this seat. `blocked` paths are refused
    with 403, with all below them and however they are spelt. `keepalive` is the time between the comments that a held
    stream gets; its status is 200 from then on, and what goes wrong is said within it. `retry_after` is told to whoever
    is refused, rounded up.
    """

    seat: str
    epoch: int
    listen: str
    backend: str | None
    state: State
    retry_after: float
    deadline: float
    queue: int = 256
    connections: int = 4096
    h2c: bool = False
    quiet: tuple[Quiet, ...] = (Quiet("/health"), Quiet("/metrics"))
    blocked: tuple[str, ...] = ENGINE_CONTROL
    keepalive: float | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Route:
        """A route as the proxy says it. Raises KeyError, TypeError or ValueError where it is none."""
        quiet = tuple(
            Quiet(each["path"], None if each["answer"] is None else Answer(**each["answer"])) for each in found["quiet"]
        )
        rest = {**found, "quiet": quiet, "blocked": tuple(found["blocked"]), "state": State(found["state"])}
        return cls(**rest)


@dataclass(frozen=True)
class Traffic:
    """What goes on at a seat, as of when the proxy said it.

    `held` requests wait, the oldest for `oldest` seconds; `in_flight` were forwarded and have not ended, the last one
    that did `ended` seconds ago. `failed` counts requests that the open seat's server did not answer, since the proxy
    began.
    """

    seat: str
    epoch: int
    state: State
    draining: bool
    held: int
    oldest: float | None
    in_flight: int
    ended: float | None
    failed: int

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Traffic:
        """Traffic as the proxy says it. Raises TypeError, ValueError or KeyError where it is none."""
        return cls(**{**found, "state": State(found["state"])})


@dataclass(frozen=True)
class SeatState:
    """One seat as the proxy has it."""

    route: Route
    traffic: Traffic


@dataclass(frozen=True)
class News:
    """Seats whose traffic has changed, and names of those that are served no more."""

    traffic: tuple[Traffic, ...]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drained:
    """How a drain ended: requests that are still in flight, and those that were broken off."""

    left: int
    cut: int


@dataclass(frozen=True)
class HoldTimes:
    """How long requests were held that were forwarded in the end: a count for each bound (in seconds), one beyond."""

    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    sum: float


@dataclass(frozen=True)
class SeatMetrics:
    """Counters of a seat since the proxy began to serve it, by the names in `native/seat-proxy/src/counts.rs`."""

    counts: Mapping[str, int]
    held_seconds: HoldTimes


@dataclass(frozen=True)
class Hello:
    """Which proxy answers: its version, its process, and for how many seconds it has been up."""

    version: str
    pid: int
    up: float
