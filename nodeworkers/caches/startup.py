"""Makes the ledger, the store and what was being fetched agree before a node's process answers anybody: after a crash,
a disk that was lost, or an upgrade.
"""

from __future__ import annotations

from dataclasses import replace

from nodeworkers import metrics
from nodeworkers.caches.pulling import Incoming
from nodeworkers.ledger import Ledger
from nodeworkers.store import Store


def put_in_order(ledger: Ledger, store: Store, incoming: Incoming) -> list[str]:
    """Says what it did. A cache whose image is no longer on the disk is Ready no more, and as nothing but the control
    plane can have it fetched again, the ledger gets another identity, by which that notices. Blocks.
    """
    told = [ledger.repaired] if ledger.repaired else []
    if swept := store.sweep():
        told.append(f"{swept} images or parts of such that were not whole are gone from {store.root}")
    if swept := incoming.sweep():
        told.append(f"{swept} images that were being fetched a day ago are given up")
    metrics.on_disk(store.taken(), store.quota)
    lost = False
    for cache in ledger.caches():
        row = cache
        if cache.digest and store.get(cache.digest) is None:
            lost = True
            told.append(f"the image {cache.digest} of {cache.kind} {cache.name} is no longer on this node's disk")
            row = replace(
                row,
                state="Removing" if cache.state == "Removing" else "Pending",
                digest="",
                goal="",
                size_bytes=0,
                reason="its image is no longer on this node's disk, and is fetched again",
            )
        if cache.last_known_good and store.get(cache.last_known_good) is None:
            row = replace(row, last_known_good="")
        if row != cache:
            ledger.put_cache(row)
    if lost:
        ledger.renew()
    return told
