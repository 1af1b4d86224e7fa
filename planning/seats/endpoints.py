"""Which EndpointSlices a Service of seats has: they lead to the nodes' seat proxies, so that a request for a parked
server finds somebody who wakes it.

Such a Service has no selector of its own, for Kubernetes would fill it with pods; its annotation says which pods are
meant. Which seat a pod has, and on which port its node's proxy listens for it, is said by that node's GPUSeatGroups; a
node speaks for the pods that run there and for no other.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from planning.podspecs import mapping, mappings, text
from planning.seats.migration import REPLACES

SERVICE_ANNOTATION = "kyb.ai/seats"
"""On a Service without selector: labels of the pods that are meant, such as `app=llama` or `app=llama,tier=gold`."""
PORT_ANNOTATION = "kyb.ai/port"
"""On a pod with a seat: the container port on which its server listens."""
MANAGER = "seats.berth.kyb.ai"
MOST_ENDPOINTS = 100  # of one slice, as Kubernetes' own controller has it
Standing = Literal["serves", "starts", "moved", "none"]
_STANDING: Mapping[str, Standing] = {
    **dict.fromkeys(("Active", "Draining", "Parking", "Parked", "Waking"), "serves"),
    **dict.fromkeys(("Waiting", "Starting", "Lost"), "starts"),
}


@dataclass(frozen=True, slots=True)
class SeatService:
    """A Service whose pods have seats. `problem`: why it gets no endpoints, a sentence; '' if it does."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    port: str = ""
    app_protocol: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SeatPod:
    """A pod that may have a seat. `host`: the address of its `node`, as its status says; '' before it has one.
    `replaces`: the pod in whose stead it was started, as that moves; '' for none.
    """

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    node: str = ""
    host: str = ""
    ready: bool = False
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class ProxyPort:
    """Where a seat's requests are taken: its port on the proxy of its node. `standing` tells of its server what matters
    here, and is no other when it is parked and woken.
    """

    node: str
    seat: str
    standing: Standing
    port: int
    namespace: str
    pod: str


def seat_service(raw: Mapping[str, Any]) -> SeatService | None:
    """Of any Service; None where it is none of seats. Never raises."""
    meta, spec = mapping(raw.get("metadata")), mapping(raw.get("spec"))
    told = mapping(meta.get("annotations")).get(SERVICE_ANNOTATION)
    if told is None:
        return None
    namespace, name, uid = text(meta.get("namespace")), text(meta.get("name")), text(meta.get("uid"))
    ports = list(mappings(spec.get("ports")))
    labels = {}
    for part in text(told).split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not key or not equals or value.startswith("="):
            problem = f"its annotation {SERVICE_ANNOTATION} is no list of labels such as app=llama: {text(told):.64}"
            return SeatService(namespace, name, uid, {}, problem=problem)
        labels[key] = value
    problem = ""
    if spec.get("selector"):
        problem = f"it has a selector beside its annotation {SERVICE_ANNOTATION}: remove the selector"
    elif len(ports) != 1:
        problem = f"it has {len(ports)} ports, and a seat's server has one"
    elif ports[0].get("protocol", "TCP") != "TCP":
        problem = "its port is not of TCP"
    if problem:
        return SeatService(namespace, name, uid, {}, problem=problem)
    port = ports[0]
    return SeatService(namespace, name, uid, labels, text(port.get("name")), text(port.get("appProtocol")))


def seat_pod(raw: Mapping[str, Any]) -> SeatPod | None:
    """Of any pod; None for one that has ended, or that is not said to have a server. Never raises."""
    meta, status = mapping(raw.get("metadata")), mapping(raw.get("status"))
    if PORT_ANNOTATION not in mapping(meta.get("annotations")) or status.get("phase") in ("Succeeded", "Failed"):
        return None
    labels = {key: value for key, value in mapping(meta.get("labels")).items() if isinstance(value, str)}
    said = {text(each.get("type")): each.get("status") for each in mappings(status.get("conditions"))}
    host = text(status.get("hostIP"))
    return SeatPod(
        text(meta.get("namespace")), text(meta.get("name")), text(meta.get("uid")), labels,
        text(mapping(raw.get("spec")).get("nodeName")), host if _reachable(host) else "",
        said.get("Ready") == "True", text(mapping(meta.get("annotations")).get(REPLACES)),
    )  # fmt: skip


