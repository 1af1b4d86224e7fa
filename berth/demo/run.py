"""Runs the demo: a stack of its own, the cut's nodes and workloads, the live picture, the figures.

For `berth demo`. Order: check the input, start the stack, play, measure, report. Whatever ends it early ends the stack.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from temporalio.client import Client

from berth.cli.application import after_up, application_processes
from berth.demo import cluster, manifests, measure, report, view
from berth.demo.cut import Cut, RunTimes, make_cut
from berth.demo.live import Fleet
from berth.demo.observe import Observer
from berth.demo.trace import load
from kube.client import KubeClient
from kube.errors import AlreadyExists
from kube.resources import GPUWORKLOADS
from stack import Endpoints, Lines, Stack, StackError, Terminal, UpOptions, default_data

MARKER = "berth-demo.json"  # says that a data folder is the demo's own, to be emptied by its next run
_SAMPLE = 0.25
_LINE_EVERY = 5.0
_LEASE = 120  # seconds; kwok renews a node's lease after a quarter, below the 50 s of the node monitor


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person may choose; `timeout` in seconds is for the workloads alone, without builds and stack."""

    data: Path | None = None
    trace: Path | None = None
    gpus: int = 800
    workloads: int = 1000
    seed: int = 1
    failing: float = 0.03
    times: RunTimes = field(default_factory=RunTimes)
    json_file: Path | None = None
    keep: bool = True
    timeout: float = 600.0


def default_demo_data() -> Path:
    """Beside the data folder of `berth up`, so that the demo never touches a stack that is used for something."""
    return default_data().parent / "demo"


def run_demo(options: DemoOptions, console: Console | None = None) -> dict[str, Any]:
    """Plays the demo and returns its figures. StackError for whatever a person can mend; KeyboardInterrupt ends clean.

    The figures' `workloads.unfinished` is not zero when the timeout came first.
    """
    console = console or Console()
    began = time.monotonic()
    cut = make_cut(
        load(options.trace),
        gpus=options.gpus,
        workloads=options.workloads,
        seed=options.seed,
        failing=options.failing,
        times=options.times,
    )
    if options.json_file is not None:
        _writable(options.json_file)
    console.print(introduction(cut), style="dim", highlight=False)
    stack = Stack(options.data or default_demo_data())
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        _fresh(stack, console)
        endpoints = _start(stack, console)
        up = time.monotonic() - began
        result = asyncio.run(_Play(stack, endpoints, cut, options, console, began, up).play())
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            console.print("\nInterrupted: stopping what the demo started …")
        if (stack.layout.root / MARKER).is_file():  # never a stack that is not the demo's
            _stop(stack)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    if not options.keep:
        _stop(stack)
    console.print(report.table(result))
    console.print(report.simulation(cut), style="dim", highlight=False)
    console.print(report.where_to_look(endpoints, kept=options.keep), soft_wrap=True, highlight=False)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"The figures are in {options.json_file}.", style="dim", highlight=False)
    return result


def introduction(cut: Cut) -> str:
    """What is going to happen, before it does."""
    left = f" ({len(cut.left_out)} pods that fit on none of them are left out)" if cut.left_out else ""
    return (
        f"Alibaba's openb trace: {len(cut.runs):,} workloads that want {cut.gpus_wanted:,} GPUs, on {len(cut.nodes)} "
        f"simulated nodes with {cut.gpus:,}{left}.\n{report.simulation(cut)}"
    )


def _writable(file: Path) -> None:
    try:
        with file.open("a"):
            pass
    except OSError as error:
        raise StackError(f"{file} cannot be written: {error.strerror}.", "Name another file: --json FILE.") from error


def _fresh(stack: Stack, console: Console) -> None:
    """Ends the demo before this one and empties its folder; a folder that is not the demo's is refused."""
    root = stack.layout.root
    if root.exists() and not root.is_dir():
        raise StackError(f"{root} is not a folder.", "Name another one: --data DIR.")
    if root.is_dir() and any(root.iterdir()):
        if not (root / MARKER).is_file():
            raise StackError(
                f"{root} holds something that the demo did not make.",
                "The demo begins with an empty stack: name an empty or new folder with --data.",
            )
        if stack.running:
            console.print("Ending the demo that still runs there.", style="dim")
            stack.down()
        for path in root.iterdir():  # the marker goes last: an interrupted run must not leave a nameless rest
            if path.name != MARKER:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARKER).write_text('{"made_by": "berth demo"}\n')
    except OSError as error:
        raise StackError(f"{root} cannot be used: {error.strerror}.", "Name another one: --data DIR.") from error


def _start(stack: Stack, console: Console) -> Endpoints:
    options = UpOptions(node_lease_seconds=_LEASE)

    def up(progress: Terminal | Lines) -> Endpoints:
        return stack.up(options, progress, lambda endpoints: application_processes(endpoints, options), after_up)

    if console.is_terminal:
        with Terminal(console) as bars:
            return up(bars)
    return up(Lines(sys.stdout))


