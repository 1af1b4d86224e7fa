"""What is wrong with a plugin's messages: pure functions that yield (rule, sentence) for the transcript."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tests.fake_kubelet.wire import RECEIVE_LIMIT

Findings = Iterator[tuple[str, str]]

VERSION = "v1beta1"
LEAST_DEADLINE = 14.5
"""Seconds left of a Register that was given 15."""
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
ID_LENGTH = 63
_TELLING = 4
"""An id of fewer characters may stand in a response for something else."""
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_CDI = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_-]*=[A-Za-z0-9][A-Za-z0-9_.:-]*")


def is_extended_resource(name: str) -> bool:
    """IsExtendedResourceName of pkg/apis/core/v1/helper: a qualified name, also after "requests." before it."""
    domain, slash, rest = name.partition("/")
    return (
        bool(slash)
        and "kubernetes.io/" not in name
        and not name.startswith("requests.")
        and len(f"requests.{domain}") <= 253
        and _DOMAIN.fullmatch(domain) is not None
        and _NAME.fullmatch(rest) is not None
    )


def registration(request: Any, seconds_left: float | None) -> Findings:
    """A Register as it comes in. `seconds_left` until its deadline; None: it has none."""
    if request.version != VERSION:
        yield "wrong-version", f"Register has version {request.version!r}, not {VERSION!r}"
    if not is_extended_resource(request.resource_name):
        yield "bad-resource-name", f"{request.resource_name!r} is no name of an extended resource"
    if not request.endpoint or "/" in request.endpoint or request.endpoint == "kubelet.sock":
        yield "bad-endpoint", f"the endpoint is {request.endpoint!r}"
    if seconds_left is not None and seconds_left < LEAST_DEADLINE:
        yield "short-register-deadline", f"Register waits {seconds_left:.1f} s only"


def options(registered: Any, answered: Any) -> Findings:
    """Register's options beside those of GetDevicePluginOptions; a Register without any says nothing."""
    if registered.ByteSize() and registered != answered:
        yield "options-differ", f"Register says {_brief(registered)}, GetDevicePluginOptions {_brief(answered)}"


def devices(
    listed: Sequence[Any], before: Sequence[Any] | None, others: Mapping[str, str], held: Collection[str]
) -> Findings:
    """A message of ListAndWatch. `before`: the one before it on the stream; `others`: the resource of each device that
    stands under another one; `held`: those of this resource that pods have.
    """
    if before is not None and _listing(listed) == _listing(before):
        yield "resent-list", f"the same list of {len(listed)} devices was sent again"
    seen: set[str] = set()
    for device in listed:
        shown = device.ID if len(device.ID) <= ID_LENGTH else device.ID[:ID_LENGTH] + "…"
        if not device.ID:
            yield "empty-device-id", "a device has no id"
        if len(device.ID) > ID_LENGTH:
            yield "long-device-id", f"{shown} has {len(device.ID)} characters"
        if device.ID in seen:
            yield "doubled-device-id", f"{shown} stands twice in one list"
        seen.add(device.ID)
        if device.ID in others:
            yield "shared-device-id", f"{shown} stands under {others[device.ID]} as well"
        if device.health not in (HEALTHY, UNHEALTHY):
            yield "health-string", f"the health of {shown} is {device.health!r}"
        if any(node.ID < 0 for node in device.topology.nodes):
            yield "negative-numa-node", f"{shown} is on NUMA node {min(node.ID for node in device.topology.nodes)}"
        if device.HasField("topology") and not device.topology.nodes:
            yield "empty-topology", f"{shown} has a topology without nodes"
    for device_id in sorted(set(held) - seen):
        yield "vanished-while-held", f"{device_id} is a pod's and not listed any more"


def preference(available: Collection[str], must: Collection[str], size: int, response: Any) -> Findings:
    """An answer of GetPreferredAllocation; none at all leaves the choice to the kubelet."""
    if len(response.container_responses) > 1:
        yield "wrong-response-count", f"GetPreferredAllocation has {len(response.container_responses)} responses"
    for answer in response.container_responses[:1]:
        chosen = list(answer.deviceIDs)
        if not chosen:
            return
        if len(set(chosen)) != len(chosen) or len(chosen) != size:
            yield "bad-preference", f"{len(chosen)} devices are preferred ({len(set(chosen))} different), not {size}"
        if foreign := sorted(set(chosen) - set(available)):
            yield "bad-preference", f"{foreign[0]} is preferred and not available"
        if missing := sorted(set(must) - set(chosen)):
            yield "bad-preference", f"{missing[0]} must be included and is not preferred"


def allocation(asked: Collection[str], known: Collection[str], response: Any) -> Findings:
    """An answer of Allocate for one container. `known`: all devices of the resource."""
    count = len(response.container_responses)
    if count != 1:
        yield "wrong-response-count", f"Allocate has {count} responses for one container"
    for answer in response.container_responses[:1]:
        others = {each for each in known if len(each) >= _TELLING} - set(asked)
        for word in sorted(others & set(_words(answer))):
            yield "foreign-device", f"Allocate for {_some(asked)} names {word}"
        yield from _malformed(answer)


def too_large(code: str, details: str) -> bool:
    """Does an error of gRPC say that the plugin's message was larger than the kubelet takes?"""
    return code == "RESOURCE_EXHAUSTED" and str(RECEIVE_LIMIT) in details


def _listing(listed: Sequence[Any]) -> list[bytes]:
    return sorted(each.SerializeToString(deterministic=True) for each in listed)


def _words(answer: Any) -> Iterator[str]:
    texts = [*answer.envs.values(), *answer.annotations.values(), *(each.name for each in answer.cdi_devices)]
    texts += [path for each in (*answer.mounts, *answer.devices) for path in (each.host_path, each.container_path)]
    for text in texts:
        yield from re.split(r"[\s,;=/]+", text)


def _malformed(answer: Any) -> Findings:
    for name in answer.envs:
        if not name or "=" in name or "\0" in name:
            yield "malformed-response", f"{name!r} is no name of an environment variable"
    for each in (*answer.mounts, *answer.devices):
        for path in (each.host_path, each.container_path):
            if not path.startswith("/"):
                yield "malformed-response", f"{path!r} is no absolute path"
    for node in answer.devices:
        if not node.permissions or set(node.permissions) - set("rwm"):
            yield "malformed-response", f"the permissions of {node.host_path} are {node.permissions!r}"
    for device in answer.cdi_devices:
        if _CDI.fullmatch(device.name) is None:
            yield "malformed-response", f"{device.name!r} is no fully qualified CDI device (vendor/class=name)"
    for kind, entries in (("mount", answer.mounts), ("device", answer.devices)):
        hosts: dict[str, str] = {}
        for each in entries:
            if hosts.setdefault(each.container_path, each.host_path) != each.host_path:
                yield "malformed-response", f"two {kind}s go to {each.container_path}"


def _brief(message: Any) -> str:
    return " ".join(str(message).split()) or "no options"


def _some(names: Collection[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
