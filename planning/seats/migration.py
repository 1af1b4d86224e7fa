"""Decides how a model server moves to a seat of another group: whether it can, what is started in its stead, and when
that serves. For the activities of a SeatMigration's workflow, which read and write.

A second server serves at the destination before the first one goes. Where the first is a Deployment's, the second is
given to its ReplicaSet at the end, which then has one pod too many, and ends the one that costs least.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crds.seatmigration import DEADLINE, SeatMigrationSpec
from planning import times
from planning.devices.prefer_group import ANNOTATION as PREFER_GROUP
from planning.devices.prefer_group import CLAIM as PREFERRED_CLAIM
from planning.podspecs import mapping, mappings, text

CLAIM = "kyb.ai/migration"
"""On a pod that is moved, and on the one that is started in its stead: the UID of the SeatMigration. Where a pod has
it, no other SeatMigration touches the pod."""
REPLACES = "kyb.ai/replaces"
"""On the one that is started: the name of the pod in whose stead."""
RECORD = "kyb.ai/migration-record"
"""On the same: the whole decision, by which it is found again should all else be lost."""
REPLACED_BY = "kyb.ai/replaced-by"
"""On the one that is moved: the name of the pod that was started. It is started once."""
RETIRES = "kyb.ai/retires"
"""On the one that is started, from the moment on at which the other is ended for it: the UID of that."""
FROM = "kyb.ai/migrated-from"
"""On one that has taken another's place: which, for people."""
COST = "controller.kubernetes.io/pod-deletion-cost"
CHEAPEST = str(-(2**31))
HASH = "pod-template-hash"
"""The label by which a ReplicaSet knows its pods. What is started has it from the moment on at which it serves."""

_TOKENS = "kube-api-access-"  # volumes of service account tokens, which every pod is given anew
_NAME = 63
_SERVES = frozenset({"Active", "Draining", "Parking", "Parked", "Waking"})
_SUPPORTED = "pods of Deployments and pods without an owner can be moved"


@dataclass(frozen=True, slots=True)
class SeatAt:
    """A seat as its node tells. `pod`: who holds it, '' nobody; `port`: where the node's proxy takes its requests, 0
    nowhere; `passed_on`: where these go instead, '' to its server. `resource`: as what it is asked for.
    """

    node: str
    group: str
    seat: str
    phase: str = "Absent"
    namespace: str = ""
    pod: str = ""
    port: int = 0
    passed_on: str = ""
    message: str = ""
    resource: str = ""

    @property
    def told(self) -> str:
        return f"{self.seat} on node {self.node}"


