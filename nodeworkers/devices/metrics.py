"""What Prometheus reads of a node's devices: how each card is, who holds how many, and whether the kubelet has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from nodeworkers.device_plugin.registration import Status
from nodeworkers.devices.core import State
from nodeworkers.devices.holdings import Holder

# What there is, who holds what, how it is registered, and whether it is simulated.
Seen = tuple[State, Mapping[str, Holder], tuple[Status, ...], bool]
_meter = metrics.get_meter("berth.node")
_look: list[Callable[[], Seen]] = []


def observe(look: Callable[[], Seen]) -> None:
    """What is read from now on."""
    _look[:] = [look]


def _said(simulated: bool) -> dict[str, str]:
    return {"simulated": "true" if simulated else "false"}


def _health(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        seen = look()
        state, simulated = seen[0], seen[3]
        for id, card in state.cards.items():
            health = state.health[id]
            labels = {"card": id, "product": card.product, "vendor": card.vendor, "reason": health.reason}
            yield Observation(int(health.state == "Healthy"), labels | _said(simulated))


def _devices(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        seen = look()
        state, held, simulated = seen[0], seen[1], seen[3]
        for resource, devices in state.offering.devices.items():
            ill = sum(not device.healthy for device in devices)
            taken = sum(device.id in held for device in devices)
            for what, count in (("offered", len(devices)), ("unhealthy", ill), ("held", taken)):
                yield Observation(count, {"resource": resource, "state": what} | _said(simulated))


def _registered(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        for status in look()[2]:
            yield Observation(int(status.serving), {"resource": status.resource})


def _registrations(_: CallbackOptions) -> Iterable[Observation]:
    for look in _look:
        for status in look()[2]:
            yield Observation(status.registrations, {"resource": status.resource})


_meter.create_observable_gauge("berth_device_healthy", [_health], description="1 while a card is well, by its reason")
_meter.create_observable_gauge("berth_devices", [_devices], description="Devices of a resource, by state")
_meter.create_observable_gauge(
    "berth_device_plugin_registered", [_registered], description="1 while the kubelet has a resource and listens"
)
_meter.create_observable_counter(
    "berth_device_plugin_registrations", [_registrations], description="Times that the kubelet has registered it"
)
