"""What earlier rounds of placement found out, so that a round costs what changed; no decision depends on it.

For the planner activity, which keeps one beside its cache, and for whoever decides many rounds in a row.
"""

from __future__ import annotations

from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings
from planning.caches.preference import Mounted, WarmFirst, mounted
from planning.caches.warmth import Cache, Warm
from planning.filters import Shape
from planning.fleet import Fleet
from planning.jobs import shape_of
from planning.strategies import Strategy

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
        self._mounted: dict[int, tuple[GPUWorkloadSpec, tuple[Mounted, ...]]] = {}
        self._mounted_before: dict[int, tuple[GPUWorkloadSpec, tuple[Mounted, ...]]] = {}
        self._warm_first: dict[tuple[str, tuple[Cache, ...]], WarmFirst] = {}
        self._warm_before: dict[tuple[str, tuple[Cache, ...]], WarmFirst] = {}

    def begin(self, settings: Settings) -> None:
        """Another round: what the last one did not need is forgotten."""
        self._before = self._shapes if settings == self._settings else {}
        self._shapes, self._settings = {}, settings
        self._mounted_before, self._mounted = self._mounted, {}
        self._warm_before, self._warm_first = self._warm_first, {}

    def shape(self, spec: GPUWorkloadSpec, settings: Settings) -> Shape:
        """`shape_of`, remembered."""
        key = id(spec)
        found = self._shapes.get(key) or self._before.get(key)
        if found is None:
            found = spec, shape_of(spec, settings)
        self._shapes[key] = found
        return found[1]

    def mounted(self, spec: GPUWorkloadSpec) -> tuple[Mounted, ...]:
        """`mounted`, remembered."""
        key = id(spec)
        found = self._mounted.get(key) or self._mounted_before.get(key)
        if found is None:
            found = spec, mounted(spec)
        self._mounted[key] = found
        return found[1]

    def warm_first(self, strategy: Strategy, wanted: tuple[Cache, ...], warm: Warm) -> WarmFirst:
        """The strategy with these caches before it: the same one for as long as they are on the same nodes, so that
        what the fleet knows of it goes on to serve.
        """
        key = strategy.name, wanted
        found = self._warm_first.get(key) or self._warm_before.get(key)
        if found is None or not found.holds(strategy, wanted, warm):
            found = WarmFirst(strategy, wanted, warm)
        self._warm_first[key] = found
        return found
