"""What both sides are asked for: Kueue's baseline of cohorts, queues and streams of workloads, whole or scaled down.

For the peer it becomes its generator's configuration; berth's runner creates the same as GPUWorkloads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from crds.gpuworkload import API_VERSION, KIND


@dataclass(frozen=True, slots=True)
class Stream:
    """Workloads of one class that one queue gets: `interval_ms` before each, `cpu` cores for `runtime_ms`."""

    name: str
    count: int
    interval_ms: int
    runtime_ms: int
    priority: int
    cpu: int


@dataclass(frozen=True, slots=True)
class Load:
    """`nominal` and `borrowing`: cores of one queue, and what it may have beyond them of its cohort's."""

    cohorts: int
    queues: int
    nominal: int
    borrowing: int
    streams: tuple[Stream, ...]

    @property
    def workloads(self) -> int:
        return self.cohorts * self.queues * sum(stream.count for stream in self.streams)

    @property
    def namespaces(self) -> dict[str, str]:
        """A namespace for each queue, and its cohort."""
        return {
            f"q-{cohort}-{queue}": f"cohort-{cohort}" for cohort in range(self.cohorts) for queue in range(self.queues)
        }

    @property
    def shortest(self) -> float:
        """Seconds below which nobody can be: each queue's work over the cores it has, or the time of creating it."""
        work = sum(stream.count * stream.cpu * stream.runtime_ms for stream in self.streams) / 1000 / self.nominal
        return max(work, max(stream.count * stream.interval_ms for stream in self.streams) / 1000)

    def scaled(self, share: float) -> Load:
        """Fewer workloads in as many queues, one of each class at least; all else stays."""
        return replace(
            self, streams=tuple(replace(each, count=max(1, round(each.count * share))) for each in self.streams)
        )

    def generator(self) -> dict[str, Any]:
        """As the configuration of the peer's generator."""
        return {
            "cohorts": [
                {
                    "className": "cohort",
                    "count": self.cohorts,
                    "queuesSets": [
                        {
                            "className": "cq",
                            "count": self.queues,
                            "nominalQuota": self.nominal,
                            "borrowingLimit": self.borrowing,
                            "reclaimWithinCohort": "Any",
                            "withinClusterQueue": "LowerPriority",
                            "workloadsSets": [_workloads_set(stream) for stream in self.streams],
                        }
                    ],
                }
            ]
        }


def _workloads_set(stream: Stream) -> dict[str, Any]:
    return {
        "count": stream.count,
        "creationIntervalMs": stream.interval_ms,
        "workloads": [
            {
                "className": stream.name,
                "runtimeMs": stream.runtime_ms,
                "priority": stream.priority,
                "request": stream.cpu,
            }
        ],
    }


# Kueue's configs/baseline/generator.yaml; the peer's file is compared with it before every run.
BASELINE = Load(
    cohorts=5,
    queues=6,
    nominal=20,
    borrowing=100,
    streams=(
        Stream("small", 350, 100, 200, 50, 1),
        Stream("medium", 100, 500, 500, 100, 5),
        Stream("large", 50, 1200, 1000, 200, 20),
    ),
)


def workload(stream: Stream, number: int, namespace: str, *, preemptible: bool) -> dict[str, Any]:
    """One of a stream's as a GPUWorkload; with one GPU, since it must ask for some."""
    spec: dict[str, Any] = {
        "modelName": stream.name,
        "gpuCount": 1,
        "priority": stream.priority,
        "image": "pretended.invalid/bench",
        "resources": {"requests": {"cpu": str(stream.cpu)}},
    }
    if preemptible:
        spec["preemptible"] = True
    metadata = {"name": f"{stream.name}-{number}", "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def quotas(load: Load) -> list[dict[str, Any]]:
    """The queues' quotas as GPUQuotas, each after its cohort's."""
    return [
        *(_quota(cohort, {}) for cohort in dict.fromkeys(load.namespaces.values())),
        *(
            _quota(
                namespace,
                {
                    "namespaces": [namespace],
                    "cohort": cohort,
                    "nominal": {"cpu": str(load.nominal)},
                    "borrowingLimit": {"cpu": str(load.borrowing)},
                },
            )
            for namespace, cohort in load.namespaces.items()
        ),
    ]


def _quota(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": "GPUQuota", "metadata": {"name": name}, "spec": spec}
