"""Strategies on openb: GPUs left unallocated against the published FGD replayed in the same run, and how fast the
planner alone decides on ever larger fleets. For whoever changes a strategy or the fleet's index.

The published one takes the first name among equal integer scores (scheduling.md 3.2). Seeds are paired: each strategy
sees the same arrivals. The checkout holds only whole-GPU pods of openb; give `--nodes` and `--pods` the original lists.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Report, arguments, progress
from berth.cli.simulate_command import parse_seeds
from berth.demo.report import percentile
from berth.demo.trace import NODES_FILE, PODS_FILE, default_folder
from berth.simulate.run import inflated
from berth.simulate.trace import read_nodes, read_pods
from planning import strategies
from planning.model import NodeView
from planning.simulation import Arrival, capacity, empty, fill, typical_of
from planning.strategies import Candidate, Rank, Request, Strategy
from planning.strategies.fgd import FGD

ARRIVALS = 1.3
PUBLISHED = "FGD as published"
# The two that are left out look at every node each time (random), or are leastLoaded here (costOptimized).
COMPARED = ("headroom", "fgd", "mostAllocated", "bestFit", "leastLoaded")


class PublishedFGD(FGD):
    """The authors': among equal scores the first name, whatever is free there."""

    def rank(self, request: Request, candidate: Candidate) -> Rank:
        return super().rank(request, candidate)[:1]


def strategy(name: str, pods: tuple[Arrival, ...]) -> Strategy:
    if name == PUBLISHED:
        return PublishedFGD(typical_of(pods))
    return strategies.informed(name, partial(typical_of, pods))


def unallocated(nodes: Path, pods: Path, name: str, seed: int) -> float:
    """Percent of all GPUs, once as many were asked for."""
    there, asked = read_nodes(nodes), read_pods(pods)
    queue = inflated(asked, capacity(there), ARRIVALS, seed)
    return fill(there, queue, strategy(name, asked), seed).unallocated


def compare(report: Report, nodes: Path, pods: Path, seeds: tuple[int, ...], map_all: Callable[..., Any]) -> None:
    """Each strategy's mean, and its paired difference from the published one."""
    names = (PUBLISHED, *COMPARED)
    tasks = [(name, seed) for name in names for seed in seeds]
    progress(f"{pods.name}: {len(tasks)} simulations …")
    found = list(map_all(partial(unallocated, nodes, pods), *zip(*tasks, strict=True)))
    by_name = {name: found[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(names)}
    values: dict[str, Any] = {}
    for name, left in sorted(by_name.items(), key=lambda item: statistics.fmean(item[1])):
        gaps = [mine - theirs for mine, theirs in zip(left, by_name[PUBLISHED], strict=True)]
        values[name] = {"percent": spread(left), "minus_published": spread(gaps), "by_seed": left}
        against = (
            "" if name == PUBLISHED else f"; {statistics.fmean(gaps):+.2f} ± {spread(gaps)['sd']:.2f} to it, paired"
        )
        report.row(f"{pods.name}, {name}", f"{statistics.fmean(left):.2f} %", f"± {spread(left)['sd']:.2f}{against}")
    report.note({f"unallocated on {pods.name}": values})


def spread(values: list[float]) -> dict[str, float]:
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.fmean(values), 3), "sd": round(sd, 3)}


def speed(report: Report, nodes: tuple[NodeView, ...], pods: tuple[Arrival, ...], name: str, times: int) -> None:
    """One decision after another on `times` as many nodes, until as much was asked for as there is."""
    many = [
        replace(node, name=f"{node.name}-{copy}", uid=f"{node.uid}-{copy}") for copy in range(times) for node in nodes
    ]
    progress(f"{name} on {len(many):,} nodes …")
    gpu_milli, chosen = capacity(many), strategy(name, pods)
    queue, asked, took = inflated(pods, gpu_milli, 1.0, 42), 0, []
    fleet = empty(many)
    for number, pod in enumerate(queue):
        asked += pod.gpu_milli
        if asked > gpu_milli:
            break
        request = Request(str(number), "", pod.name, pod.shape.requests, 42)
        began = time.perf_counter()
        place = fleet.find(request, pod.shape, chosen)
        if place is not None:
            fleet.take(place, pod.shape.requests)
        took.append(time.perf_counter() - began)
    rate, p99, most = len(took) / sum(took), 1000 * percentile(took, 0.99), 1000 * max(took)
    report.note(
        {
            f"decisions, {name}, {len(many)} nodes": {
                "decisions": len(took),
                "per_second": round(rate),
                "milliseconds_p99": round(p99, 3),
                "milliseconds_max": round(most, 1),
            }
        }
    )
    report.row(
        f"{name}, {len(many):,} nodes", f"{rate:,.0f}/s",
        f"decisions one by one; p99 {p99:.2f} ms, at most {most:.0f} ms (a shape's first two); {len(took):,} decisions",
    )  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = arguments("strategies", "GPUs left unallocated per strategy, and decisions per second")
    folder = default_folder()
    parser.add_argument("--nodes", type=Path, metavar="CSV", default=folder / NODES_FILE)
    parser.add_argument("--pods", type=Path, metavar="CSV", action="append", help="may be given several times")
    parser.add_argument("--seeds", type=parse_seeds, default=tuple(range(42, 52)), help="42-51")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 8], help="how many times the trace's nodes, for the speed (1 8)"
    )
    parser.add_argument("--jobs", type=int, help="simulations side by side; left out: one a CPU")
    options: argparse.Namespace = parser.parse_args()
    report = Report("strategies: openb, arrivals without an end")
    lists = options.pods or [folder / PODS_FILE]
    # Before the large fleets, which every forked process would copy.
    with ProcessPoolExecutor(options.jobs) as pool:
        for each in lists:
            compare(report, options.nodes, each, options.seeds, pool.map)
    nodes, pods = read_nodes(options.nodes), read_pods(lists[0])
    for name in ("fgd", "headroom"):
        for times in options.sizes:
            speed(report, nodes, pods, name, times)
    report.finish(options.json)


if __name__ == "__main__":
    main()
