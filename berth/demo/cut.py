"""Cuts the trace down to a demo: fewer nodes in the same proportions, the first pods, and run times of seconds.

Pure and deterministic: the same trace and numbers give the same cut, on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from berth.demo.trace import Trace, TraceNode, TracePod
from stack.errors import StackError

FAILS_AFTER = 2.0
"""Seconds after which a run that is made to fail does so."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """How long a simulated run takes: between `shortest` and `longest` seconds, by the logarithm of the trace's.

    The trace runs from seconds to months; a logarithm keeps the order and the proportions of magnitudes, and lets the
    whole fleet end while somebody watches.
    """

    shortest: float = 8.0
    longest: float = 24.0


@dataclass(frozen=True, slots=True)
class Run:
    """One pod of the trace as the demo runs it. `fails` is the exit code its simulated runs end with; 0 is success.

    A run that fails does so after `FAILS_AFTER`, whatever the trace says.
    """

    pod: TracePod
    seconds: float
    fails: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """What the demo plays. `left_out` names pods that none of the nodes could hold even empty."""

    nodes: tuple[TraceNode, ...]
    runs: tuple[Run, ...]
    left_out: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def gpus_wanted(self) -> int:
        return sum(run.pod.gpus for run in self.runs)


def make_cut(
    trace: Trace,
    *,
    gpus: int = 800,
    workloads: int = 1000,
    seed: int = 1,
    failing: float = 0.03,
    times: RunTimes = RunTimes(),
) -> Cut:
    """About `gpus` GPUs' worth of nodes and the first `workloads` pods that fit there.

    `failing` is the share of workloads (0 to 1) whose simulated runs end with exit code 1, chosen by `seed`.
    """
    nodes = cut_nodes(trace.nodes, gpus)
    chosen: list[TracePod] = []
    left_out: list[str] = []
    for pod in trace.pods:
        if len(chosen) == workloads:
            break
        if any(holds(node, pod) for node in nodes):
            chosen.append(pod)
        else:
            left_out.append(pod.name)
    if len(chosen) < workloads:
        raise StackError(
            f"The trace has only {len(chosen)} whole-GPU pods that fit on {len(nodes)} nodes, not {workloads}.",
            f"Ask for at most {len(chosen)}: --workloads {len(chosen)}.",
        )
    seconds = compress([pod.seconds for pod in chosen], times)
    # Among the first, so that their second try does not outlast everybody else.
    early = range(max(round(len(chosen) * 0.7), 1))
    failed = set(random.Random(seed).sample(early, min(round(len(chosen) * failing), len(early))))
    runs = tuple(
        Run(pod, min(times.shortest, FAILS_AFTER), 1) if index in failed else Run(pod, each)
        for index, (pod, each) in enumerate(zip(chosen, seconds, strict=True))
    )
    return Cut(nodes, runs, tuple(left_out))


def cut_nodes(nodes: Sequence[TraceNode], gpus: int) -> tuple[TraceNode, ...]:
    """Nodes with about `gpus` GPUs in all: of every kind the same share, by largest remainders, evenly picked.

    The sum is as near as whole nodes allow; it is a StackError to ask for more than there are, or for none.
    """
    total = sum(node.gpus for node in nodes)
    if not 1 <= gpus <= total:
        raise StackError(f"The trace has {total} GPUs, so a cut cannot have {gpus}.", f"Ask for 1 to {total}: --gpus.")
    kinds: dict[tuple[str, int, int, int], list[TraceNode]] = {}
    for node in nodes:
        kinds.setdefault(node.kind, []).append(node)
    share = gpus / total
    quota = {kind: math.floor(len(members) * share) for kind, members in kinds.items()}
    missing = round(len(nodes) * share) - sum(quota.values())
    by_remainder = sorted(kinds, key=lambda kind: (quota[kind] - len(kinds[kind]) * share, kind))
    for kind in by_remainder[: max(missing, 0)]:
        quota[kind] += 1
    if not any(quota.values()):
        quota[max(kinds, key=lambda kind: len(kinds[kind]))] = 1
    picked = {
        members[index * len(members) // quota[kind]].name
        for kind, members in kinds.items()
        for index in range(quota[kind])
    }
    return tuple(node for node in nodes if node.name in picked)


def compress(seconds: Sequence[int], times: RunTimes) -> list[float]:
    """The trace's run times as simulated ones (see RunTimes), in seconds with one decimal; the order is kept."""
    if not seconds:
        return []
    low, high = math.log(min(seconds)), math.log(max(seconds))
    span = high - low
    width = times.longest - times.shortest
    return [round(times.shortest + (width * (math.log(each) - low) / span if span else 0.0), 1) for each in seconds]


def holds(node: TraceNode, pod: TracePod) -> bool:
    """Whether an empty node of this kind could run the pod."""
    return (
        pod.gpus <= node.gpus
        and pod.cpu_milli <= node.cpu_milli
        and pod.memory_mib <= node.memory_mib
        and (not pod.gpu_models or pod.gpu_models[0] == node.model)
    )
