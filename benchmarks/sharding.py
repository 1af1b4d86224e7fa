"""What is lost when one large fleet is cut into pools, each with a ledger of its own: docs/scaling.md, in simulation.

The trace's nodes many times over, dealt out to the pools; whoever comes looks at two pools that could hold it, drawn by
chance, and goes where more is free. For whoever thinks about more than one pool.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.report import Report, arguments, progress
from berth.demo.report import percentile
from berth.demo.trace import NODES_FILE, PODS_FILE, default_folder
from berth.simulate.load import Load, offered
from berth.simulate.run import inflated
from berth.simulate.trace import Recorded, read_history, read_nodes
from planning import strategies
from planning.filters import Shape
from planning.model import WHOLE, NodeView
from planning.orders import Fifo
from planning.simulation import Arrival, capacity, empty, typical_of
from planning.steady import Simulation, fitting
from planning.strategies import Request, Strategy

STRATEGY = "fgd"
CHOICES = 2


@dataclass(slots=True)
class Pool:
    """A pool as those know it who choose one: the shapes it could hold, and how many thousandths of GPUs are free."""

    nodes: list[NodeView]
    able: set[Shape]
    free: int


def dealt(nodes: Sequence[NodeView], count: int, pools: int, shapes: set[Shape]) -> list[Pool]:
    """So many nodes, the trace's over and over, dealt out like cards: pools are alike as far as they can be."""
    many = [replace(nodes[i % len(nodes)], name=f"{nodes[i % len(nodes)].name}-{i}") for i in range(count)]
    Random(0).shuffle(many)
    hands = [many[pool::pools] for pool in range(pools)]
    return [Pool(hand, fitting(hand, shapes), capacity(hand)) for hand in hands]


def drawn(pools: Sequence[Pool], shape: Shape, draw: Random) -> list[int]:
    """Two pools that could hold it, by chance; fewer where fewer could."""
    found: list[int] = []
    for index in draw.sample(range(len(pools)), len(pools)):
        if shape in pools[index].able:
            found.append(index)
            if len(found) == CHOICES:
                break
    return found


def filled(pools: Sequence[Pool], queue: Sequence[Arrival], strategy: Strategy) -> dict[str, float]:
    """As many GPUs are asked for as there are, and nothing ends. Who finds no place in the emptier of two pools is sent
    on to the other one. Each pool decides on its own, so the busiest one tells how long it all takes.
    """
    fleets, took, counts = [empty(pool.nodes) for pool in pools], [0.0] * len(pools), [0] * len(pools)
    whole, draw, asked, held = sum(capacity(pool.nodes) for pool in pools), Random(1), 0, 0
    for number, pod in enumerate(queue):
        asked += pod.gpu_milli
        if asked > whole:
            break
        request = Request(str(number), "", pod.name, pod.shape.requests, 1)
        for index in sorted(drawn(pools, pod.shape, draw), key=lambda each: -pools[each].free):
            began = time.thread_time()
            place = fleets[index].find(request, pod.shape, strategy)
            if place is not None:
                fleets[index].take(place, pod.shape.requests)
            took[index] += time.thread_time() - began
            counts[index] += 1
            if place is not None:
                held += pod.gpu_milli
                pools[index].free -= pod.gpu_milli
                break
    return {
        "unallocated_gpu_percent": 100 * (1 - held / whole),
        "decisions_per_second_of_a_pool": sum(counts) / sum(took),
        "decisions_per_second_of_all": sum(counts) / max(took),
    }


