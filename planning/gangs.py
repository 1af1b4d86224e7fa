"""Gives the pods of a gang their places, all at once or none; says why there are none, and what is kept free for one.

For the placement round. Pods of a gang are alike, so how many a node holds is arithmetic: whether the gang fits, and in
which domains of its topology, is known before a strategy is asked where each pod goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from planning.capacity import Room
from planning.filters import Shape, explain_never, show_gpus, slots, slots_when_empty, within
from planning.fleet import Place
from planning.floor import Floor, Kept, Wish, beyond
from planning.model import NodeView, Places, Resources
from planning.places import Gang, times
from planning.strategies import StrategyError
from planning.windows import Window, where

# By the value of the topology's label ('' where the node lacks it, or none is asked for), by node: pods that it holds.
Slots = dict[str, dict[str, int]]
Part = tuple[str, int]
"""A domain, and how many pods it gets."""


def place(
    floor: Floor, wish: Wish, gang: Gang, most: int, strategy: str, seed: int, avoided: Collection[str]
) -> Places:
    """Where the gang's pods go from now on, as many as there is room for, but no more than `most`; nowhere if that is
    fewer than it needs. Raises StrategyError; then too nothing is taken.
    """
    found: list[Place] = []
    places: list[tuple[str, int]] = []
    for domain, pods in _parts(gang, most, _free(floor, wish.shape, gang, avoided)):
        one = wish
        if gang.level:
            shape = replace(wish.shape, constraints=within(wish.shape.constraints, gang.level, domain))
            one = replace(wish, shape=shape)
        first = len(found)
        try:
            for _ in range(pods):
                where = floor.put(one, strategy, seed, avoided)
                if where is None:
                    _undo(floor, wish, found)
                    return ()
                found.append(where)
        except StrategyError:
            _undo(floor, wish, found)
            raise
        places += sorted(Counter(each.node for each in found[first:]).items())
    return tuple(places)


def place_reserved(floor: Floor, wish: Wish, gang: Gang, most: int, window: Window, avoided: Collection[str]) -> Places:
    """The same on the GPUs of the gang's window, on as few nodes as possible; the `avoided` ones come last."""
    nodes = {node.name: node for node in floor.nodes if node.name in window.nodes}
    free: Slots = {}
    for name, count in floor.slots_reserved(wish, window).items():
        free.setdefault(domain_of(gang, nodes[name]), {})[name] = count
    places: list[tuple[str, int]] = []
    for domain, pods in _parts(gang, most, free):
        here, chosen = free[domain], list[tuple[str, int]]()
        for name in sorted(here, key=lambda name: (name in avoided, -here[name], name)):
            if share := min(here[name], pods):
                floor.hold_reserved(wish, window, name, share)
                chosen.append((name, share))
                pods -= share
        places += sorted(chosen)
    return tuple(places)


def when_its_window_is_full(floor: Floor, wish: Wish, gang: Gang, window: Window) -> str:
    """What a gang is told whose window has begun and has not enough left for it."""
    free, need = sum(floor.slots_reserved(wish, window).values()), wish.shape.requests
    kept = sum(window.slots(name, need.gpus) for name in window.nodes)
    text = f"needs {_asks(wish.shape, gang)}" + (f" in one {_level(gang)}" if gang.required else "")
    left = f"what is left of the {show_gpus(window.gpus)} of GPUReservation {window.name} has room for {kept} of them"
    return f"{text}; {left}, now for {free}; {where(window)}"


def _undo(floor: Floor, wish: Wish, found: Iterable[Place]) -> None:
    for each in found:
        floor.take_back(wish, each, wish.shape.requests)


def _free(floor: Floor, shape: Shape, gang: Gang, avoided: Collection[str] = ()) -> Slots:
    """How many of the gang's pods each node holds now."""
    found: Slots = {}
    for node in floor.allowed(shape):
        if node.name not in avoided and (count := slots(shape.requests, floor.left[node.name])):
            found.setdefault(domain_of(gang, node), {})[node.name] = count
    return found


def domain_of(gang: Gang, node: NodeView) -> str:
    return node.labels.get(gang.level, "") if gang.level else ""


def enough(gang: Gang, free: Mapping[str, int]) -> bool:
    """Whether the gang can start where so many of its pods fit into each domain."""
    return bool(_parts(gang, gang.pods, {domain: {"": count} for domain, count in free.items()}))


def _parts(gang: Gang, most: int, free: Slots) -> list[Part]:
    """The domains that get pods, the fewest that do; nothing where there is not enough room."""
    sums = {domain: sum(nodes.values()) for domain, nodes in free.items()}
    if not gang.level:
        pods = min(most, sums.get("", 0))
        return [("", pods)] if pods >= gang.least else []
    named = sorted((count, domain) for domain, count in sums.items() if domain)
    if gang.required:
        best = next((domain for count, domain in named if count >= most), None)
        if best is not None:
            return [(best, most)]
        return [(named[-1][1], named[-1][0])] if named and named[-1][0] >= gang.least else []
    left, parts = min(most, sum(sums.values())), list[Part]()
    if left < gang.least:
        return []
    while left and named:
        # The smallest that takes all that is left, else the largest.
        count, domain = next((each for each in named if each[0] >= left), named[-1])
        named.remove((count, domain))
        parts.append((domain, min(count, left)))
        left -= min(count, left)
    return [*parts, ("", left)] if left else parts


