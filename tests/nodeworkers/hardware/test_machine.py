"""The YAML file of a simulated machine: what is enough, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.hardware.machine import MOST_BYTES, Machine, MachineError, read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "machine.yaml"


def said(file: Path, text: str | bytes) -> Machine:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(file)


def test_little_is_enough(file: Path) -> None:
    two = list(said(file, "tenstorrent: {cards: [{type: n150}, {type: n150}]}").tenstorrent.plugged())
    assert [(each.index, each.address) for each in two] == [(0, "0000:01:00.0"), (1, "0000:02:00.0")]
    assert len({each.asic for each in two}) == 2 and all(each.asic.startswith("5170") for each in two)
    assert len(list(said(file, "tenstorrent: {cards: [{type: n150, count: 4}]}").tenstorrent.plugged())) == 4


@pytest.mark.parametrize("text", ["", "{}", "# nothing\n", "tenstorrent: {}"])
def test_nothing_is_a_machine_without_cards(file: Path, text: str) -> None:
    assert not said(file, text).tenstorrent.cards


def test_as_many_as_go(file: Path) -> None:
    plugged = list(said(file, "tenstorrent: {cards: [{type: n150, count: 256}]}").tenstorrent.plugged())
    assert len({each.address for each in plugged}) == len({each.asic for each in plugged}) == 256


def test_cards_without_a_number_get_the_lowest_that_is_free(file: Path) -> None:
    machine = said(file, "tenstorrent: {cards: [{type: n150}, {type: n150, index: 0}, {type: n150, count: 2}]}")
    assert [each.index for each in machine.tenstorrent.plugged()] == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "tenstorrent:\n  cards:\n  - type: n150\n  - type: e150\n",
            r"line 4: machine\.tenstorrent\.cards\[1\]\.type: must be .*, not 'e150'\.",
        ),
        ("tenstorrent:\n  cards:\n  - type: n150\n    colour: red\n", r"line 4: .*cards\[0\]\.colour: is not a field"),
        ("tenstorrent:\n  cards:\n  - count: 2\n", r"line 3: .*cards\[0\]\.type: is required"),
        ("tenstorrent:\n  cards: [{type: n150, count: 257}]", r"line 2: .*count: must be at most 256, not 257"),
        ("tenstorrent:\n  cards: [{type: n150, count: 256}, {type: n150}]", r"line 1: .*256 Tenstorrent cards"),
        ("tenstorrent: {cards: [{type: n150, count: 2, index: 1}]}", r"are of one card: leave out count"),
        ("tenstorrent: {cards: [{type: n150, index: 1}, {type: n150, index: 1}]}", r"two cards have the index 1"),
        ("tenstorrent: {cards: [{type: n150, asicId: 5170000000000001}]}", r"asicId: must be a string"),
        ("tenstorrent: {cards: [{type: n150, fault: dead}]}", r"fault: must be 'none', 'hang'"),
        ("tenstorrent: {hugepages: {total: 1, free: 2}}", r"2 pages cannot be free of 1"),
        ("tenstorrent: {cards: n150}", r"cards: must be a list"),
        ("amd: {}", r"line 1: machine\.amd: is not a field"),
        ("- n150", r"line 1: machine: must be an object"),
        ("tenstorrent: {cards: [", r"line 1, is no YAML"),
        ("a: 1\n\tb: 2", r"line 2, is no YAML"),
        ("a: &x [1]\nb: *x", r"has an alias"),
        ("[" * 40 + "]" * 40, r"more than 32 levels"),
        ("a: 2026-02-31", r"cannot be read: day is out of range"),
        ("--- {}\n--- {}", r"is no YAML that can be taken: but found another document"),
        (b"a: \xff", r"is no UTF-8 text \(byte 3\)"),
        (b"#" * (MOST_BYTES + 1), r"has more than 1,048,576 bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(file: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(MachineError, match=words) as refused:
        said(file, text)
    assert str(refused.value).startswith(str(file)) and str(refused.value).endswith(".")


def test_a_file_that_is_not_there(file: Path) -> None:
    with pytest.raises(MachineError, match=r"machine\.yaml cannot be read: No such file or directory\.$"):
        read(file)


WORDS = st.text(max_size=8) | st.sampled_from(["n150", "hang", "0000:01:00.0"])
FIELDS = st.sampled_from(["type", "count", "index", "address", "asicId", "fault", "pids", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=12,
)


@settings(deadline=None)
@given(cards=VALUES, raw=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_whatever_it_says_it_is_a_machine_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, cards: object, raw: bytes
) -> None:
    file = tmp_path_factory.mktemp("machine") / "machine.yaml"
    for text in (raw, yaml.safe_dump({"tenstorrent": {"cards": cards}}).encode()):
        try:
            machine = said(file, text)
        except MachineError as error:
            sentence = str(error)
        else:
            sentence = "."
            assert len(list(machine.tenstorrent.plugged())) <= 256
        assert sentence.endswith(".") and len(sentence) < 2048