def proxy_ports(raw: Mapping[str, Any]) -> list[ProxyPort]:
    """What a GPUSeatGroup says of where its seats are reached. What makes no sense is left out."""
    node, status = text(mapping(raw.get("spec")).get("nodeName")), mapping(raw.get("status"))
    found = []
    for seat in mappings(status.get("seats")):
        held, port = mapping(seat.get("heldBy")), seat.get("port")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536 or not held.get("pod"):
            continue
        standing: Standing = "moved" if seat.get("passedOn") else _STANDING.get(text(seat.get("phase")), "none")
        of = text(held.get("namespace")), text(held.get("pod"))
        found.append(ProxyPort(node, text(seat.get("id")), standing, port, *of))
    return found


def endpoint_slices(
    service: SeatService, pods: Iterable[SeatPod], ports: Iterable[ProxyPort]
) -> dict[str, dict[str, Any]]:
    """The slices that the Service is to have, by name. Nodes that take seats on the same port share one.

    Ready is who serves or is parked; where nobody of the Service is, whoever has yet to start: a request is what starts
    it. Of a pod that moves and the one in its stead the first is, until its requests are passed on, and then the other.
    """
    if service.problem:
        return {}
    meant = {
        (pod.node, pod.name): pod
        for pod in pods
        if pod.namespace == service.namespace and pod.host and service.labels.items() <= pod.labels.items()
    }
    standings: dict[tuple[int, str, str], set[Standing]] = defaultdict(set)
    for each in ports:
        if each.namespace == service.namespace and (each.node, each.pod) in meant:
            standings[each.port, each.node, each.pod].add(each.standing)
    staying = {key[2] for key, told in standings.items() if "moved" not in told}
    may = {
        key: told for key, told in standings.items() if "moved" not in told and meant[key[1:]].replaces not in staying
    }
    serve = {key for key, told in may.items() if "serves" in told or meant[key[1:]].ready}
    serve = serve or {key for key, told in may.items() if "starts" in told}
    serve = serve or {key for key, told in standings.items() if "moved" in told}  # whose proxy passes them on
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for key in sorted(standings):
        pod = meant[key[1:]]
        groups[key[0], "IPv6" if ":" in pod.host else "IPv4"].append(_endpoint(pod, ready=key in serve))
    made = {}
    for (port, kind), endpoints in groups.items():
        for number, start in enumerate(range(0, len(endpoints), MOST_ENDPOINTS)):
            suffix = f"seats-{port}" + ("-v6" if kind == "IPv6" else "") + (f"-{number}" if number else "")
            name = f"{service.name}-{suffix}"
            made[name] = _slice(service, name, kind, port, endpoints[start : start + MOST_ENDPOINTS])
    return made


def _endpoint(pod: SeatPod, *, ready: bool) -> dict[str, Any]:
    return {
        "addresses": [pod.host],
        "conditions": {"ready": ready, "serving": ready, "terminating": False},
        "nodeName": pod.node,
        "targetRef": {"kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
    }


def _slice(service: SeatService, name: str, kind: str, port: int, endpoints: Sequence[Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"port": port, "protocol": "TCP"}
    told |= {"name": service.port} if service.port else {}
    told |= {"appProtocol": service.app_protocol} if service.app_protocol else {}
    owner = {"apiVersion": "v1", "kind": "Service", "name": service.name, "uid": service.uid}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": {
                "kubernetes.io/service-name": service.name,
                "endpointslice.kubernetes.io/managed-by": MANAGER,
            },
            "ownerReferences": [owner | {"controller": True}],
        },
        "addressType": kind,
        "ports": [told],
        "endpoints": list(endpoints),
    }


def _reachable(address: str) -> bool:
    """Whether an endpoint may have it: the API server refuses loopback and link-local addresses, and so on."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified)
