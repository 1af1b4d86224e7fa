"""What a watcher says is a look at the hardware, or is refused with a sentence; nothing else comes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.hardware.wire import MOST_CARDS, MOST_LINE, WireError, decode, encode
from planning.devices.cards import Card, Connection, Link, Reading, Sight, Trouble

CARD = Card(
    "tt-00ff", "tenstorrent", "n150", "tenstorrent.com/n150", 0, "0000:3b:00.0", 1, 12_288, ("/dev/tenstorrent/0",)
)
SIGHT = Sight(
    "tenstorrent",
    (CARD, replace(CARD, id="tt-0100", index=1, numa=None)),
    {"tt-00ff": Trouble("Detached", "It is gone. Plug it in again.", True)},
    {"tt-0100": Reading(41.5, 30.0, 17, (4, 5))},
    (Link("tt-00ff", "tt-0100", "nvlink", 4),),
    "One card could not be read.",
    {"driver": "2.10.0", "iommu/tt-00ff": "none"},
    True,
)

_ids = st.text("abcXYZ019._-", min_size=1, max_size=63)
_texts = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=40)
_whole = st.integers(0, 2**53)
_cards = st.builds(
    Card, _ids, st.just("nvidia"), _texts, st.just("nvidia.com/gpu"), _whole, st.sampled_from(["", "0000:3b:00.0"]),
    st.none() | _whole, _whole, st.lists(st.just("/dev/nvidia0"), max_size=3).map(tuple), _texts, _texts, _texts,
    st.just("") | _ids,
)  # fmt: skip
_links = st.builds(
    lambda ends, connection, lanes: Link(min(ends), max(ends), connection, lanes),
    st.sets(_ids, min_size=2, max_size=2), st.sampled_from(get_args(Connection)), _whole,
)  # fmt: skip
_figures = st.none() | st.floats(allow_nan=False, allow_infinity=False)
_sights = st.builds(
    Sight, st.just("nvidia"), st.lists(_cards, unique_by=lambda card: card.id, max_size=5).map(tuple),
    st.dictionaries(_ids, st.builds(Trouble, st.just("Xid79"), _texts, st.booleans()), max_size=3),
    st.dictionaries(
        _ids, st.builds(Reading, _figures, _figures, st.none() | _whole, st.lists(_whole, max_size=3).map(tuple)),
        max_size=3,
    ),
    st.lists(_links, max_size=3).map(tuple), _texts, st.dictionaries(_texts, _texts, max_size=3), st.booleans(),
)  # fmt: skip
_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(_sights)
def test_what_is_said_is_what_was_seen(sight: Sight) -> None:
    line = encode(sight)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line, "nvidia") == sight


@given(st.binary(max_size=200) | _json.map(lambda value: json.dumps(value).encode()))
def test_whatever_comes_is_a_look_or_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode(line, "nvidia")


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a document."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [place, *(found for key, each in inner for found in _places(each, (*place, key)))]


@given(st.data())
def test_nonsense_in_any_place_is_a_look_or_refused(data: st.DataObject) -> None:
    document = json.loads(encode(SIGHT))
    place = data.draw(st.sampled_from(_places(document)[1:]))
    within = document
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = data.draw(_json)
    try:
        found = decode(json.dumps(document).encode(), "tenstorrent")
    except WireError as error:
        refused = str(error)
    else:
        refused = ""
        assert decode(encode(found), "tenstorrent") == found
    assert refused.isprintable() and len(refused) < 400


@given(
    _sights,
    st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from(["put", "cut", "flip", "double"]), st.binary(max_size=4)),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_a_line_that_is_broken_on_its_way_is_a_look_or_refused(
    sight: Sight, broken: list[tuple[float, str, bytes]]
) -> None:
    """As when a library writes into it, or a process is killed in the middle of it."""
    line = bytearray(encode(sight))
    for where, how, what in broken:
        place = int(where * len(line))
        match how:
            case "put":
                line[place:place] = what
            case "cut":
                del line[place : place + 1 + len(what)]
            case "flip":
                line[place : place + 1] = bytes(byte ^ (what or b"\x20")[0] for byte in line[place : place + 1])
            case "double":
                line += line[place:]
    refused = ""
    try:
        found = decode(bytes(line), "nvidia")
    except WireError as error:
        refused = str(error)
    else:
        assert decode(encode(found), "nvidia") == found
    assert refused.isprintable() and len(refused) < 400


def _set(*path: Any) -> Callable[[Any], None]:
    """Puts the last of `path` where the others lead."""

    def change(document: Any) -> None:
        for key in path[:-2]:
            document = document[key]
        document[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_set("vendor", "nvidia"), "vendor is 'nvidia', not 'tenstorrent'"),
        (_set("more", 1), "a sight has not the fields of a Sight: 'more'"),
        (lambda document: document.pop("host"), "a sight has not the fields of a Sight: 'host'"),
        (_set("cards", 0, "vendor", "nvidia"), "another vendor"),
        (_set("cards", 0, "vendor", "intel"), r"cards\[0\].vendor is 'intel', not one of nvidia"),
        (_set("cards", 0, "id", "tt-0100"), "one id twice"),
        (_set("cards", 0, "id", "../../etc"), r"cards\[0\].id is '../../etc', not an id of at most 63"),
        (_set("cards", 0, "id", "x" * 64), "63"),
        (_set("cards", 0, "index", True), r"cards\[0\].index is True, not a whole number"),
        (_set("cards", 0, "index", -1), "not a whole number"),
        (_set("cards", 0, "index", 10**30), "not a whole number"),
        (_set("cards", 0, "numa", 0.5), "not a whole number"),
        (_set("cards", 0, "nodes", ["dev/x"]), r"cards\[0\].nodes\[0\] is 'dev/x', not an absolute path"),
        (_set("cards", 0, "nodes", ["/dev/../etc/shadow"]), "without .."),
        (_set("cards", 0, "nodes", ["/dev/a b"]), "not an absolute path"),
        (_set("cards", 0, "nodes", ["/dev/x"] * 65), "65 entries; 64 are most"),
        (_set("cards", 0, "resource", "a b"), "not the name of a resource"),
        (_set("cards", 0, "address", "3b:00.0"), "not a PCI address"),
        (_set("cards", [{}] * (MOST_CARDS + 1)), "1,025 entries; 1,024 are most"),
        (_set("troubles", "tt-00ff", "reason", "not camel"), "CamelCase"),
        (_set("troubles", "tt-00ff", "reason", ""), "CamelCase"),
        (_set("troubles", "tt-00ff", "sure", 1), "not true or false"),
        (_set("readings", "tt-0100", "temperature", "hot"), "'hot', not a number"),
        (_set("readings", "tt-0100", "pids", [-1]), "not a whole number"),
        (_set("links", 0, "a", "tt-0101"), "from tt-0101 to tt-0100; the lesser id comes first"),
        (_set("links", 0, "connection", "usb"), "'usb', not one of nvlink"),
        (_set("host", "driver", 2), r"host\['driver'\] is 2, not text"),
        (_set("problem", None), "problem is None, not text"),
    ],
)
def test_each_field_has_its_form(change: Callable[[Any], None], why: str) -> None:
    document = json.loads(encode(SIGHT))
    change(document)
    with pytest.raises(WireError, match=why):
        decode(json.dumps(document).encode(), "tenstorrent")


def test_free_text_is_made_fit_to_be_shown() -> None:
    odd = replace(SIGHT, cards=(replace(CARD, product="n\x1b[31m150\n" + "x" * 999),), problem="a\x00b")
    found = decode(encode(odd), "tenstorrent")
    assert found.problem == "a b" and found.cards[0].product.startswith("n [31m150 xxx")
    assert len(found.cards[0].product) == 256


def test_200_cards_fit_and_more_than_fits_is_said() -> None:
    cards = tuple(replace(CARD, id=f"tt-{number:016x}", index=number) for number in range(200))
    readings = {card.id: Reading(40.0 + number, 30.5, 17, (number, 1)) for number, card in enumerate(cards)}
    sight = replace(SIGHT, cards=cards, readings=readings, troubles={}, links=())
    line = encode(sight)
    assert len(line) < MOST_LINE / 20 and decode(line, "tenstorrent") == sight
    with pytest.raises(WireError, match="are most"):
        encode(replace(sight, problem="x" * MOST_LINE))
    with pytest.raises(WireError, match="are most"):
        decode(b" " * MOST_LINE + b"{}", "tenstorrent")


def test_what_json_cannot_carry_is_said_by_the_watcher() -> None:
    with pytest.raises(WireError, match="cannot be written as JSON"):
        encode(replace(SIGHT, problem="\ud800"))
    lost = decode(encode(replace(SIGHT, readings={"tt-0100": Reading(math.nan)})), "tenstorrent")
    assert lost.readings["tt-0100"].temperature is None, "what is no number was not measured"
