"""Measures a strategy under work that comes and goes: who waited how long, and what stayed unallocated meanwhile.

Counted are those that come within a window, after it has settled and before it ends (`berth.simulate.load`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from berth.demo.report import percentile
from berth.simulate.load import Load, offered
from berth.simulate.spread import spread
from berth.simulate.trace import Recorded
from planning.model import WHOLE, NodeView
from planning.orders import ORDERS, Submission
from planning.simulation import capacity, typical_of
from planning.steady import Simulation
from planning.strategies import Strategy
from planning.typical import Fragments

# The window is looked at so many times, its beginning included.
LOOKS = 101
SHARES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}


@dataclass(frozen=True, slots=True)
class Run:
    """What one strategy made of one seed. `values`, `curves` (at each percent of the window), and the waits of each
    tenant and of those that ask for as many GPUs, by the names they have in the report.
    """

    strategy: str
    order: str
    seed: int
    values: dict[str, float]
    curves: dict[str, tuple[float, ...]]
    tenants: dict[str, dict[str, float]]
    sizes: dict[str, dict[str, float]]


def measure(
    nodes: Sequence[NodeView], pods: Sequence[Recorded], strategy: Strategy, order: str, load: float, seed: int
) -> Run:
    """One simulation. `load`: as a share of all GPUs."""
    gpu_milli = capacity(nodes)
    offer = offered(pods, gpu_milli, load, seed)
    fragments = Fragments(typical_of(pod.arrival for pod in pods))
    simulated = Simulation(nodes, offer.submissions, strategy, ORDERS[order](), seed)
    began = time.perf_counter()
    simulated.advance(offer.begin)
    before = simulated.gpu_seconds
    allocated, waiting, asked, lost = [], [], [], []
    for look in range(LOOKS):
        simulated.advance(offer.begin + (offer.end - offer.begin) * look / (LOOKS - 1))
        queue = simulated.waiting
        allocated.append(100 * simulated.gpu_milli / gpu_milli)
        waiting.append(float(len(queue)))
        asked.append(100 * sum(offer.submissions[number].gpu_milli for number in queue) / gpu_milli)
        left = simulated.fleet.left()
        free = sum(fragments.on(node.model_of(""), cpu, devices) for node, cpu, devices in left)
        lost.append(100 * free / gpu_milli)
    held = (simulated.gpu_seconds - before) / (offer.end - offer.begin)
    waits = _waits(simulated, offer)
    took = time.perf_counter() - began
    values = {
        **_told([wait for _, wait in waits]),
        "never_placed_pods": float(sum(simulated.started[number] is None for number in _measured(offer))),
        "waiting_gpu_percent": statistics.fmean(asked),
        "unallocated_gpu_percent": 100 * (1 - held / gpu_milli),
        "fragmented_gpu_percent": statistics.fmean(lost),
        "measured_seconds": offer.end - offer.begin,
        "placements_per_second": sum(start is not None for start in simulated.started) / took,
    }
    curves = {
        "allocated_gpu_percent_by_time_percent": tuple(allocated),
        "waiting_pods_by_time_percent": tuple(waiting),
    }
    tenants = _grouped((each.tenant, wait) for each, wait in waits)
    sizes = _grouped((_size(each), wait) for each, wait in waits)
    return Run(strategy.name, order, seed, values, curves, tenants, sizes)


def _waits(simulated: Simulation, offer: Load) -> list[tuple[Submission, float]]:
    """How long those waited that are measured: until they started, or until nothing more comes."""
    left = [number for number in _measured(offer) if simulated.started[number] is None]
    while left and simulated.upcoming <= offer.submissions[-1].at:
        simulated.advance(simulated.upcoming)
        while left and simulated.started[left[-1]] is not None:
            left.pop()
    found = []
    for number in _measured(offer):
        submission, start = offer.submissions[number], simulated.started[number]
        found.append((submission, (simulated.now if start is None else start) - submission.at))
    return found


def _measured(offer: Load) -> Iterator[int]:
    return (
        number for number, each in enumerate(offer.submissions) if offer.begin <= each.at < offer.end and not each.ran
    )


def _size(submission: Submission) -> str:
    """How many GPUs it asks for, as the report calls it."""
    need = submission.shape.requests
    return "part of one" if need.gpus and need.gpu_milli < WHOLE else str(need.gpus)


def _grouped(waits: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[float]] = {}
    for name, wait in waits:
        groups.setdefault(name, []).append(wait)
    return {name: {"pods": float(len(each)), **_told(each)} for name, each in sorted(groups.items())}


def _told(waits: Sequence[float]) -> dict[str, float]:
    told = {"mean": statistics.fmean(waits)} | {name: percentile(waits, share) for name, share in SHARES.items()}
    return {f"{name}_wait_seconds": value for name, value in told.items()}


def figures(runs: Sequence[Run]) -> dict[str, object]:
    """One strategy's, by order, over all seeds."""
    by_order: dict[str, object] = {}
    for order in ORDERS:
        mine = [each for each in runs if each.order == order]
        if not mine:
            continue
        values = {key: spread([each.values[key] for each in mine]) for key in mine[0].values}
        curves = {key: _averages([each.curves[key] for each in mine]) for key in mine[0].curves}
        tenants, sizes = _groups([each.tenants for each in mine]), _groups([each.sizes for each in mine])
        by_order[order] = {**values, **curves, "tenants": tenants, "gpus": sizes}
    return by_order


def _averages(curves: Sequence[Sequence[float]]) -> list[float]:
    return [round(statistics.fmean(values), 3) for values in zip(*curves, strict=True)]


def _groups(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, object]:
    """Each group's figures over the seeds in which any of it came."""
    found: dict[str, list[dict[str, float]]] = {}
    for each in runs:
        for name, told in each.items():
            found.setdefault(name, []).append(told)
    return {
        name: {key: spread([each[key] for each in told]) for key in told[0]} for name, told in sorted(found.items())
    }