def never(nodes: Sequence[NodeView], shape: Shape, gang: Gang, now: float = inf) -> str:
    """Why the gang could not run even if all nodes were empty; '' if it could."""
    empty: Counter[str] = Counter()
    for node in nodes:
        if count := slots_when_empty(shape, node, now):
            empty[domain_of(gang, node)] += count
    if not empty:
        return f"of {_asks(shape, gang)} not one finds a place: {explain_never(shape, nodes)}"
    if enough(gang, empty):
        return ""
    if not gang.required:
        return f"needs {_asks(shape, gang)}; all nodes together could hold {empty.total()} even if empty"
    text, named = f"needs {_asks(shape, gang)} in one {_level(gang)}", {each: empty[each] for each in empty if each}
    if not named:
        return f"{text}; no node that could hold one has the label {gang.level}"
    largest = max(sorted(named), key=lambda domain: named[domain])
    return f"{text}; the largest, {largest}, could hold {named[largest]} even if empty"


def explain_now(floor: Floor, shape: Shape, gang: Gang) -> str:
    """Why the gang cannot start now although it could some time."""
    free = {domain: sum(nodes.values()) for domain, nodes in _free(floor, shape, gang).items()}
    named = {domain: count for domain, count in free.items() if domain}
    text = f"needs {_asks(shape, gang)}" + (f" in one {_level(gang)}" if gang.required else "")
    if gang.required and named:
        best = max(sorted(named), key=lambda domain: named[domain])
        text += f": {named[best]} would fit now in {best}, {sum(free.values())} in all"
    else:
        text += f": {sum(free.values())} would fit now"
    mine = {node.name for node in floor.allowed(shape)} if floor.kept else set()
    kept = next((kept for kept in floor.kept if kept.node in mine), None)
    if kept is not None:
        text += f"; what comes free is kept for {kept.view.namespace}/{kept.view.name}, which is before it"
    return text


def helps(gang: Gang, free: Mapping[str, int]) -> list[str]:
    """What would let the gang start now, where so many of its pods fit into each domain."""
    if enough(gang, free):
        return []
    found, everywhere = [], sum(free.values())
    here = max((count for domain, count in free.items() if domain), default=0) if gang.required else everywhere
    if here:
        found.append(f"minReplicas: {here} or less: so many of its pods fit now")
    if gang.required and everywhere >= gang.least:
        found.append(f"topology.mode: Preferred: {everywhere} of its pods fit now in several domains")
    return found


def _asks(shape: Shape, gang: Gang) -> str:
    """`10 pods with 8 GPUs each`."""
    least = f"at least {gang.least} of " if gang.least < gang.pods else ""
    pods = "pod" if gang.pods == 1 else "pods"
    return f"{least}{gang.pods} {pods} with {show_gpus(shape.requests.gpus, shape.requests.gpu_resource)} each"


def _level(gang: Gang) -> str:
    """`zone` for `topology.kubernetes.io/zone`."""
    return gang.level.rpartition("/")[2]


def kept_for(
    wish: Wish, gang: Gang, floor: Floor, releases: Mapping[str, Sequence[tuple[float, Resources]]]
) -> list[Kept]:
    """Where the gang at the head of the queue will fit first, and what must be kept free there until then; at most an
    entry for each of its pods. `releases` as for a single one.
    """
    domains: dict[str, list[NodeView]] = {}
    empty: Counter[str] = Counter()
    for node in floor.allowed(wish.shape):
        if count := slots_when_empty(wish.shape, node):
            domain = domain_of(gang, node) if gang.required else ""
            domains.setdefault(domain, []).append(node)
            empty[domain] += count
    options = []
    for domain, nodes in domains.items():
        if empty[domain] >= gang.least and (domain or not gang.required):
            start, now = _start(wish.shape.requests, gang.least, floor, nodes, releases)
            options.append((start, -now, domain))
    if not options:
        return []
    start, _, domain = min(options)
    return _kept(wish, gang.least, floor, domains[domain], releases, start)


def _start(
    need: Resources, pods: int, floor: Floor, nodes: Iterable[NodeView],
    releases: Mapping[str, Sequence[tuple[float, Resources]]],
) -> tuple[float, int]:  # fmt: skip
    """When so many pods will fit on these nodes together, inf if nobody can tell; and how many fit now."""
    free = {node.name: floor.left[node.name].copy() for node in nodes}
    held = {name: slots(need, left) for name, left in free.items()}
    coming = sorted(
        ((moment, name, amount) for name in free for moment, amount in releases.get(name, ()) if moment < inf),
        key=lambda each: each[:2],
    )
    now = total = sum(held.values())
    start = 0.0
    for moment, name, amount in coming:
        if total >= pods:
            break
        free[name].give_back(amount)
        start, more = moment, slots(need, free[name]) - held[name]
        total += more
        held[name] += more
    return start if total >= pods else inf, now


def _kept(
    wish: Wish, pods: int, floor: Floor, nodes: Iterable[NodeView],
    releases: Mapping[str, Sequence[tuple[float, Resources]]], start: float,
) -> list[Kept]:  # fmt: skip
    """So many pods on these nodes, first where the most of them fit already."""
    need, options = wish.shape.requests, []
    for node in nodes:
        left, freed = floor.left[node.name].copy(), Room(0, 0, 0, 0)
        now = slots(need, left)
        if start < inf:
            for moment, amount in releases.get(node.name, ()):
                if moment <= start:
                    left.give_back(amount)
                    freed.give_back(amount)
        if count := slots(need, left) if start < inf else slots_when_empty(wish.shape, node):
            options.append((-now, -count, node.name, freed))
    found = []
    for _, count, name, freed in sorted(options, key=lambda each: each[:3]):
        if share := min(-count, pods):
            amount = beyond(times(need, share), freed)
            found.append(Kept(wish.view, name, amount, start if start < inf else None))
            pods -= share
    return found
