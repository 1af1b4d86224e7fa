"""Decides which strategy holds for a workload, and what is said when none of that name is installed: to the ledger, to
`berth explain`, and to the API server while a workload is being written.
"""

from __future__ import annotations

from crds.gpuworkload import GPUWorkloadSpec
from planning import strategies
from planning.model import Defaults


def strategy_name(spec: GPUWorkloadSpec, namespace: str, defaults: Defaults) -> tuple[str, str]:
    """The strategy that holds for a workload and where it comes from: its spec, its namespace, the installation."""
    if spec.scheduling_strategy:
        return spec.scheduling_strategy, "spec.schedulingStrategy"
    if namespace in defaults.namespace_strategies:
        return defaults.namespace_strategies[namespace], f"namespace {namespace}"
    return defaults.strategy, "the installation's settings"


def not_installed(name: str, source: str) -> str:
    """'' if there is a strategy of that name, else a sentence that lists those there are."""
    known = strategies.installed()
    return "" if name in known else f"{source}: there is no strategy {name[:64]!r}; installed are {', '.join(known)}"
