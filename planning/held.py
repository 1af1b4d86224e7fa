"""What is held on nodes as far as the cluster shows it: for all who look on beside the placement round.

The round also knows what it promised, and its shapes by heart (`planning.placement`).
"""

from __future__ import annotations

from functools import partial

from crds.settings import Settings
from planning.capacity import Belongings, Holding, holdings
from planning.jobs import requests_of
from planning.model import Snapshot


def visible(snapshot: Snapshot, mine: Belongings, settings: Settings) -> list[Holding]:
    """What pods and Jobs hold. `mine`: those of workloads, of the same snapshot."""
    asked = partial(requests_of, settings=settings)
    return list(holdings(snapshot, {}, mine, asked, settings.bind_deadline_seconds))
