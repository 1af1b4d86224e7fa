"""Reads what `planning.seats.migration` decides a move by: a namespace's pods, their ReplicaSets, moves that are under
way, and what nodes say of seats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crds.seatmigration import ENDED
from kube.client import KubeClient
from kube.resources import GPUSEATGROUPS, PODS, REPLICASETS, SEATMIGRATIONS
from planning.podspecs import mapping
from planning.seats.migration import Around, seats_of


async def around(
    kube: KubeClient, namespace: str, *, but: str = "", pods: Sequence[Mapping[str, Any]] | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> Around:  # fmt: skip
    """`but`: the UID of a SeatMigration that is no other one. `pods`, `groups`: where they were read already. Raises
    KubeError.
    """
    if pods is None:
        pods, _ = await kube.list(PODS, namespace)
    if groups is None:
        groups, _ = await kube.list(GPUSEATGROUPS)
    sets, _ = await kube.list(REPLICASETS, namespace, metadata_only=True)
    moves, _ = await kube.list(SEATMIGRATIONS, namespace)
    claims = {
        each["metadata"]["uid"]: each["metadata"]["name"]
        for each in moves
        if mapping(each.get("status")).get("phase") not in ENDED and each["metadata"]["uid"] != but
    }
    return Around(pods, seats_of(groups), claims, {each["metadata"]["uid"]: each for each in sets})
