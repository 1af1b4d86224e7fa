"""What a start puts right: a disk that was lost under the ledger, and what a crash left half fetched."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from nodeworkers.caches.pulling import Incoming
from nodeworkers.caches.startup import put_in_order
from nodeworkers.ledger import Ledger
from nodeworkers.store import Store
from planning.caches.volumes import NodeCache
from tests.images import caches

HERE, LOST, OLD = (f"sha256:{letter * 64}" for letter in "abc")
ROW = NodeCache(
    "c-1", "TritonKernelCache", "team-a", "llama", "Ready", 1, HERE, "/cache", 5, True, last_known_good=OLD, epoch=3,
    goal=HERE,
)  # fmt: skip


def test_a_whole_node_is_left_as_it_is(tmp_path: Path) -> None:
    ledger, store, incoming = node(tmp_path)
    ledger.put_cache(replace(ROW, last_known_good=""))
    identity = ledger.identity
    assert put_in_order(ledger, store, incoming) == []
    assert ledger.cache("c-1") == replace(ROW, last_known_good="") and ledger.identity == identity
    ledger.close()


def test_an_image_that_is_gone_is_no_longer_served_and_the_control_plane_hears_of_it(tmp_path: Path) -> None:
    ledger, store, incoming = node(tmp_path)
    ledger.put_cache(ROW)
    ledger.put_cache(replace(ROW, uid="c-2", name="lost", digest=LOST, goal=LOST))
    ledger.put_cache(replace(ROW, uid="c-3", name="leaving", digest=LOST, goal=LOST, state="Removing"))
    identity = ledger.identity
    told = put_in_order(ledger, store, incoming)
    assert len(told) == 2 and all("is no longer on this node's disk" in each for each in told)
    rows = {row.name: row for row in ledger.caches()}
    assert rows["llama"] == replace(ROW, last_known_good=""), "what is there is served"
    assert (rows["lost"].state, rows["lost"].serves, rows["lost"].epoch) == ("Pending", "", 3)
    assert rows["leaving"].state == "Removing"
    assert ledger.identity != identity
    ledger.close()
    again = Ledger(tmp_path)
    assert again.identity != identity, "also after the next start"
    again.close()


def test_what_was_being_fetched_is_gone_on_with_for_a_day(tmp_path: Path) -> None:
    ledger, store, incoming = node(tmp_path)
    for name, age in (("fresh", 3600.0), ("old", 2 * 86400.0)):
        folder = tmp_path / "incoming" / name
        folder.mkdir()
        (folder / "x.part").write_bytes(b"x")
        os.utime(folder, (time.time() - age, time.time() - age))
    assert len(put_in_order(ledger, store, incoming)) == 1
    assert [place.name for place in (tmp_path / "incoming").iterdir()] == ["fresh"]
    ledger.close()


def node(folder: Path) -> tuple[Ledger, Store, Incoming]:
    store = Store(folder / "store", 2**30)
    with store.staged() as content:
        caches.kernel(content)
        store.keep(content, HERE, {}, ())
    return Ledger(folder), store, Incoming(folder / "incoming")