def _stop(stack: Stack) -> None:
    """Ends the stack; a second Ctrl-C does not leave half of it."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stack.down()
    finally:
        signal.signal(signal.SIGINT, previous)


class _Play:
    """One run on a stack that is up."""

    def __init__(
        self,
        stack: Stack,
        endpoints: Endpoints,
        cut: Cut,
        options: DemoOptions,
        console: Console,
        began: float,
        up: float,
    ) -> None:
        self._stack = stack
        self._endpoints = endpoints
        self._cut = cut
        self._options = options
        self._console = console
        self._began = began
        self._up = up
        self._zero = time.monotonic()
        self._fleet = Fleet.of(
            [(node.name, node.model, node.gpus) for node in cut.nodes], [(r.pod.name, r.pod.gpus) for r in cut.runs]
        )

    def _now(self) -> float:
        """Seconds since the first workload was sent."""
        return time.monotonic() - self._zero

    async def play(self) -> dict[str, Any]:
        kubeconfig = self._endpoints.kubeconfig()
        async with await KubeClient.connect(kubeconfig, user_agent="berth-demo") as kube:
            simulated = [manifests.simulated_node(node) for node in self._cut.nodes]
            await cluster.prepare(kube, self._stack, [manifests.namespace()], simulated)
            self._print(f"{len(simulated)} simulated nodes are ready.")
            nodes = time.monotonic() - self._began
            before, cpu = await measure.api_writes(kubeconfig), measure.stack_cpu(self._stack) | _own_cpu()
            applied, ended = await self._fly(kube)
            cpu = measure.spent(cpu, measure.stack_cpu(self._stack) | _own_cpu())
            after = await measure.api_writes(kubeconfig)
        temporal = await Client.connect(self._endpoints.temporal_address, namespace=self._endpoints.temporal_namespace)
        closed = sum(item.ended is not None for item in self._fleet.items.values())
        histories = await measure.histories(temporal, manifests.NAMESPACE, closed)
        timings = report.Timings(self._up, nodes, applied, ended, time.monotonic() - self._began)
        writes = measure.writes_between(before, after)
        result = report.figures(self._cut, self._fleet, timings, histories, writes, seed=self._options.seed)
        return result | {"cpu_seconds": cpu}

    async def _fly(self, kube: KubeClient) -> tuple[float, float]:
        """Applies everything and watches until all have ended; returns when the last was applied and ended."""
        observer = Observer(kube, self._fleet, self._now, manifests.NAMESPACE)
        watching = asyncio.create_task(observer.run())
        try:
            await asyncio.wait_for(observer.synced(), 30.0)
            self._zero = time.monotonic()
            showing = asyncio.create_task(self._show(observer))
            try:
                await cluster.each(self._cut.runs, lambda run: self._apply(kube, manifests.workload(run)))
                applied = self._now()
                while not self._fleet.all_ended and self._now() < self._options.timeout:
                    if watching.done():
                        await watching  # raises what ended it
                    await asyncio.sleep(0.1)
            finally:
                showing.cancel()
                with suppress(asyncio.CancelledError):
                    await showing
            return applied, self._now()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _apply(self, kube: KubeClient, workload: dict[str, Any]) -> None:
        """As `kubectl apply` does: created where it is new, else patched."""
        name = workload["metadata"]["name"]
        self._fleet.applied(name, self._now())

        async def apply() -> None:
            try:
                await kube.create(GPUWORKLOADS, workload, manifests.NAMESPACE)
            except AlreadyExists:
                await kube.merge_patch(GPUWORKLOADS, name, manifests.NAMESPACE, {"spec": workload["spec"]})

        await cluster.patiently(apply)

    async def _show(self, observer: Observer) -> None:
        """The live picture, or a line every few seconds; ends with the last state on the screen."""
        if not self._console.is_terminal:
            await self._lines(observer)
            return
        title = f"berth demo · openb · {len(self._cut.nodes)} simulated nodes · {len(self._cut.runs):,} GPUWorkloads"
        with Live(Text(), console=self._console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                self._fleet.sample(self._now())
                width = min(self._console.width, 120)
                live.update(view.picture(self._fleet, self._now(), title=title, width=width), refresh=True)
                try:
                    await asyncio.sleep(_SAMPLE)
                except asyncio.CancelledError:
                    self._fleet.sample(self._now())
                    live.update(view.picture(self._fleet, self._now(), title=title, width=width), refresh=True)
                    raise

    async def _lines(self, observer: Observer) -> None:
        due = 0.0
        told: set[str] = set()
        while True:
            self._fleet.sample(self._now())
            try:
                if self._now() >= due:
                    self._print(view.line(self._fleet, self._now()))
                    due = self._now() + _LINE_EVERY
                    for problem in set(observer.problems) - told:
                        told.add(problem)
                        self._print(f"watch: {problem}")
                await asyncio.sleep(_SAMPLE)
            except asyncio.CancelledError:
                self._fleet.sample(self._now())
                self._print(view.line(self._fleet, self._now()))
                raise

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def _own_cpu() -> dict[str, float]:
    return {"demo": measure.cpu_seconds(os.getpid())}
