"""What the last round of this worker left for Prometheus: who waits for what, and what each tenant and each
reservation holds.

Observed when it is read, so that a series goes with its reason, its GPUQuota or its GPUReservation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from planning.quota_status import Tenant
from planning.reservation_status import Standing


@dataclass(frozen=True, slots=True)
class Round:
    """`at`: seconds since the epoch. `waiting`: workloads by the reason why they wait. `gangs`: by state."""

    at: float
    queued: int
    in_flight: int
    waiting: Mapping[str, int]
    tenants: tuple[Tenant, ...]
    reservations: tuple[Standing, ...]
    gangs: Mapping[str, int]


_rounds: list[Round] = []


def tell(latest: Round) -> None:
    """From now on this is what is read."""
    _rounds[:] = [latest]


def _whole(of: Callable[[Round], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [Observation(of(latest)) for latest in _rounds]


def _by_reason(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(count, {"reason": why}) for latest in _rounds for why, count in latest.waiting.items()]


def _by_state(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(count, {"state": state}) for latest in _rounds for state, count in latest.gangs.items()]


def _by_tenant(of: Callable[[Tenant], float | None]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        found = [(tenant.name, of(tenant)) for latest in _rounds for tenant in latest.tenants]
        return [Observation(value, {"tenant": name}) for name, value in found if value is not None]

    return observe


def _by_reservation(of: Callable[[Standing], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [
        Observation(of(each), {"reservation": each.view.name})
        for latest in _rounds
        for each in latest.reservations
        if each.window is not None
    ]


_meter = metrics.get_meter("berth.worker")
_meter.create_observable_gauge(
    "berth_last_round_timestamp", [_whole(lambda latest: latest.at)], unit="s", description="When this worker decided"
)
_meter.create_observable_gauge(
    "berth_queue_depth",
    [_whole(lambda latest: latest.queued)],
    description="GPUWorkloads waiting for a place after the last round",
)
_meter.create_observable_gauge(
    "berth_waiting_workloads", [_by_reason], description="GPUWorkloads waiting for a place, by reason"
)
_meter.create_observable_gauge("berth_gangs", [_by_state], description="Gangs, by how far they are")
_meter.create_observable_gauge(
    "berth_promises_in_flight",
    [_whole(lambda latest: latest.in_flight)],
    description="Assignments whose Job was not seen yet",
)
_meter.create_observable_gauge(
    "berth_tenant_gpus_used", [_by_tenant(lambda tenant: tenant.used)], description="GPUs that a tenant holds"
)
_meter.create_observable_gauge(
    "berth_tenant_gpus_nominal",
    [_by_tenant(lambda tenant: tenant.nominal)],
    description="GPUs that a tenant is entitled to",
)
_meter.create_observable_gauge(
    "berth_tenant_gpus_borrowed",
    [_by_tenant(lambda tenant: tenant.borrowed)],
    description="GPUs that a tenant holds beyond its nominal",
)
_meter.create_observable_gauge(
    "berth_tenant_waiting",
    [_by_tenant(lambda tenant: tenant.waiting)],
    description="A tenant's workloads that wait for a place",
)
_meter.create_observable_gauge(
    "berth_tenant_share",
    [_by_tenant(lambda tenant: tenant.share)],
    description="The largest part of the fleet's GPUs, CPU or memory that a tenant holds, by its weight",
)
_meter.create_observable_gauge(
    "berth_reservation_gpus_reserved",
    [_by_reservation(lambda each: each.reserved)],
    description="GPUs that a GPUReservation is sure to have",
)
_meter.create_observable_gauge(
    "berth_reservation_gpus_used",
    [_by_reservation(lambda each: each.used)],
    description="GPUs that a GPUReservation's own workloads hold",
)
_meter.create_observable_gauge(
    "berth_reservation_gpus_lent",
    [_by_reservation(lambda each: each.lent)],
    description="GPUs of a GPUReservation that others hold who can be stopped",
)
_meter.create_observable_gauge(
    "berth_reservation_gpus_missing",
    [_by_reservation(lambda each: each.missing)],
    description="GPUs that a GPUReservation lacks whose window has begun or is about to",
)
