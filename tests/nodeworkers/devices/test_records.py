"""The record of devices: what was given is known after any end of the process, and what nobody needs goes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.devices import records as records_module
from nodeworkers.devices.records import KEPT_SECONDS, Allocation, Known, Records
from nodeworkers.ledger import FILE, Ledger, LedgerError
from planning.devices.cards import Card
from planning.devices.offers import Injection, Mount, Node

CARD = Card(
    "tt-00ff", "tenstorrent", "n150", "tenstorrent.com/n150", 0, "0000:3b:00.0", 1, 12_288, ("/dev/tenstorrent/0",)
)
N150 = CARD.resource
GIVEN = Injection(
    {"TT_VISIBLE_DEVICES": "0000:3b:00.0"}, (Mount("/dev/hugepages-1G", "/dev/hugepages-1G", False),),
    (Node("/dev/tenstorrent/by-id/wormhole-ff", "/dev/tenstorrent/0", "rwm"),), ("berth.dev/tenstorrent=tt-00ff",),
    {"a": "ä"},
)  # fmt: skip

Open = Callable[[], Records]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.fixture
def reopen(folder: Path) -> Iterator[Open]:
    """Opens the same records again, as after a restart."""
    opened: list[Ledger] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def reopen() -> Records:
        close()
        opened.append(Ledger(folder))
        return Records(opened[-1])

    yield reopen
    close()


def _tampered(folder: Path, statement: str, *values: Any) -> None:
    db = sqlite3.connect(folder / FILE)
    with db:
        db.execute(statement, values)
    db.close()


def test_what_was_given_and_seen_is_there_after_a_restart(reopen: Open) -> None:
    records = reopen()
    made = records.remember_allocation(N150, ["tt-1", "tt-2"], GIVEN, 100.0)
    assert made == Allocation(N150, ("tt-1", "tt-2"), "", 100.0, GIVEN)
    claimed = records.remember_allocation(N150, ["tt-3"], None, 101.5, claim="c-1")
    health = {"state": "Unhealthy", "reason": "Detached", "since": 7.5}
    records.remember_cards([(CARD, health)], 50.0)
    for known in (records, reopen()):
        assert known.allocations() == (made, claimed)
        assert known.claim("c-1") == (claimed,) and known.claim("c-2") == () and known.claim("") == ()
        assert known.cards() == {"tt-00ff": Known(CARD, health, 50.0)}


def test_a_device_is_given_to_the_last_who_got_it(reopen: Open) -> None:
    records = reopen()
    records.remember_allocation(N150, ["tt-1", "tt-2"], GIVEN, 1.0)
    records.remember_allocation(N150, ["tt-3"], GIVEN, 2.0)
    records.remember_allocation(N150, ["tt-2", "tt-3"], GIVEN, 3.0)
    claimed = records.remember_allocation(N150, ["tt-2"], None, 4.0, claim="c-1")
    for known in (records, reopen()):
        assert [each.ids for each in known.allocations()] == [("tt-1",), ("tt-2", "tt-3"), ("tt-2",)]
        assert known.claim("c-1") == (claimed,), "a claim has its own"


def test_what_is_given_back_is_forgotten(reopen: Open) -> None:
    records = reopen()
    records.remember_allocation(N150, ["tt-1", "tt-2"], GIVEN, 1.0)
    records.remember_allocation(N150, ["tt-1"], GIVEN, 1.0, claim="c-1")
    records.forget(["tt-1", "tt-9"])
    records.forget(["tt-1"], claim="c-9")
    assert [(each.ids, each.claim) for each in records.allocations()] == [(("tt-2",), ""), (("tt-1",), "c-1")]
    records.forget(["tt-1"], claim="c-1")
    records.forget(["tt-2"])
    assert records.allocations() == () == reopen().allocations()


_acts = st.lists(
    st.tuples(
        st.sampled_from(["give", "forget", "restart"]), st.lists(st.sampled_from("abcde"), min_size=1, max_size=4),
        st.sampled_from(["", "c-1", "c-2"]),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=_acts)
def test_memory_and_file_agree_whatever_happens(
    acts: list[tuple[str, list[str], str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("node")
    ledger = Ledger(folder)
    records, expected = Records(ledger), dict[tuple[str, str], float]()
    for number, (act, ids, claim) in enumerate(acts):
        if act == "give":
            records.remember_allocation(N150, ids, GIVEN, float(number), claim)
            expected.update(dict.fromkeys(((id, claim) for id in ids), float(number)))
        elif act == "forget":
            records.forget(ids, claim)
            for id in ids:
                expected.pop((id, claim), None)
        else:
            before = records.allocations()
            ledger.close()
            ledger = Ledger(folder)
            records = Records(ledger)
            assert records.allocations() == before
        pairs = [(id, each.claim, each.at) for each in records.allocations() for id in each.ids]
        assert len(pairs) == len(expected) and {(id, claim): at for id, claim, at in pairs} == expected
    ledger.close()


def test_the_number_of_allocations_is_bounded(reopen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MOST_ALLOCATIONS", 3)
    records = reopen()
    for number in range(6):
        records.remember_allocation(N150, [f"tt-{number}"], None, float(number), claim=f"c-{number}")
    assert [each.claim for each in records.allocations()] == ["c-3", "c-4", "c-5"]
    assert records.allocations() == reopen().allocations()


def test_a_card_is_forgotten_a_week_after_it_was_seen_and_not_while_it_is_held(reopen: Open) -> None:
    records = reopen()
    old, held = replace(CARD, id="tt-old"), replace(CARD, id="tt-held")
    records.remember_cards([(CARD, {}), (old, {}), (held, {})], 0.0)
    records.remember_cards([(CARD, {})], KEPT_SECONDS - 1, held=["tt-held"])
    assert records.cards().keys() == {"tt-00ff", "tt-old", "tt-held"}
    records.remember_cards([(CARD, {})], KEPT_SECONDS + 1, held=["tt-held"])
    assert records.cards().keys() == reopen().cards().keys() == {"tt-00ff", "tt-held"}


def test_the_number_of_cards_is_bounded(reopen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MOST_CARDS", 2)
    records = reopen()
    for number in range(4):
        records.remember_cards([(replace(CARD, id=f"tt-{number}"), {})], float(number), held=["tt-0"])
    assert records.cards().keys() == reopen().cards().keys() == {"tt-0", "tt-3"}


def test_nothing_is_written_while_nothing_changes(folder: Path) -> None:
    ledger = Ledger(folder)
    records = Records(ledger)
    records.remember_cards([(CARD, {"state": "Healthy"})], 0.0)
    before = ledger.changes
    for second in range(100):
        records.remember_cards([(CARD, {"state": "Healthy"})], float(second))
    records.forget(["tt-1"])
    assert ledger.changes == before
    records.remember_cards([(CARD, {"state": "Healthy"})], 3600.0)
    assert ledger.changes == before + 1, "that it is still there is noted once an hour"
    records.remember_cards([(CARD, {"state": "Unhealthy"})], 3601.0)
    assert ledger.changes == before + 2
    ledger.close()


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE cards SET card = ?", "no JSON"),
        ("UPDATE cards SET card = ?", json.dumps({"id": "tt-00ff"})),
        ("UPDATE cards SET id = ?", "tt-other"),
        ("UPDATE cards SET health = ?", "[1]"),
        ("UPDATE cards SET health = CAST(? AS TEXT)", b'{"a":"\xff"}'),
        ("UPDATE allocations SET devices = ?", "[1]"),
        ("UPDATE allocations SET devices = ?", "[]"),
        ("UPDATE allocations SET devices = ?", '["tt-2"]'),
        ("UPDATE allocations SET devices = ?", '["tt-1","tt-1"]'),
        ("UPDATE allocations SET injection = ?", '{"env":[]}'),
        ("UPDATE allocations SET resource = CAST(? AS TEXT)", b"\xff"),
        ("UPDATE allocations SET claim = CAST(? AS TEXT)", b"\xff"),
    ],
)
def test_what_makes_no_sense_is_dropped_and_told(
    reopen: Open, folder: Path, statement: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    records = reopen()
    table = statement.split()[1]
    key = "id" if table == "cards" else "number"
    records.remember_cards([(CARD, {}), (replace(CARD, id="tt-0100"), {})], 1.0)
    records.remember_allocation(N150, ["tt-2"], GIVEN, 1.0)
    records.remember_allocation(N150, ["tt-1"], GIVEN, 1.0)
    which = "= 'tt-00ff'" if key == "id" else "= 2"
    _tampered(folder, f"{statement} WHERE {key} {which}", value)
    for _ in range(2):
        records = reopen()
        kept_cards = {"tt-0100"} if table == "cards" else {"tt-00ff", "tt-0100"}
        kept = [("tt-2",)] if table == "allocations" else [("tt-2",), ("tt-1",)]
        assert records.cards().keys() == kept_cards and [each.ids for each in records.allocations()] == kept
    (told,) = caplog.messages
    assert told.startswith("1 entries of the ledger's devices make no sense and were dropped") and told.isprintable()
    records.remember_allocation(N150, ["tt-1"], GIVEN, 2.0)
    assert [each.ids for each in records.allocations()][-1] == ("tt-1",)


def test_a_write_that_fails_changes_nothing(folder: Path) -> None:
    ledger = Ledger(folder)
    records = Records(ledger)
    records.remember_allocation(N150, ["tt-1", "tt-2"], GIVEN, 1.0)
    records.remember_cards([(CARD, {})], 1.0)
    before, cards = records.allocations(), dict(records.cards())
    ledger.execute("CREATE TRIGGER full BEFORE INSERT ON allocations BEGIN SELECT RAISE(ABORT, 'disk full'); END", ())
    ledger.execute("CREATE TRIGGER full2 BEFORE INSERT ON cards BEGIN SELECT RAISE(ABORT, 'disk full'); END", ())
    with pytest.raises(LedgerError, match="disk full"):
        records.remember_allocation(N150, ["tt-2"], GIVEN, 2.0)
    with pytest.raises(LedgerError, match="disk full"):
        records.remember_cards([(CARD, {"state": "Unhealthy"})], 2.0)
    assert records.allocations() == before == Records(ledger).allocations()
    assert records.cards() == cards == Records(ledger).cards()
    ledger.close()


GIVES = """
import sys
from pathlib import Path
from nodeworkers.devices.records import Records
from nodeworkers.ledger import Ledger
from planning.devices.offers import Injection
records = Records(Ledger(Path(sys.argv[1])))
number = 0
while True:
    records.remember_allocation("tenstorrent.com/n150", [f"tt-{number}", "tt-last"], Injection({"N": str(number)}), 1.0)
    print(number, flush=True)
    number += 1
"""


def test_what_was_answered_survives_a_kill(reopen: Open, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-I", "-c", GIVES, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(200):
        answered = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    answered += len(child.communicate()[0].split())
    given = {id: each for each in reopen().allocations() for id in each.ids}
    assert given.keys() - {f"tt-{answered + 1}"} == {f"tt-{number}" for number in range(answered + 1)} | {"tt-last"}
    last = given["tt-last"].injection
    assert last is not None and int(last.env["N"]) in (answered, answered + 1)