@dataclass(frozen=True, slots=True)
class Move:
    """What was decided: this pod moves, so. `to_group`: '' where any of the node will do; `replica_set`: whose pod it
    is, '' nobody's; `template_hash`: by which that knows its pods; `cost`: what was said of ending it before, ''
    nothing. `patience`: seconds that the new server has to serve, from when its pod is made. `port`: whether it takes
    requests. `resource`: as what it has its seat.
    """

    migration: str
    namespace: str
    name: str
    pod: str
    pod_uid: str
    node: str
    group: str
    seat: str
    to_node: str
    to_group: str
    replacement: str
    patience: float = DEADLINE
    port: bool = True
    replica_set: str = ""
    template_hash: str = ""
    cost: str = ""
    resource: str = ""

    @property
    def told(self) -> str:
        """Where to, for people."""
        return f"{self.to_group or 'any group'} on node {self.to_node}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why nothing is moved: in a word, and in a sentence without its full stop."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the new server is. `seat`: the one that it has, if it has one."""

    kind: Literal["wait", "serves", "failed"]
    reason: str
    message: str
    seat: SeatAt | None = None


@dataclass(frozen=True, slots=True)
class Around:
    """What is to be known of the namespace and the nodes. `claims`: SeatMigrations that are under way, name by UID;
    `replica_sets`: by UID, as the API server has them.
    """

    pods: Sequence[Mapping[str, Any]]
    seats: Sequence[SeatAt]
    claims: Mapping[str, str]
    replica_sets: Mapping[str, Mapping[str, Any]]


def seats_of(groups: Iterable[Mapping[str, Any]]) -> list[SeatAt]:
    """All seats of GPUSeatGroups. What makes no sense is left out."""
    found = []
    for raw in groups:
        spec, status = mapping(raw.get("spec")), mapping(raw.get("status"))
        for seat in mappings(status.get("seats")):
            held, port = mapping(seat.get("heldBy")), seat.get("port")
            found.append(
                SeatAt(
                    text(spec.get("nodeName")), text(spec.get("group")), text(seat.get("id")), text(seat.get("phase")),
                    text(held.get("namespace")), text(held.get("pod")),
                    port if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536 else 0,
                    text(seat.get("passedOn")), text(seat.get("message")),
                    text(status.get("resource")),
                )
            )  # fmt: skip
    return found


def replacement_name(pod: str, migration: str) -> str:
    """The name of what is started in a pod's stead: the same for a move however often it is asked for."""
    digest = hashlib.sha256(migration.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    base, _, last = pod.rpartition("-m")
    moved = base and len(last) == 6 and all(each in "0123456789abcdef" for each in last)
    return f"{(base if moved else pod)[: _NAME - 8].rstrip('-.')}-m{digest}"


def decide(spec: SeatMigrationSpec, namespace: str, name: str, uid: str, around: Around) -> Move | Refusal:
    """Whether and how the SeatMigration of this name is carried out."""
    pod = _chosen(spec, namespace, uid, around)
    if isinstance(pod, Refusal):
        return pod
    meta = mapping(pod.get("metadata"))
    called = text(meta.get("name"))
    if refusal := _unmovable(pod, uid, around.claims):
        return refusal
    mine = [seat for seat in around.seats if (seat.namespace, seat.pod) == (namespace, called)]
    mine = [seat for seat in mine if seat.node == mapping(pod.get("spec")).get("nodeName")]
    if len(mine) != 1:
        several = f"holds {len(mine)} seats" if mine else "holds no seat that its node switches (kubectl get gpusg)"
        return Refusal("NoSeat", f"pod {called} {several}")
    seat = mine[0]
    owner = _owner(pod, around.replica_sets)
    if isinstance(owner, Refusal):
        return owner
    substitute = replacement_name(called, uid)
    group = _destination(spec, seat, substitute, namespace, around.seats)
    if isinstance(group, Refusal):
        return group
    return Move(
        migration=uid, namespace=namespace, name=name, pod=called, pod_uid=text(meta.get("uid")),
        node=seat.node, group=seat.group, seat=seat.seat, to_node=spec.to.node or seat.node, to_group=group,
        replacement=substitute, patience=spec.deadline_seconds, port=bool(seat.port),
        replica_set=owner, template_hash=text(mapping(meta.get("labels")).get(HASH)) if owner else "",
        cost=text(mapping(meta.get("annotations")).get(COST)), resource=seat.resource,
    )  # fmt: skip


def _chosen(spec: SeatMigrationSpec, namespace: str, uid: str, around: Around) -> Mapping[str, Any] | Refusal:
    if spec.pod is not None:
        found = [each for each in around.pods if mapping(each.get("metadata")).get("name") == spec.pod]
        return found[0] if found else Refusal("NoPod", f"there is no pod {spec.pod} in {namespace}")
    workload = spec.workload
    if workload is None or workload.kind == "GPUWorkload":
        return Refusal(
            "OwnerUnsupported",
            "a GPUWorkload runs once and has no second server to serve in its stead: stop it, and it is placed anew",
        )
    sets = {
        uid
        for uid, raw in around.replica_sets.items()
        for owner in mappings(mapping(raw.get("metadata")).get("ownerReferences"))
        if owner.get("kind") == "Deployment" and owner.get("name") == workload.name and owner.get("controller")
    }
    holders = {seat.pod for seat in around.seats if seat.namespace == namespace}
    found = [
        each
        for each in around.pods
        if mapping(each.get("metadata")).get("name") in holders and _controller(each).get("uid") in sets
    ]
    claimed = [each for each in found if mapping(mapping(each["metadata"]).get("annotations")).get(CLAIM) == uid]
    found = [each for each in claimed if REPLACES not in mapping(each["metadata"]["annotations"])] or found
    if len(found) == 1:
        return found[0]
    if not found:
        return Refusal("NoPod", f"no pod of Deployment {workload.name} holds a seat")
    names = ", ".join(sorted(str(each["metadata"]["name"]) for each in found)[:8])
    return Refusal("SeveralPods", f"Deployment {workload.name} has {len(found)} pods with seats: name one ({names})")


def _unmovable(pod: Mapping[str, Any], uid: str, claims: Mapping[str, str]) -> Refusal | None:
    meta, spec = mapping(pod.get("metadata")), mapping(pod.get("spec"))
    called = text(meta.get("name"))
    if "deletionTimestamp" in meta or mapping(pod.get("status")).get("phase") in ("Succeeded", "Failed"):
        return Refusal("PodEnds", f"pod {called} has ended or is being deleted")
    claim = mapping(meta.get("annotations")).get(CLAIM)
    if claim != uid and isinstance(claim, str) and claim in claims:
        return Refusal("MovesAlready", f"pod {called} is moved by SeatMigration {claims[claim]}")
    if names := [text(each.get("name")) for each in mappings(spec.get("resourceClaims")) if not _preferred(each)]:
        told = (
            f"pod {called} has the ResourceClaim {names[0]}, which two pods would share, or which may not be had twice"
        )
        return Refusal("HasClaims", f"{told}: ask for the seat as a resource")
    return None


def _owner(pod: Mapping[str, Any], replica_sets: Mapping[str, Mapping[str, Any]]) -> str | Refusal:
    """The name of its ReplicaSet, '' where it has no owner."""
    owner = _controller(pod)
    if not owner:
        return ""
    called = f"{text(owner.get('kind'))} {text(owner.get('name'))}"
    raw = replica_sets.get(text(owner.get("uid")))
    if owner.get("kind") != "ReplicaSet" or raw is None:
        return Refusal("OwnerUnsupported", f"it belongs to {called}, and {_SUPPORTED}")
    if mapping(mapping(pod.get("metadata")).get("labels")).get(HASH) is None:
        return Refusal("OwnerUnsupported", f"it belongs to {called}, which is no Deployment's, and {_SUPPORTED}")
    return text(owner.get("name"))


def _controller(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    owners = mappings(mapping(pod.get("metadata")).get("ownerReferences"))
    return next((each for each in owners if each.get("controller")), {})


def _destination(
    spec: SeatMigrationSpec, seat: SeatAt, substitute: str, namespace: str, seats: Sequence[SeatAt]
) -> str | Refusal:
    """The group, '' for any of a node that has one free."""
    node, group = spec.to.node or seat.node, spec.to.group or ""
    there = [each for each in seats if each.node == node]
    if not there:
        return Refusal("NoSuchNode", f"node {node} says of no seats that it switches them (kubectl get gpusg)")
    if group:
        there = [each for each in there if each.group == group]
        if not there:
            return Refusal("NoSuchGroup", f"node {node} has no group {group} (kubectl get gpusg)")
    if group and "" not in (seat.resource, there[0].resource) and seat.resource != there[0].resource:
        told = f"group {group} on node {node} has {there[0].resource}, and its seat is {seat.resource}"
        return Refusal("OtherSize", told)
    there = [each for each in there if each.resource in ("", seat.resource) or not seat.resource]
    if node == seat.node and group in ("", seat.group):
        return Refusal("IsThere", f"it is there already: it has {seat.told}")
    if not any(not each.pod or (each.namespace, each.pod) == (namespace, substitute) for each in there):
        where = f"group {group}" if group else "every group"
        return Refusal("Full", f"all {len(there)} seats of {where} on node {node} are held")
    return group


def replacement(pod: Mapping[str, Any], move: Move, record: str) -> dict[str, Any]:
    """What is started: the pod as it was asked for, on the other node. `record`: the move, as RECORD has it."""
    meta, spec = mapping(pod.get("metadata")), copy.deepcopy(dict(mapping(pod.get("spec"))))
    labels = {
        key: value for key, value in mapping(meta.get("labels")).items() if not (move.replica_set and key == HASH)
    }
    annotations = {
        key: value
        for key, value in mapping(meta.get("annotations")).items()
        if key not in (CLAIM, COST, FROM, REPLACED_BY)
    }
    annotations |= {CLAIM: move.migration, REPLACES: move.pod, RECORD: record}
    claimed = _give_back(spec, move.resource) or "extendedResourceClaimStatus" in mapping(pod.get("status"))
    if move.to_group and (claimed or PREFER_GROUP in annotations):
        annotations[PREFER_GROUP] = move.to_group  # where DRA hands seats out the webhook makes a claim of it
    for key in ("nodeName", "ephemeralContainers", "priority", "preemptionPolicy"):
        if key != "preemptionPolicy" or "priorityClassName" in spec:
            spec.pop(key, None)
    spec["volumes"] = [each for each in mappings(spec.get("volumes")) if not _token(each)]
    for kind in ("initContainers", "containers"):
        for container in mappings(spec.get(kind)):
            if "volumeMounts" in container:
                container["volumeMounts"] = [  # type: ignore[index]
                    each for each in mappings(container["volumeMounts"]) if not _token(each)
                ]
    spec["affinity"] = _on(move.to_node, spec.get("affinity"))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": move.replacement, "namespace": move.namespace, "labels": labels, "annotations": annotations,
        },
        "spec": spec,
    }  # fmt: skip