def steady(pools: Sequence[Pool], offer: Load, strategy: Strategy) -> dict[str, float]:
    """Work comes and goes; each waits in the pool that it was sent to. Free is what nobody has there or waits for."""
    draw, sent = Random(1), list[tuple[int, int]]()
    simulations = [Simulation(pool.nodes, (), strategy, Fifo(), 1) for pool in pools]
    sizes = [capacity(pool.nodes) for pool in pools]
    before = held = None
    for submission in offer.submissions:
        if submission.at >= offer.begin and before is None:
            before = _held(simulations, offer.begin)
        if submission.at >= offer.end and held is None:
            held = _held(simulations, offer.end) - (before or 0.0)
        choice = drawn(pools, submission.shape, draw)
        for index in choice:
            each = simulations[index]
            each.advance(submission.at)
            waiting = sum(each.submissions[number].gpu_milli for number in each.waiting)
            pools[index].free = (sizes[index] - each.gpu_milli - waiting) * WHOLE // sizes[index]
        best = max(choice, key=lambda each: pools[each].free)
        simulations[best].submit(submission)
        if offer.begin <= submission.at < offer.end and not submission.ran:
            sent.append((best, len(simulations[best].submissions) - 1))
    last, waits = offer.submissions[-1].at, []
    held = held if held is not None else _held(simulations, offer.end) - (before or 0.0)
    _held(simulations, last)
    for index, number in sent:
        each = simulations[index]
        start = each.started[number]
        waits.append((last if start is None else start) - each.submissions[number].at)
    return {
        "unallocated_gpu_percent": 100 * (1 - held / sum(sizes) / (offer.end - offer.begin)),
        "mean_wait_seconds": statistics.fmean(waits),
        "p99_wait_seconds": percentile(waits, 0.99),
    }


def _held(simulations: Sequence[Simulation], moment: float) -> float:
    """GPUs held so far, all pools together, in thousandths times seconds."""
    for each in simulations:
        each.advance(moment)
    return sum(each.gpu_seconds for each in simulations)


def main() -> None:
    """Entry point."""
    parser = arguments("sharding", "what is lost by pools with a ledger each")
    folder = default_folder()
    parser.add_argument("--nodes", type=Path, metavar="CSV", default=folder / NODES_FILE)
    parser.add_argument("--pods", type=Path, metavar="CSV", default=folder / PODS_FILE)
    parser.add_argument("--count", type=int, default=100_000, help="nodes that are filled (100000)")
    parser.add_argument("--busy", type=int, default=10_000, help="nodes on which work comes and goes (10000)")
    parser.add_argument("--load", type=float, default=95.0, help="percent of their GPUs that is asked for (95)")
    parser.add_argument("--pools", type=int, nargs="+", default=[1, 10, 100], help="1 10 100")
    options: argparse.Namespace = parser.parse_args()
    report = Report(f"sharding: openb on {options.count:,} nodes, {STRATEGY}, the better of {CHOICES} pools")
    nodes, recorded = read_nodes(options.nodes), read_history(options.pods)
    possible = fitting(nodes, {pod.arrival.shape for pod in recorded})
    pods: list[Recorded] = [pod for pod in recorded if pod.arrival.shape in possible]
    arrivals = [pod.arrival for pod in pods]
    for count in options.pools:
        strategy = strategies.informed(STRATEGY, lambda: typical_of(arrivals))
        pools = dealt(nodes, options.count, count, possible)
        gpu_milli = sum(capacity(pool.nodes) for pool in pools)
        progress(f"{count} pools: filling {options.count:,} nodes …")
        full = filled(pools, inflated(arrivals, gpu_milli, 1.0, 42), strategy)
        pools = dealt(nodes, options.busy, count, possible)
        gpu_milli = sum(capacity(pool.nodes) for pool in pools)
        progress(f"{count} pools: {options.busy:,} nodes, busy …")
        busy = steady(pools, offered(pods, gpu_milli, options.load / 100, 42), strategy)
        report.note({f"{count} pools": {"filled": full, "busy": busy}})
        report.row(
            f"{count:,} pools, filled", f"{full['unallocated_gpu_percent']:.2f} %",
            f"GPUs unallocated; {full['decisions_per_second_of_a_pool']:,.0f} decisions/s of a pool, "
            f"{full['decisions_per_second_of_all']:,.0f} of all side by side",
        )  # fmt: skip
        report.row(
            f"{count:,} pools, {options.load:g} % load", f"{busy['unallocated_gpu_percent']:.2f} %",
            f"GPUs unallocated on {options.busy:,} nodes; mean wait {busy['mean_wait_seconds']:,.1f} s, "
            f"p99 {busy['p99_wait_seconds']:,.0f} s",
        )  # fmt: skip
    report.finish(options.json)


if __name__ == "__main__":
    main()
