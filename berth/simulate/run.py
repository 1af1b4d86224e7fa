"""Runs a trace against strategies, each with several seeds side by side, and reports what became of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from berth.extensions import load_strategies
from berth.simulate.report import show
from berth.simulate.trace import read_nodes, read_pods
from planning import strategies
from planning.model import NodeView
from planning.simulation import (
    Arrival,
    capacity,
    compressed,
    fill,
    live,
    typical_of,
)
from planning.strategies import Strategy, StrategyError
from stack.errors import StackError


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What to simulate. `load` None: arrivals without an end, `arrivals` times what there is; else with ends."""

    nodes: Path
    pods: Path
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    arrivals: float = 1.3
    load: float | None = None
    jobs: int | None = None
    json_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What one strategy made of one seed; values by the name they have in the report."""

    strategy: str
    seed: int
    values: dict[str, float]
    curve: tuple[float, ...]
    tenants: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Trace:
    nodes: tuple[NodeView, ...]
    pods: tuple[Arrival, ...]


def run(options: SimulateOptions) -> dict[str, Any]:
    """Prints a table and plots, writes the file; returns what is in it. StackError: what is wrong with the input."""
    for name in options.strategies:
        if name not in strategies.installed():
            known = ", ".join(strategies.installed())
            raise StackError(f"There is no strategy {name!r}.", f"Installed are {known}.")
    trace = _Trace(read_nodes(options.nodes), read_pods(options.pods))
    if options.load is not None:
        try:
            compressed(trace.pods, capacity(trace.nodes), options.load)
        except ValueError as error:
            raise StackError(f"{options.pods}: {error}.", "Leave out --load, or take a trace that has them.") from None
    began = time.monotonic()
    results = sorted(_runs(trace, options), key=lambda each: (options.strategies.index(each.strategy), each.seed))
    report = _report(trace, options, results, time.monotonic() - began)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report, indent=2) + "\n")
    show(report, Console(highlight=False), options.json_file)
    return report


def _runs(trace: _Trace, options: SimulateOptions) -> Iterator[Run]:
    todo = [(name, seed) for name in options.strategies for seed in options.seeds]
    workers = min(options.jobs or len(os.sched_getaffinity(0)), len(todo))
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    # Spawned: a forked child would inherit the progress bar's thread half-way.
    context = multiprocessing.get_context("spawn")
    with bar, ProcessPoolExecutor(workers, context, initializer=_keep, initargs=(trace, options)) as pool:
        task = bar.add_task("", total=len(todo))
        for done in as_completed([pool.submit(_simulate, name, seed) for name, seed in todo]):
            bar.advance(task)
            try:
                yield done.result()
            except StrategyError as failed:
                raise StackError(f"{failed}.", "Mend the strategy, or leave it out.") from None


_kept: tuple[_Trace, SimulateOptions] | None = None


def _keep(trace: _Trace, options: SimulateOptions) -> None:
    """In each process, once: the trace is large, and the same for all runs."""
    global _kept
    load_strategies()
    _kept = trace, options


def _simulate(name: str, seed: int) -> Run:
    if _kept is None:
        raise RuntimeError("the process was given no trace")
    trace, options = _kept
    strategy = strategies.informed(name, partial(typical_of, trace.pods))
    if options.load is None:
        return _filled(trace, options, strategy, seed)
    return _lived(trace, options.load, strategy, seed)


def _filled(trace: _Trace, options: SimulateOptions, strategy: Strategy, seed: int) -> Run:
    queue = inflated(trace.pods, capacity(trace.nodes), options.arrivals, seed)
    began = time.perf_counter()
    result = fill(trace.nodes, queue, strategy, seed)
    took = time.perf_counter() - began
    values = {
        "unallocated_gpu_percent": result.unallocated,
        "fragmented_gpu_percent": result.fragments,
        "unplaced_pods": float(result.unplaced),
        "decisions_per_second": result.decisions / took,
    }
    return Run(strategy.name, seed, values, tuple(result.curve), {})


def _lived(trace: _Trace, load: float, strategy: Strategy, seed: int) -> Run:
    arrivals = compressed(trace.pods, capacity(trace.nodes), load)
    began = time.perf_counter()
    result = live(trace.nodes, arrivals, strategy, seed)
    took = time.perf_counter() - began
    waits = sorted(wait for _, wait in result.waits)
    tenants: dict[str, list[float]] = {}
    for arrival, wait in result.waits:
        tenants.setdefault(arrival.tenant, []).append(wait)
    values = {
        "wait_seconds_mean": statistics.fmean(waits),
        "wait_seconds_p99": quantile(waits, 0.99),
        "waited_pods_percent": 100 * sum(wait > 0 for wait in waits) / len(waits),
        "allocated_gpu_percent": result.allocated,
        "unplaced_pods": float(result.unplaced),
        "arrivals_per_second": len(arrivals) / took,
    }
    by_tenant = {tenant: (statistics.fmean(each), quantile(sorted(each), 0.99)) for tenant, each in tenants.items()}
    return Run(strategy.name, seed, values, (), by_tenant)


def inflated(arrivals: Sequence[Arrival], gpu_milli: int, share: float, seed: int) -> list[Arrival]:
    """The arrivals, and as many of them drawn again as it takes to ask for `share` of the GPUs; shuffled."""
    draw, queue = Random(seed), list(arrivals)
    asked = sum(arrival.gpu_milli for arrival in queue)
    if arrivals and not asked:
        raise ValueError("no pod asks for a GPU")
    while arrivals and asked < share * gpu_milli:
        again = draw.choice(arrivals)
        queue.append(again)
        asked += again.gpu_milli
    draw.shuffle(queue)
    return queue


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, without interpolation."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _report(trace: _Trace, options: SimulateOptions, results: list[Run], seconds: float) -> dict[str, Any]:
    by_strategy: dict[str, Any] = {}
    for name in options.strategies:
        mine = [each for each in results if each.strategy == name]
        told: dict[str, Any] = {key: _spread([each.values[key] for each in mine]) for key in mine[0].values}
        if mine[0].curve:
            length = min(len(each.curve) for each in mine)
            told["allocated_gpu_percent_by_asked_percent"] = [
                round(statistics.fmean(each.curve[i] for each in mine), 3) for i in range(length)
            ]
        if mine[0].tenants:
            told["wait_seconds_by_tenant"] = {
                tenant: {
                    "mean": round(statistics.fmean(each.tenants[tenant][0] for each in mine), 3),
                    "p99": round(statistics.fmean(each.tenants[tenant][1] for each in mine), 3),
                }
                for tenant in sorted(mine[0].tenants)
            }
        by_strategy[name] = told
    return {
        "simulated": True,
        "nodes": {"file": options.nodes.name, "count": len(trace.nodes), "gpus": capacity(trace.nodes) // 1000},
        "pods": {"file": options.pods.name, "count": len(trace.pods)},
        "seeds": list(options.seeds),
        "arrivals": options.arrivals if options.load is None else None,
        "load": options.load,
        "seconds": round(seconds, 3),
        "strategies": by_strategy,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {
        "mean": round(statistics.fmean(values), 4),
        "sd": round(statistics.stdev(values), 4) if len(values) > 1 else 0.0,
        "by_seed": [round(value, 4) for value in values],
    }