def _preferred(claim: Mapping[str, Any]) -> bool:
    """Whether this claim is what berth's webhook made of a preference for a group."""
    return claim.get("name") == PREFERRED_CLAIM


def _give_back(spec: dict[str, Any], resource: str) -> bool:
    """Asks for the seat as the pod did before the webhook made a claim of it; False where it had made none."""
    claims = list(mappings(spec.get("resourceClaims")))
    if not any(map(_preferred, claims)) or not resource:
        return False
    spec.pop("resourceClaims")
    for kind in ("initContainers", "containers"):
        for container in mappings(spec.get(kind)):
            resources = mapping(container.get("resources"))
            if any(map(_preferred, mappings(resources.get("claims")))):
                limits = {**mapping(resources.get("limits")), resource: "1"}
                others = {key: value for key, value in resources.items() if key != "claims"}
                container["resources"] = {**others, "limits": limits}  # type: ignore[index]
    return True


def _token(each: Mapping[str, Any]) -> bool:
    return text(each.get("name")).startswith(_TOKENS)


def _on(node: str, affinity: object) -> dict[str, Any]:
    """The affinity, and on this node: each of its alternatives must hold there as well."""
    found = copy.deepcopy(dict(mapping(affinity)))
    nodes = dict(mapping(found.get("nodeAffinity")))
    required = dict(mapping(nodes.get("requiredDuringSchedulingIgnoredDuringExecution")))
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [dict(each) for each in mappings(required.get("nodeSelectorTerms"))] or [{}]
    required["nodeSelectorTerms"] = [
        {**each, "matchFields": [*(each.get("matchFields") or ()), here]} for each in terms
    ]
    return {**found, "nodeAffinity": {**nodes, "requiredDuringSchedulingIgnoredDuringExecution": required}}


