"""How wrong predicted start times are: what is told to a workload when it begins to wait, against when it then starts.

Work comes and goes as in `berth simulate --load` on a part of openb's nodes; predicted is as for `berth explain`, from
nothing but what ended before. The trace is drawn with repetition, so most of what comes was seen before (62 % on
openb): on work that repeats itself less, predictions are worth less. For whoever changes predictions, or wants to know
what they are worth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.placement import node_view
from benchmarks.report import Report, arguments, progress
from berth.demo import trace
from berth.demo.cut import cut_nodes
from berth.demo.report import percentile
from berth.simulate.load import Load, offered
from berth.simulate.trace import Recorded, read_history
from crds.gpuworkload import GPUWorkloadSpec
from crds.settings import Settings
from planning import strategies
from planning.filters import Constraints
from planning.jobs import shape_of
from planning.model import WHOLE, Defaults, JobView, NodeView, PodView, Snapshot, WorkloadView
from planning.naming import job_name
from planning.orders import Learned, Submission, model
from planning.prediction import seconds_to_start
from planning.simulation import capacity
from planning.steady import Simulation, fitting

SETTINGS = Settings()
STRATEGY = "bestFit"
# Longer runs are left out, one in a hundred: for months they would hold nearly all GPUs of so few nodes.
LONGEST = 24 * 3600.0
LIKELY, LATEST = 0.5, 0.9  # the shares of runs by which `berth explain` predicts


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from when it began to wait: as predicted (None: nobody could tell), and as it was (`started`: until it
    started, else at least).
    """

    likely: float | None
    latest: float | None
    actual: float
    started: bool

    def later_than(self, predicted: float) -> bool | None:
        """Whether it started later than that; None where it never did and might still have been in time."""
        return self.actual > predicted if self.started or self.actual > predicted else None


class Observed(Learned):
    """berth's order, by age, while durations are learned."""

    def rank(self, waiting: Submission, now: float) -> float:
        return 0.0


def workloads(pods: Sequence[Recorded]) -> dict[str, tuple[Recorded, GPUWorkloadSpec]]:
    """Those pods that a GPUWorkload could be, by name, asking for just what it would; but for the longest."""
    found = {}
    for pod in pods:
        need = pod.arrival.shape.requests
        if not need.gpus or need.gpu_milli < WHOLE or pod.arrival.shape.constraints != Constraints():
            continue
        if pod.seconds > LONGEST:
            continue
        raw = {
            "modelName": model(need),
            "gpuCount": need.gpus,
            "image": "openb",
            "schedulingStrategy": STRATEGY,
            "resources": {"requests": {"cpu": f"{need.cpu_milli}m", "memory": need.memory}},
        }
        spec, wrong = GPUWorkloadSpec.parse(raw)
        if spec is None:
            raise ValueError(f"{pod.arrival.name}: {wrong}")
        arrival = replace(pod.arrival, shape=shape_of(spec, SETTINGS))
        found[arrival.name] = replace(pod, arrival=arrival, tenant=pod.tenant or "openb"), spec
    return found


def seen(
    simulated: Simulation, specs: dict[str, GPUWorkloadSpec], nodes: Sequence[NodeView], order: Learned
) -> Snapshot:
    """The simulated cluster as the planner would see it."""

    def view(number: int) -> WorkloadView:
        each = simulated.submissions[number]
        return WorkloadView(
            str(number), each.tenant, f"w-{number:08}", 1, 1, each.at - each.ran, specs[each.name], finalizer=True
        )

    jobs, pods, views = [], [], []
    for running in simulated.running.values():
        work, each = view(running.number), simulated.submissions[running.number]
        need, began = each.shape.requests, running.since - each.ran
        job = JobView(
            f"job-{work.uid}", work.namespace, job_name(work.name, work.uid, 0), 1, work.uid, 0, 0, running.place.node,
            need, began, began, ready=True, counted=True,
        )  # fmt: skip
        views.append(work)
        jobs.append(job)
        pods.append(
            PodView(job.uid, job.namespace, job.name, 1, job.node, need, work.uid, job.name, running=True)
        )  # fmt: skip
    views += [view(number) for number in simulated.waiting]
    return Snapshot(
        simulated.now, tuple(nodes), tuple(pods), tuple(jobs), tuple(views), Defaults(STRATEGY),
        profiles=tuple(order.profiles()),
    )  # fmt: skip


