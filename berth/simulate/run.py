"""Runs a trace against strategies, each with several seeds side by side, and reports what became of it.

Either the fleet is filled with arrivals that stay, or it is kept busy with work that comes and goes
(`berth.simulate.steady`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
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
from berth.simulate import steady
from berth.simulate.report import show
from berth.simulate.spread import spread
from berth.simulate.trace import Recorded, read_history, read_nodes, read_pods
from planning import strategies
from planning.model import WHOLE, NodeView
from planning.simulation import Arrival, capacity, fill, typical_of
from planning.steady import fitting
from planning.strategies import StrategyError
from stack.errors import StackError


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What to simulate: pods are drawn again until they ask for `arrivals` times all GPUs; or, with a `load`, they come
    and go and keep so many percent of the GPUs busy, and those that wait are tried in each of the `orders`.
    """

    nodes: Path
    pods: Path
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    arrivals: float = 1.3
    jobs: int | None = None
    json_file: Path | None = None
    load: float | None = None
    orders: tuple[str, ...] = ("fifo",)


@dataclass(frozen=True, slots=True)
class Run:
    """What one strategy made of one seed; values by the name they have in the report."""

    strategy: str
    seed: int
    values: dict[str, float]
    curve: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Trace:
    """`history`: the pods with their times, where these are needed, but for those that fit on no node (`left_out`)."""

    nodes: tuple[NodeView, ...]
    pods: tuple[Arrival, ...]
    history: tuple[Recorded, ...] = ()
    left_out: int = 0


def run(options: SimulateOptions) -> dict[str, Any]:
    """Prints a table and plots, writes the file; returns what is in it. StackError: what is wrong with the input."""
    for name in options.strategies:
        if name not in strategies.installed():
            known = ", ".join(strategies.installed())
            raise StackError(f"There is no strategy {name!r}.", f"Installed are {known}.")
    nodes = read_nodes(options.nodes)
    if options.load is None:
        trace = _Trace(nodes, read_pods(options.pods))
    else:
        recorded = read_history(options.pods)
        possible = fitting(nodes, {pod.arrival.shape for pod in recorded})
        history = tuple(pod for pod in recorded if pod.arrival.shape in possible)
        if not any(pod.arrival.gpu_milli for pod in history):
            raise StackError(
                f"No pod of {options.pods} that asks for a GPU fits on a node of {options.nodes}, even an empty one.",
                "Do both files belong together?",
            )
        trace = _Trace(nodes, tuple(pod.arrival for pod in history), history, len(recorded) - len(history))
    began = time.monotonic()
    results = sorted(_runs(trace, options), key=lambda each: each.seed)
    report = {**_about(trace, options, time.monotonic() - began), "strategies": _found(options, results)}
    show(report, Console(highlight=False))
    if options.json_file is not None:
        try:
            options.json_file.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise StackError(
                f"{options.json_file} cannot be written: {error.strerror}.", "Name another file."
            ) from None
    return report


def _runs(trace: _Trace, options: SimulateOptions) -> Iterator[Run | steady.Run]:
    todo = [(name, order, seed) for name in options.strategies for order in options.orders for seed in options.seeds]
    workers = min(options.jobs or len(os.sched_getaffinity(0)), len(todo))
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    # Spawned: a forked child would inherit the progress bar's thread half-way.
    context = multiprocessing.get_context("spawn")
    with bar, ProcessPoolExecutor(workers, context, initializer=_keep, initargs=(trace, options)) as pool:
        task = bar.add_task("", total=len(todo))
        try:
            for done in as_completed([pool.submit(_simulate, *each) for each in todo]):
                bar.advance(task)
                yield done.result()
        except BaseException as ended:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()  # a simulation may go on for minutes
            if isinstance(ended, StrategyError):
                raise StackError(f"{ended}.", "Mend the strategy, or leave it out.") from None
            raise


_kept: tuple[_Trace, SimulateOptions] | None = None


def _keep(trace: _Trace, options: SimulateOptions) -> None:
    """In each process, once: the trace is large, and the same for all runs."""
    global _kept
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for it ends it
    load_strategies()
    _kept = trace, options


def _simulate(name: str, order: str, seed: int) -> Run | steady.Run:
    if _kept is None:
        raise RuntimeError("the process was given no trace")
    trace, options = _kept
    strategy = strategies.informed(name, partial(typical_of, trace.pods))
    if options.load is not None:
        return steady.measure(trace.nodes, trace.history, strategy, order, options.load / 100, seed)
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
    return Run(strategy.name, seed, values, tuple(result.curve))


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


def _about(trace: _Trace, options: SimulateOptions, seconds: float) -> dict[str, Any]:
    pods: dict[str, Any] = {"file": options.pods.name, "count": len(trace.pods)}
    asked: dict[str, Any] = {"arrivals": options.arrivals}
    if options.load is not None:
        pods["left_out"], asked = trace.left_out, {"load_percent": options.load}
    return {
        "simulated": True,
        "nodes": {"file": options.nodes.name, "count": len(trace.nodes), "gpus": capacity(trace.nodes) // WHOLE},
        "pods": pods,
        "seeds": list(options.seeds),
        **asked,
        "seconds": round(seconds, 3),
    }


def _found(options: SimulateOptions, results: list[Run | steady.Run]) -> dict[str, Any]:
    """By strategy, and where work comes and goes by order, the figures over all seeds."""
    if options.load is not None:
        runs = [each for each in results if isinstance(each, steady.Run)]
        return {name: steady.figures([each for each in runs if each.strategy == name]) for name in options.strategies}
    by_strategy: dict[str, Any] = {}
    for name in options.strategies:
        mine = [each for each in results if isinstance(each, Run) and each.strategy == name]
        told: dict[str, Any] = {key: spread([each.values[key] for each in mine]) for key in mine[0].values}
        length = min(len(each.curve) for each in mine)
        told["allocated_gpu_percent_by_asked_percent"] = [
            round(statistics.fmean(each.curve[i] for each in mine), 3) for i in range(length)
        ]
        by_strategy[name] = told
    return by_strategy