def gone(pod: Mapping[str, Any] | None, uid: str) -> bool:
    """Whether the pod of this UID is no more, or ends."""
    meta = mapping(mapping(pod).get("metadata"))
    ended = mapping(mapping(pod).get("status")).get("phase") in ("Succeeded", "Failed")
    return meta.get("uid") != uid or "deletionTimestamp" in meta or ended


def progress(
    move: Move, pod: Mapping[str, Any] | None, new: Mapping[str, Any] | None, seats: Iterable[SeatAt], now: float
) -> Progress:
    """How far the new server is. `pod`, `new`: the one that is moved and the one that was started, None where there is
    none any more.
    """
    if gone(pod, move.pod_uid):
        return Progress("failed", "PodGone", f"pod {move.pod} ended meanwhile, or was deleted by somebody else")
    if new is None or "deletionTimestamp" in new["metadata"]:
        return Progress("failed", "ReplacementGone", f"pod {move.replacement} was deleted by somebody else")
    status = mapping(new.get("status"))
    if status.get("phase") in ("Succeeded", "Failed"):
        why = text(status.get("message")) or text(status.get("reason")) or "its container ended"
        return Progress("failed", "ReplacementEnded", f"pod {move.replacement} ended: {why}")
    node = text(mapping(new.get("spec")).get("nodeName"))
    if node and node != move.to_node:
        return Progress("failed", "OtherNode", f"pod {move.replacement} was bound to node {node}")
    mine = (move.namespace, move.replacement)
    seat = next((each for each in seats if (each.namespace, each.pod) == mine and each.node == node), None)
    if seat is not None and move.to_group not in ("", seat.group):
        told = f"its node gave it {seat.seat}, which is not of {move.to_group}: that had no free seat left for it"
        return Progress("failed", "OtherGroup", told, seat)
    said = {text(each.get("type")): each for each in mappings(status.get("conditions"))}
    if seat is not None and seat.phase in _SERVES and mapping(said.get("Ready")).get("status") == "True":
        return Progress("serves", "Serves", f"pod {move.replacement} serves, with {seat.told}", seat)
    waits = _waits(move, said, seat, status)
    created = times.seconds(mapping(new.get("metadata")).get("creationTimestamp"))
    if created is not None and now > created + move.patience:
        return Progress("failed", "DeadlineExceeded", f"it did not serve by its deadline: {waits}", seat)
    return Progress("wait", "Starting", waits, seat)


