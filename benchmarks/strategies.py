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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.report import Report, arguments, progress
from berth.cli.simulate_command import parse_seeds
from berth.demo.report import percentile
from berth.demo.trace import NODES_FILE, PODS_FILE, default_folder
from berth.simulate.run import inflated
from berth.simulate.trace import read_nodes, read_pods
from planning import strategies
from planning.fleet import Place
from planning.model import WHOLE, NodeView
from planning.simulation import Arrival, capacity, empty, fill, typical_of
from planning.steady import fitting
from planning.strategies import Candidate, Rank, Request, Strategy
from planning.strategies.fgd import FGD

ARRIVALS = 1.3
PUBLISHED = "FGD as published"
# The two that are left out look at every node each time (random), or are leastLoaded here (costOptimized).
COMPARED = ("headroom", "fgd", "mostAllocated", "bestFit", "leastLoaded")


# Nodes of the busy fleet, which are as large as most that are bought for training.
EIGHT = 8
# Once so many found no place, the fleet is as full as it gets.
MISSED = 1000


@dataclass(frozen=True)
class Churn:
    """A busy fleet: its nodes, the share of GPUs that is asked for, and how many decisions are timed."""

    nodes: int
    share: float = 0.8
    decisions: int = 20_000


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


def churn(report: Report, nodes: tuple[NodeView, ...], pods: tuple[Arrival, ...], name: str, options: Churn) -> None:
    """One decision after another on a busy fleet of nodes with eight GPUs: once it is as full as it should be, or gets
    no fuller, one that is there ends, by chance, for each that comes. Timed is what the processor spends.
    """
    large = [node for node in nodes if node.allocatable.gpus == EIGHT]
    if not large:
        report.row(f"{name}, nodes of {EIGHT} GPUs", "-", "the list has none")
        return
    many = [replace(large[i % len(large)], name=f"{large[i % len(large)].name}-{i}") for i in range(options.nodes)]
    progress(f"{name} on {len(many):,} nodes of {EIGHT} GPUs, busy …")
    possible = fitting(large, {pod.shape for pod in pods})
    pods = tuple(pod for pod in pods if pod.shape in possible)
    draw, gpu_milli, chosen = Random(42), capacity(many), strategy(name, pods)
    fleet, there, held, missed, took = empty(many), list[tuple[Arrival, Place]](), 0, 0, list[float]()
    busy = False
    while len(took) < options.decisions:
        if busy and there:
            last = draw.randrange(len(there))
            there[last], there[-1] = there[-1], there[last]
            ended, place = there.pop()
            fleet.give_back(place, ended.shape.requests)
            held -= ended.gpu_milli
        pod = draw.choice(pods)
        request = Request(str(len(took)), "", pod.name, pod.shape.requests, 42)
        began = time.thread_time()
        found = fleet.find(request, pod.shape, chosen)
        if found is not None:
            fleet.take(found, pod.shape.requests)
            there.append((pod, found))
            held += pod.gpu_milli
        if busy:
            took.append(time.thread_time() - began)
        missed += found is None
        busy = busy or missed > MISSED or held >= options.share * gpu_milli
    figures = {
        "gpus": gpu_milli // WHOLE,
        "allocated_gpu_percent": round(100 * held / gpu_milli, 1),
        "decisions": len(took),
        "per_second": round(len(took) / sum(took)),
        "milliseconds_p50": round(1000 * percentile(took, 0.5), 3),
        "milliseconds_p99": round(1000 * percentile(took, 0.99), 3),
        "milliseconds_max": round(1000 * max(took), 1),
    }
    report.note({f"busy, {name}, {len(many)} nodes": figures})
    report.row(
        f"{name}, {len(many):,} nodes, {gpu_milli // WHOLE:,} GPUs", f"{figures['per_second']:,}/s",
        f"one comes, one ends, {figures['allocated_gpu_percent']:.0f} % allocated; p99 "
        f"{figures['milliseconds_p99']:.2f} ms, at most {figures['milliseconds_max']:.0f} ms; {len(took):,} decisions",
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
    parser.add_argument("--busy", type=int, default=10_000, help=f"nodes of {EIGHT} GPUs that are kept busy (10000)")
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
        churn(report, nodes, pods, name, Churn(options.busy))
    report.finish(options.json)


if __name__ == "__main__":
    main()
