"""What earlier rounds of placement found out, so that a round costs what changed; no decision depends on it.

For the planner activity, which keeps one beside its cache, and for whoever decides many rounds in a row.
"""

from __future__ import annotations

from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings
from planning.filters import Shape
from planning.fleet import Fleet
from planning.jobs import shape_of

# Entries of the fleet's views in all, about 230 bytes each: a hundred shapes on 3,000 nodes.
_ENTRIES = 300_000


class Memory:
    """For one round at a time: two that go on side by side must each have their own."""

    def __init__(self) -> None:
        self.fleet = Fleet((), most=_ENTRIES)
        self._settings: Settings | None = None
        # By identity, with the spec itself, so that no other can come to have its id.
        self._shapes: dict[int, tuple[GPUWorkloadSpec, Shape]] = {}
        self._before: dict[int, tuple[GPUWorkloadSpec, Shape]] = {}

    def begin(self, settings: Settings) -> None:
        """Another round: what the last one did not need is forgotten."""
        self._before = self._shapes if settings == self._settings else {}
        self._shapes, self._settings = {}, settings

    def shape(self, spec: GPUWorkloadSpec, settings: Settings) -> Shape:
        """`shape_of`, remembered."""
        key = id(spec)
        found = self._shapes.get(key) or self._before.get(key)
        if found is None:
            found = spec, shape_of(spec, settings)
        self._shapes[key] = found
        return found[1]