def _waits(move: Move, said: Mapping[str, Mapping[str, Any]], seat: SeatAt | None, status: Mapping[str, Any]) -> str:
    """What the new server waits for."""
    if mapping(said.get("PodScheduled")).get("status") != "True":
        why = text(mapping(said.get("PodScheduled")).get("message"))
        return f"pod {move.replacement} has no node yet" + (f": {why}" if why else "")
    if seat is None:
        waiting = [
            text(mapping(mapping(each.get("state")).get("waiting")).get("message"))
            for each in mappings(status.get("containerStatuses"))
        ]
        why = next(filter(None, waiting), "")
        return f"pod {move.replacement} has no seat yet" + (f": {why}" if why else "")
    return f"pod {move.replacement} has {seat.told}, which is {seat.phase}" + (
        f": {seat.message}" if seat.message else ""
    )


def serves_still(move: Move, new: Mapping[str, Any] | None, seats: Iterable[SeatAt]) -> bool:
    """Whether the new server can do without the old one: it is ready, or parked after it has served."""
    if new is None or gone(new, text(mapping(new.get("metadata")).get("uid"))):
        return False
    mine = (move.namespace, move.replacement)
    return is_ready(new) or any((each.namespace, each.pod) == mine and each.phase in _SERVES for each in seats)


def is_ready(pod: Mapping[str, Any]) -> bool:
    """As the kubelet has it."""
    told = mappings(mapping(pod.get("status")).get("conditions"))
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in told)


def kept_out(pods: Iterable[Mapping[str, Any]], move: Move) -> str:
    """Why a ReplicaSet that gets one pod too many would not end the one that is moved, a sentence without its full
    stop; '' where it would. It ends those first that do not run or are not ready, and of others the one that costs
    least (k8s.io/kubernetes/pkg/controller, ActivePodsWithRanks).
    """
    for pod in pods:
        meta = mapping(pod.get("metadata"))
        ends = gone(pod, text(meta.get("uid"))) or meta.get("uid") == move.pod_uid
        if not ends and not is_ready(pod):
            return f"pod {text(meta.get('name'))} is not ready, and its ReplicaSet would end that instead of {move.pod}"
    return ""


def fits(move: Move, spec: SeatMigrationSpec) -> bool:
    """Whether a record, which anybody may have written, says what the SeatMigration does."""
    return (
        spec.pod in (None, move.pod)
        and spec.to.group in (None, move.to_group)
        and spec.to.node in (None, move.to_node)
        and move.patience <= spec.deadline_seconds
        and move.replacement == replacement_name(move.pod, move.migration)
    )


def leads_to(slices: Iterable[Mapping[str, Any]], uid: str) -> list[str]:
    """Names of the EndpointSlices that still lead requests to the pod of this UID."""
    return [
        text(mapping(each.get("metadata")).get("name"))
        for each in slices
        for end in mappings(each.get("endpoints"))
        if mapping(end.get("targetRef")).get("uid") == uid and mapping(end.get("conditions")).get("ready") is not False
    ]