def predictions(
    nodes: Sequence[NodeView], offer: Load, specs: dict[str, GPUWorkloadSpec], count: int, seconds: float
) -> list[Prediction]:
    """At most `count`, evenly among those measured that have to wait; fewer, as evenly, if there is no time for all."""
    strategy = strategies.informed(STRATEGY, lambda: ())
    known = Simulation(nodes, offer.submissions, strategy, Observed(), 0)
    known.advance(offer.submissions[-1].at)
    actual = [known.now - each.at if start is None else start - each.at
              for each, start in zip(offer.submissions, known.started, strict=True)]  # fmt: skip
    waited = [
        number for number, each in enumerate(offer.submissions)
        if offer.begin <= each.at < offer.end and not each.ran and actual[number] > 0
    ]  # fmt: skip
    chosen = waited[:: max(1, len(waited) // count)][:count]
    progress(f"{len(waited):,} have to wait; {len(chosen)} predictions …")
    order, found, began = Observed(), [], time.monotonic()
    simulated = Simulation(nodes, offer.submissions, strategy, order, 0)
    for turn, number in enumerate(chosen, 1):
        if time.monotonic() - began > seconds * turn / len(chosen):
            continue
        simulated.advance(offer.submissions[number].at)
        snapshot = seen(simulated, specs, nodes, order)
        likely, latest = (seconds_to_start(snapshot, SETTINGS, str(number), share) for share in (LIKELY, LATEST))
        found.append(Prediction(likely, latest, actual[number], known.started[number] is not None))
    return found


def tell(report: Report, found: Sequence[Prediction]) -> None:
    """How far off they were; those that nobody could tell count where they are named only. Of those that never started
    the error is not known, and only that some are late for sure.
    """
    told = [each for each in found if each.likely is not None]
    known = [(each.likely, each.actual) for each in told if each.likely is not None and each.started]
    late = _known(each.later_than(each.likely) for each in found if each.likely is not None)
    over = _known(each.later_than(each.latest) for each in found if each.latest is not None)
    never = sum(not each.started for each in found)
    report.note({"predictions": len(found), "told": len(told), "never_started": never})
    report.row(
        "predictions", f"{len(found)}",
        f"{len(told)} of them told a time, {never} never started; {STRATEGY}, the queue by age",
    )  # fmt: skip
    if not known or not over:
        return
    errors = [abs(likely - actual) for likely, actual in known]
    relative = [error / max(actual, 1.0) for error, (_, actual) in zip(errors, known, strict=True)]
    figures = {
        "wait_seconds_median": statistics.median(actual for _, actual in known),
        "error_seconds_median": statistics.median(errors),
        "error_seconds_p90": percentile(errors, 0.9),
        "relative_error_median": statistics.median(relative),
        "later_than_likely": statistics.fmean(late),
        "within_nine_in_ten": 1 - statistics.fmean(over),
    }
    report.note({key: round(value, 3) for key, value in figures.items()})
    report.row("real wait, median", f"{figures['wait_seconds_median']:,.0f} s")
    report.row(
        "absolute error, median", f"{figures['error_seconds_median']:,.0f} s",
        f"p90 {figures['error_seconds_p90']:,.0f} s; median {100 * figures['relative_error_median']:.0f} % of the wait",
    )  # fmt: skip
    report.row("started later than likely", f"{100 * figures['later_than_likely']:.0f} %", "50 % would be right")
    report.row("started within nine in ten", f"{100 * figures['within_nine_in_ten']:.0f} %", "90 % would be right")


def _known(answers: Iterable[bool | None]) -> list[bool]:
    return [answer for answer in answers if answer is not None]


def main() -> None:
    """Entry point."""
    parser = arguments("predictions", "how wrong predicted start times are")
    folder = trace.default_folder()
    parser.add_argument("--nodes", type=Path, metavar="FOLDER", default=folder, help="of the extract with the nodes")
    parser.add_argument("--pods", type=Path, metavar="CSV", default=folder / trace.PODS_FILE)
    parser.add_argument("--gpus", type=int, default=200, help="about how many GPUs the nodes have (200)")
    parser.add_argument("--load", type=float, default=90.0, help="percent of them that is asked for (90)")
    parser.add_argument("--count", type=int, default=100, help="predictions at most (100)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--seconds", type=float, default=480.0, help="to predict in, about (480)")
    options: argparse.Namespace = parser.parse_args()
    report = Report("predictions: start times told to those that begin to wait, openb")
    nodes = [node_view(node) for node in cut_nodes(trace.load(options.nodes).nodes, options.gpus)]
    found = workloads(read_history(options.pods))
    possible = fitting(nodes, {pod.arrival.shape for pod, _ in found.values()})
    pods = [pod for pod, _ in found.values() if pod.arrival.shape in possible]
    offer = offered(pods, capacity(nodes), options.load / 100, options.seed)
    specs = {name: spec for name, (_, spec) in found.items()}
    began = time.monotonic()
    told = predictions(nodes, offer, specs, options.count, options.seconds)
    report.note({"nodes": len(nodes), "gpus": capacity(nodes) // WHOLE, "load_percent": options.load})
    tell(report, told)
    report.row("time", f"{time.monotonic() - began:.0f} s")
    report.finish(options.json)


if __name__ == "__main__":
    main()
