"""What a pod says of its server by annotations: where it listens, how long requests may wait, what it is called.

For the node, which holds a pod's seat. Words that make no sense are told, and count as not said: a pod that runs is
not ended for a letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from planning.seats.endpoints import PORT_ANNOTATION
from planning.seats.parking import ENGINES, WAYS, Engine, Way

NAME = "kyb.ai/name"
PRIORITY = "kyb.ai/priority"
WEIGHT = "kyb.ai/weight"
PIN = "kyb.ai/pin"
MODELS = "kyb.ai/models"
DEADLINE = "kyb.ai/wait-seconds"
QUEUE = "kyb.ai/queue"
KEEPALIVE = "kyb.ai/keepalive-seconds"
PROTOCOL = "kyb.ai/protocol"
DRAIN = "kyb.ai/drain-seconds"
HEALTH = "kyb.ai/health"
PARK = "kyb.ai/park"
ENGINE = "kyb.ai/engine"

_MOST_MODELS = 16
_MOST_TEXT = 63

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PodSettings:
    """port: of the container, 0 for a server that takes no requests (batch). name: what schedules call it, '' for the
    pod's own. models: what `/v1/models` tells while it is parked; none: that is asked of the server as everything else.
    deadline: seconds for which a request is held. keepalive: seconds between two signs of life in a held stream, None
    without. drain: seconds that requests in flight get to end, and after which the seat keeps the slot for now. health:
    the path on which the server says that it serves. park, engine: how it is to be parked, and what serves; None where
    it does not say. problems: sentences.
    """

    port: int = 0
    name: str = ""
    priority: int = 0
    weight: float = 1.0
    pinned: bool = False
    models: tuple[str, ...] = ()
    deadline: float = 300.0
    queue: int = 256
    keepalive: float | None = None
    h2c: bool = False
    drain: float = 120.0
    health: str = "/health"
    park: Way | None = None
    engine: Engine | None = None
    problems: tuple[str, ...] = ()


def pod_settings(annotations: Mapping[str, str]) -> PodSettings:
    """Of a pod's annotations. Never raises."""
    problems: list[str] = []

    def read(key: str, parse: Callable[[str], T], otherwise: T, must: str) -> T:
        told = annotations.get(key)
        if told is None:
            return otherwise
        try:
            return parse(told.strip())
        except (ValueError, OverflowError):
            problems.append(f"{key}: {told[:_MOST_TEXT]!r} is no {must}")
            return otherwise

    usual = PodSettings()
    return PodSettings(
        port=read(PORT_ANNOTATION, _whole(1, 65535), 0, "port (1 to 65535)"),
        name=read(NAME, _word, "", f"name of at most {_MOST_TEXT} characters"),
        priority=read(PRIORITY, _whole(-(10**9), 10**9), usual.priority, "whole number"),
        weight=read(WEIGHT, _number(0.001, 1000), usual.weight, "weight (0.001 to 1000)"),
        pinned=read(PIN, _flag, usual.pinned, "true or false"),
        models=read(MODELS, _names, usual.models, f"list of at most {_MOST_MODELS} names, with commas between them"),
        deadline=read(DEADLINE, _number(1, 86_400), usual.deadline, "number of seconds (1 to 86400)"),
        queue=read(QUEUE, _whole(0, 100_000), usual.queue, "number of requests (0 to 100000)"),
        keepalive=read(KEEPALIVE, _number(1, 3600), usual.keepalive, "number of seconds (1 to 3600)"),
        h2c=read(PROTOCOL, _h2c, usual.h2c, "protocol: http1 or h2c"),
        drain=read(DRAIN, _number(0, 86_400), usual.drain, "number of seconds (0 to 86400)"),
        health=read(HEALTH, _path, usual.health, "path that begins with /"),
        park=read(PARK, _one_of(WAYS), None, f"way to park: {', '.join(WAYS)}"),
        engine=read(ENGINE, _one_of(ENGINES), None, f"engine that berth can put to sleep: {', '.join(ENGINES)}"),
        problems=tuple(problems),
    )


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(told: str) -> int:
        if len(told) > 20 or not least <= (value := int(told)) <= most:
            raise ValueError
        return value

    return parse


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(told: str) -> float:
        if not least <= (value := float(told)) <= most:
            raise ValueError
        return value

    return parse


def _word(told: str) -> str:
    if not 0 < len(told) <= _MOST_TEXT or not told.isprintable():
        raise ValueError
    return told


def _flag(told: str) -> bool:
    if told not in ("true", "false"):
        raise ValueError
    return told == "true"


def _names(told: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for each in told.split(",") if (name := each.strip())))
    if not 0 < len(names) <= _MOST_MODELS or any(len(name) > 256 or not name.isprintable() for name in names):
        raise ValueError
    return names


def _one_of(words: tuple[T, ...]) -> Callable[[str], T]:
    def parse(told: str) -> T:
        return words[words.index(told)]

    return parse


def _h2c(told: str) -> bool:
    if told not in ("http1", "h2c"):
        raise ValueError
    return told == "h2c"


def _path(told: str) -> str:
    if not told.startswith("/") or len(told) > 256 or not told.isascii() or not told.isprintable() or " " in told:
        raise ValueError
    return told
