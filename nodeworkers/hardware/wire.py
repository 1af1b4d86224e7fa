"""A look at the hardware as one line of JSON, from a vendor's watcher process to the node process.

The watcher runs a vendor's driver in its own address space, so what it prints is believed in its form only: every field
has its type and its bound, and what has another is refused as a whole, with a sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar, cast, get_args

import orjson

from planning.devices.cards import Card, Connection, Link, Reading, Sight, Trouble, Vendor

T = TypeVar("T")

MOST_LINE = 4 * 1024 * 1024  # bytes, with the newline
MOST_CARDS = 1024
_MOST_LINKS = 65_536
_MOST_FACTS = 8 * MOST_CARDS  # a few for each card
_MOST_NODES = 64  # of one card
_MOST_PIDS = 4096  # of one card
_MOST_TEXT = 256  # characters
_MOST_SENTENCE = 2048
_MOST_INTEGER = 2**53  # what every reader of JSON takes exactly
_ID = re.compile(r"[A-Za-z0-9._-]{1,63}")
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
_RESOURCE = re.compile(r"[A-Za-z0-9._/-]{0,317}")  # '' or a domain of 253 characters and a name of 63
_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])?")
_PATH = re.compile(r"/[!-~]{1,255}")
_CONNECTIONS = get_args(Connection)
_VENDORS = get_args(Vendor)


class WireError(Exception):
    """What a watcher said, or is to say, is no sight. The text says where and why, without a full stop."""


def encode(sight: Sight) -> bytes:
    """The line of a sight, with its newline. Raises WireError if it is longer than MOST_LINE, or holds what JSON cannot
    carry.
    """
    try:
        line = orjson.dumps(sight, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        raise WireError(f"the sight of {sight.vendor} cannot be written as JSON: {error}") from error
    if len(line) > MOST_LINE:
        raise WireError(f"the sight of {sight.vendor} takes {len(line):,} bytes; {MOST_LINE:,} are most")
    return line


def decode(line: bytes, vendor: Vendor) -> Sight:
    """The sight of a line that a watcher of `vendor` printed. Free text is cut to its bound and made printable; all
    else must be as `planning.devices.cards` says. Raises WireError.
    """
    if len(line) > MOST_LINE:
        raise WireError(f"a line of {len(line):,} bytes; {MOST_LINE:,} are most")
    try:
        value = orjson.loads(line)
    except ValueError as error:
        raise WireError(f"no JSON: {error}") from error
    return _sight(value, vendor)


def _sight(value: object, vendor: Vendor) -> Sight:
    found = _object(value, "a sight", Sight)
    if found["vendor"] != vendor:
        _refuse("vendor", f"{vendor!r}", found["vendor"])
    cards = _list(found["cards"], "cards", MOST_CARDS, card)
    if any(each.vendor != vendor for each in cards):
        raise WireError(f"cards have a card of another vendor than {vendor}")
    if len({each.id for each in cards}) < len(cards):
        raise WireError("cards have one id twice")
    return Sight(
        vendor=vendor,
        cards=cards,
        troubles=_by_card(found["troubles"], "troubles", _trouble),
        readings=_by_card(found["readings"], "readings", _reading),
        links=_list(found["links"], "links", _MOST_LINKS, _link),
        problem=_text(found["problem"], "problem", _MOST_SENTENCE),
        host={
            _text(key, "a key of host", _MOST_TEXT): _text(said, f"host[{key!r:.80}]", _MOST_SENTENCE)
            for key, said in _mapping(found["host"], "host", _MOST_FACTS).items()
        },
        simulated=_boolean(found["simulated"], "simulated"),
    )


def card(value: object, where: str) -> Card:
    """A card as JSON has it; `where` it stands, for the sentence of WireError."""
    found = _object(value, where, Card)
    if found["vendor"] not in _VENDORS:
        _refuse(f"{where}.vendor", f"one of {', '.join(_VENDORS)}", found["vendor"])
    numa = found["numa"]
    return Card(
        id=_matching(found["id"], f"{where}.id", _ID, "an id of at most 63 characters of [A-Za-z0-9._-]"),
        vendor=cast("Vendor", found["vendor"]),
        product=_text(found["product"], f"{where}.product", _MOST_TEXT),
        resource=_matching(found["resource"], f"{where}.resource", _RESOURCE, "the name of a resource, or ''"),
        index=_integer(found["index"], f"{where}.index"),
        address=_matching(found["address"], f"{where}.address", _ADDRESS, "a PCI address like 0000:3b:00.0, or ''"),
        numa=None if numa is None else _integer(numa, f"{where}.numa"),
        memory_mib=_integer(found["memory_mib"], f"{where}.memory_mib"),
        nodes=_list(found["nodes"], f"{where}.nodes", _MOST_NODES, _path),
        arch=_text(found["arch"], f"{where}.arch", _MOST_TEXT),
        driver=_text(found["driver"], f"{where}.driver", _MOST_TEXT),
        firmware=_text(found["firmware"], f"{where}.firmware", _MOST_TEXT),
        parent="" if found["parent"] == "" else _matching(found["parent"], f"{where}.parent", _ID, "a card's id or ''"),
    )


def _trouble(value: object, where: str) -> Trouble:
    found = _object(value, where, Trouble)
    return Trouble(
        reason=_matching(found["reason"], f"{where}.reason", _REASON, "a CamelCase word of at most 64 characters"),
        message=_text(found["message"], f"{where}.message", _MOST_SENTENCE),
        sure=_boolean(found["sure"], f"{where}.sure"),
    )


def _reading(value: object, where: str) -> Reading:
    found = _object(value, where, Reading)
    memory = found["memory_used_mib"]
    return Reading(
        temperature=_number(found["temperature"], f"{where}.temperature"),
        power=_number(found["power"], f"{where}.power"),
        memory_used_mib=None if memory is None else _integer(memory, f"{where}.memory_used_mib"),
        pids=_list(found["pids"], f"{where}.pids", _MOST_PIDS, _integer),
    )


def _link(value: object, where: str) -> Link:
    found = _object(value, where, Link)
    a, b = (_matching(found[end], f"{where}.{end}", _ID, "a card's id") for end in ("a", "b"))
    if a >= b:
        raise WireError(f"{where} goes from {a} to {b}; the lesser id comes first")
    if found["connection"] not in _CONNECTIONS:
        _refuse(f"{where}.connection", f"one of {', '.join(_CONNECTIONS)}", found["connection"])
    return Link(a, b, cast("Connection", found["connection"]), _integer(found["lanes"], f"{where}.lanes"))


def _refuse(where: str, wanted: str, found: object) -> NoReturn:
    raise WireError(f"{where} is {found!r:.80}, not {wanted}")


def _mapping(value: object, where: str, most: int) -> Mapping[str, object]:
    if not isinstance(value, dict):
        _refuse(where, "an object", value)
    if len(value) > most:
        raise WireError(f"{where} has {len(value):,} entries; {most:,} are most")
    return cast("Mapping[str, object]", value)


def _object(value: object, where: str, kind: type[Any]) -> Mapping[str, object]:
    found = _mapping(value, where, 64)
    wanted = {each.name for each in fields(kind)}
    if found.keys() != wanted:
        wrong = ", ".join(sorted(found.keys() ^ wanted))
        raise WireError(f"{where} has not the fields of a {kind.__name__}: {wrong!r:.80}")
    return found


def _list(value: object, where: str, most: int, of: Callable[[object, str], T]) -> tuple[T, ...]:
    if not isinstance(value, list):
        _refuse(where, "a list", value)
    if len(value) > most:
        raise WireError(f"{where} has {len(value):,} entries; {most:,} are most")
    return tuple(of(each, f"{where}[{number}]") for number, each in enumerate(value))


def _by_card(value: object, where: str, of: Callable[[object, str], T]) -> dict[str, T]:
    return {
        _matching(key, f"a key of {where}", _ID, "a card's id"): of(each, f"{where}[{key!r:.80}]")
        for key, each in _mapping(value, where, MOST_CARDS).items()
    }


def _text(value: object, where: str, most: int) -> str:
    if not isinstance(value, str):
        _refuse(where, "text", value)
    cut = value[:most]
    return cut if cut.isprintable() else "".join(each if each.isprintable() else " " for each in cut)


def _matching(value: object, where: str, pattern: re.Pattern[str], wanted: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        _refuse(where, wanted, value)
    return value


def _path(value: object, where: str) -> str:
    found = _matching(value, where, _PATH, "an absolute path")
    if ".." in found.split("/"):
        _refuse(where, "a path without ..", value)
    return found


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_INTEGER:
        _refuse(where, f"a whole number from 0 to {_MOST_INTEGER}", value)
    return value


def _number(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(where, "a number", value)
    return float(value)


def _boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        _refuse(where, "true or false", value)
    return value
