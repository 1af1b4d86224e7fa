"""What happened between the fake kubelet and the plugins, and what of it plugins must not do: for tests and the CLI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

RULES = {
    "wrong-version": "The kubelet knows v1beta1 only and refuses every other version.",
    "bad-resource-name": "The kubelet refuses a name that is not domain/name, or that is in kubernetes.io.",
    "bad-endpoint": "An endpoint is the name of a file in the kubelet's device plugin folder, not a path.",
    "register-before-serving": "The kubelet calls back inside Register: whoever does not serve yet gets an error, or"
    " a first connection that fails and is tried again a second later.",
    "short-register-deadline": "The kubelet may take 10 s to connect and then asks for the options: a Register that"
    " waits less than 15 s gives up on registrations that succeed.",
    "socket-reused": "A second server on the same path takes the first one's connections silently, and stopping the"
    " first one removes the second one's file; kubelets from 1.37 tell registrations apart by this path.",
    "endpoint-shared": "The calls name no resource: two resources on one socket cannot be told apart.",
    "registered-over-open-stream": "Up to Kubernetes 1.36 the end of the old stream disconnects the new endpoint: stop"
    " the old server and let its stream end before registering anew.",
    "options-failed": "A plugin whose GetDevicePluginOptions fails is not registered.",
    "options-differ": "The kubelet ignores the options of Register and believes GetDevicePluginOptions.",
    "resent-list": "Every message makes the kubelet rebuild its maps and write its checkpoint: send on change only.",
    "message-too-large": "The kubelet receives at most 4 MiB: the call or the stream ends with an error.",
    "empty-device-id": "A device without an id cannot be told from another.",
    "long-device-id": "The API allows 63 characters.",
    "doubled-device-id": "The kubelet keeps one device of those with the same id; the rest of capacity is lost.",
    "shared-device-id": "A pod's device health is looked up by id across all resources: ids are unique on the node.",
    "health-string": 'Every string but "Healthy" is unhealthy for the kubelet; the API has "Healthy" and "Unhealthy".',
    "negative-numa-node": "A device without a NUMA node has no topology; -1 is the kubelet's own mark for that.",
    "empty-topology": "A device with a topology that has no nodes is left out of podresources: leave the topology out.",
    "vanished-while-held": "A pod's device that is not listed any more shows as Healthy in the pod's status: keep it"
    " listed, Unhealthy, until nobody holds it.",
    "vanished-while-asked": "The kubelet looks the device up after Allocate without looking whether it is still listed:"
    " it crashes.",
    "wrong-response-count": "The kubelet asks for one container and takes the first response; none fails the pod.",
    "foreign-device": "The response gives or names devices that were not asked for.",
    "malformed-response": "The runtime refuses to create the container, or ignores the entry.",
    "allocate-failed": "An error in Allocate fails the pod for good: UnexpectedAdmissionError.",
    "preference-failed": "An error in GetPreferredAllocation fails the pod for good: answer with an empty list.",
    "bad-preference": "The kubelet takes what is both preferred and available, and fills up at random.",
    "pre-start-failed": "An error or 30 s in PreStartContainer keep the container from starting.",
}
"""What a plugin must not do, and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that happened `at` seconds of the monotonic clock; `what` is its kind, as Register or Allocate."""

    at: float
    what: str
    resource: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule of RULES that a plugin broke."""

    at: float
    rule: str
    resource: str
    text: str


class Transcript:
    """In the order in which it happened."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.entries: list[Entry] = []
        self.violations: list[Violation] = []

    def note(self, what: str, resource: str, text: str = "", **details: Any) -> None:
        """Something happened."""
        self.entries.append(Entry(self._clock(), what, resource, text, details))

    def violated(self, rule: str, resource: str, text: str) -> None:
        """A plugin broke a rule."""
        assert rule in RULES, f"there is no rule {rule}"
        self.violations.append(Violation(self._clock(), rule, resource, text))
        self.note("violation", resource, f"{rule}: {text}")

    def of(self, what: str, resource: str = "") -> list[Entry]:
        """The entries of one kind, of all resources or one."""
        return [each for each in self.entries if each.what == what and resource in ("", each.resource)]

    def rules_broken(self) -> set[str]:
        """By their names."""
        return {each.rule for each in self.violations}
