"""What a node says about one cache: the document of its TritonKernelCacheNodeStatus, from what the node found.

For the node's process, which is its only writer. Whatever was found, what comes out is valid under `crds`: texts of
strangers are flattened and cut, lists end at their bounds, and what is no value of its field is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from crds import kernelcache_node
from crds.kernelcache import API_VERSION, Digest, MountPath
from crds.kernelcache_node import MOST_GPUS, MOST_PODS, NodeCacheStatus, PodUse
from planning.caches.compatibility import Verdict
from planning.caches.orders import CacheRef
from planning.conditions import LONGEST, condition, conditions
from planning.naming import label_value, short_hash
from planning.times import seconds, timestamp

CACHE_UID_LABEL = "tkm.io/cache-uid"
NODE_LABEL = "tkm.io/node"
NAME = 253  # characters of an object's name
CONDITIONS: tuple[ConditionType, ...] = ("Verified", "Compatible", "HitPredicted", "Ready")

ConditionType = Literal["Verified", "Compatible", "HitPredicted", "Ready"]
Truth = Literal["True", "False", "Unknown"]

_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}")
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_digest: TypeAdapter[str] = TypeAdapter(Digest)
_mount_path: TypeAdapter[str] = TypeAdapter(MountPath)


@dataclass(frozen=True, slots=True)
class Check:
    """One condition: whether it holds, why in a word, and in a sentence."""

    status: Truth
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that has the cache mounted, and which image of it."""

    namespace: str
    name: str
    uid: str
    digest: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What the node found. `digest` is the image that new pods get ('' none), `target` what was ordered; `kernels` is
    None where nobody counted them.
    """

    generation: int
    target: str
    digest: str
    mount_path: str
    size_bytes: int
    kernels: int | None
    gpus: tuple[Verdict, ...]
    simulated: bool
    verified: Check
    compatible: Check
    hit_predicted: Check
    ready: Check


def status_name(cache: str, node: str) -> str:
    """The name of a cache's status on a node: `<cache>.<node>`, with a hash where that is too long or could be another
    pair's.
    """
    name = f"{cache}.{node}"
    if len(name) <= NAME and "." not in cache:
        return name
    return f"{name[: NAME - 9].rstrip('-.')}-{short_hash(f'{cache}/{node}')}"


def document(ref: CacheRef, node: str, node_uid: str) -> dict[str, Any]:
    """The object without its status, as it is created. It goes with the Node."""
    metadata: dict[str, Any] = {
        "name": status_name(ref.name, node),
        "labels": {CACHE_UID_LABEL: label_value(ref.uid), NODE_LABEL: label_value(node)},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}],
    }
    if ref.namespace:
        metadata["namespace"] = ref.namespace
    return {
        "apiVersion": API_VERSION,
        "kind": kernelcache_node.KIND if ref.namespace else kernelcache_node.CLUSTER_KIND,
        "metadata": metadata,
        "spec": {"nodeName": node, "kernelCacheRef": {"name": ref.name, "uid": ref.uid}},
    }


def status(found: Findings, pods: Sequence[Pod], before: object, now: float) -> dict[str, Any]:
    """The status. `before`: what it was, of which only the times of conditions that did not change are kept."""
    products = list(dict.fromkeys(verdict.gpu.product for verdict in found.gpus))
    drivers = list(dict.fromkeys(verdict.gpu.driver for verdict in found.gpus))
    generation = _bounded(found.generation, _INT64)
    checks = (found.verified, found.compatible, found.hit_predicted, found.ready)
    raw = {
        "observedGeneration": generation,
        "gpuType": cut(", ".join(products), 128) or None,
        "driverVersion": cut(", ".join(drivers), 64) or None,
        "gpus": _gpus(found.gpus),
        "simulated": found.simulated,
        "digest": _valid(_digest, found.digest),
        "targetDigest": _valid(_digest, found.target),
        "mountPath": _valid(_mount_path, found.mount_path),
        "sizeBytes": _bounded(found.size_bytes, _INT64),
        "kernels": None if found.kernels is None else _bounded(found.kernels, _INT32),
        "conditions": [
            _condition(kind, check, generation, before, now) for kind, check in zip(CONDITIONS, checks, strict=True)
        ],
        **_uses(pods),
        "updated": timestamp(now),
    }
    return _dumped(raw)


def with_pods(
    before: Mapping[str, Any], pods: Sequence[Pod], now: float, checks: Mapping[ConditionType, Check]
) -> dict[str, Any] | None:
    """A status in which only the pods and these conditions are others; None if that is no status."""
    raw = {**before, **_uses(pods), "updated": timestamp(now)}
    kept = raw.get("conditions")
    if isinstance(kept, list):
        said = before.get("observedGeneration")
        generation = said if isinstance(said, int) else 0
        told = [_condition(kind, check, generation, before, now) for kind, check in checks.items()]
        others = [each for each in kept if not (isinstance(each, Mapping) and each.get("type") in checks)]
        raw["conditions"] = [*others, *told]
    try:
        return _dumped(raw)
    except ValidationError:
        return None


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a write would change nothing but its time."""
    return {**one, "updated": ""} == {**other, "updated": ""}


def _dumped(raw: Mapping[str, Any]) -> dict[str, Any]:
    model = NodeCacheStatus.model_validate({key: value for key, value in raw.items() if value is not None})
    return model.model_dump(by_alias=True, exclude_none=True)


def _condition(kind: ConditionType, check: Check, generation: int, before: object, now: float) -> dict[str, Any]:
    """As it is due. A time that is none of ours counts as none."""
    known = before if isinstance(before, Mapping) else {}
    dated = [each for each in conditions(known) if seconds(each.get("lastTransitionTime")) is not None]
    reason = check.reason if _REASON.fullmatch(check.reason) else "Unknown"
    holds = {"True": True, "False": False, "Unknown": None}[check.status]
    return condition({"conditions": dated}, kind, holds, reason, cut(check.message, LONGEST), generation, now)


def _gpus(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for verdict in verdicts:
        if len(found) == MOST_GPUS:
            break
        name = cut(verdict.gpu.id, 1024)
        name = name if len(name) <= 128 else f"{name[:119]}-{short_hash(name)}"
        found.setdefault(
            name,
            {
                "id": name,
                "product": cut(verdict.gpu.product, 128),
                "compatible": verdict.compatible,
                "message": cut(verdict.message, 256),
            },
        )
    return list(found.values())


def _uses(pods: Sequence[Pod]) -> dict[str, Any]:
    """A pod with two volumes of a cache is one pod."""
    distinct = {pod.uid: pod for pod in pods}
    shown: list[dict[str, str]] = []
    for pod in sorted(distinct.values(), key=lambda each: (each.namespace, each.name, each.uid)):
        raw = {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid, "digest": pod.digest}
        model, _ = PodUse.validated(raw, "pods")
        if model is not None and len(shown) < MOST_PODS:
            shown.append(raw)
    return {"pods": shown, "podsUsing": _bounded(len(distinct), _INT32)}


def _valid(adapter: TypeAdapter[str], value: str) -> str | None:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        return None


def _bounded(value: int, most: int) -> int:
    return min(max(value, 0), most)


def cut(text: str, most: int) -> str:
    """A text as it may stand in a status: one line, at most so long."""
    flat = "".join(each if each.isprintable() else " " for each in text)
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"
