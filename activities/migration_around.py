"""Reads what `planning.seats.migration` decides a move by: a namespace's pods, their ReplicaSets, moves that are under
way, and what nodes say of seats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crds.seatmigration import ENDED
from kube.client import KubeClient
from kube.errors import NotFound
from kube.resources import GPUSEATGROUPS, PODS, REPLICASETS, SEATMIGRATIONS
from planning.podspecs import mapping
from planning.seats.migration import Around, seats_of


async def named(kube: KubeClient, namespace: str) -> list[dict[str, Any]]:
    """The namespace's pods, of each the metadata alone: there may be ten thousand. Raises KubeError."""
    return (await kube.list(PODS, namespace, metadata_only=True))[0]


async def around(
    kube: KubeClient, namespace: str, pods: Sequence[Mapping[str, Any]], *, but: str = "", only: str | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> Around:  # fmt: skip
    """`pods`: as `named` has them; of those that hold seats the whole is read here, or of `only` one of them. `but`:
    the UID of a SeatMigration that is no other one; `groups`: where they were read already. Raises KubeError.
    """
    if groups is None:
        groups, _ = await kube.list(GPUSEATGROUPS)
    seats = seats_of(groups)
    holders = {seat.pod for seat in seats if seat.namespace == namespace}
    wanted = holders if only is None else holders & {only}
    found = {each["metadata"]["name"]: each for each in pods}
    for name in sorted(wanted & found.keys()):
        try:
            found[name] = await kube.get(PODS, name, namespace)
        except NotFound:
            del found[name]
    sets, _ = await kube.list(REPLICASETS, namespace, metadata_only=True)
    moves, _ = await kube.list(SEATMIGRATIONS, namespace)
    claims = {
        each["metadata"]["uid"]: each["metadata"]["name"]
        for each in moves
        if mapping(each.get("status")).get("phase") not in ENDED and each["metadata"]["uid"] != but
    }
    return Around(list(found.values()), seats, claims, {each["metadata"]["uid"]: each for each in sets})
