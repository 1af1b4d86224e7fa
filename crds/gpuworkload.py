"""GPUWorkload (gpu.warp.dev/v1alpha1): what a person may ask for, for everyone who reads one.

The models are the only description: the CRD is generated from them (`crds.generate`), and what they refuse becomes a
condition with a path and a reason. Every list, map and string has a bound, so that a hostile resource stays small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from crds.refusals import explain_refusal

GROUP = "gpu.warp.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "GPUWorkload"
PLURAL = "gpuworkloads"

PRIORITIES: Mapping[str, int] = {"low": -100, "normal": 0, "high": 100}
PRIORITY_LIMIT = 1_000_000
TEMPLATE_LIMIT = 64 * 1024  # bytes of a template as compact JSON
TEMPLATE_DEPTH = 64  # levels of a template; a pod has about twelve, and parsers give up somewhere beyond 250
SPEC_LIMIT = 128 * 1024  # bytes of a whole spec as compact JSON
MAX_GPUS = 8  # of one pod: one node's
MAX_REPLICAS = 512  # pods of one workload
MAX_INT32 = 2**31 - 1

Phase = Literal["Pending", "Scheduling", "Scheduled", "Running", "Failed", "Succeeded"]
ConditionType = Literal["Accepted", "Scheduled", "Running", "Suspended", "Finished"]

QUANTITY_PATTERN = (
    r"^\+?(([0-9]{1,30}(\.[0-9]{0,9})?)|(\.[0-9]{1,9}))"
    r"(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]{1,2}))?$"
)
EXTENDED_RESOURCE_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
STRATEGY_PATTERN = r"^[a-z][A-Za-z0-9]{0,62}$"
LABEL_VALUE_PATTERN = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_QUANTITY = re.compile(QUANTITY_PATTERN)


def serialised_size(value: object, limit: int) -> int:
    """Bytes of `value` as compact JSON; more than `limit` when it is nested too deeply to be written at all."""
    try:
        return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))
    except (RecursionError, TypeError, ValueError):
        return limit + 1


def nested(value: object, levels: int) -> bool:
    """Whether `value` has more than so many levels of objects and lists."""
    layer = [value]
    for _ in range(levels):
        layer = [
            item
            for each in layer
            for item in (each.values() if isinstance(each, Mapping) else each if isinstance(each, list | tuple) else ())
        ]
        if not layer:
            return False
    return any(isinstance(each, Mapping | list | tuple) for each in layer)


def _label_key(key: str) -> str:
    if not _LABEL_KEY.fullmatch(key) or len(key) > 317:
        raise ValueError("is not a label key (such as example.com/gpu-type)")
    return key


def _quantity(value: str | int) -> str | int:
    if isinstance(value, str) and not _QUANTITY.fullmatch(value):
        raise ValueError("is not a quantity that Kubernetes knows (such as 500m, 2 or 4Gi)")
    return value


def _priority(value: object) -> object:
    if isinstance(value, str) and value in PRIORITIES:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= PRIORITY_LIMIT:
        return value
    raise ValueError(f"must be low, normal, high or an integer from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}")


def _small(value: dict[str, Any]) -> dict[str, Any]:
    if serialised_size(value, 4096) > 4096:
        raise ValueError("must be at most 4096 bytes as JSON")
    return value


def _template(value: dict[str, Any]) -> dict[str, Any]:
    """Check what berth itself relies on; the rest is for the API server, which sees it in a dry run."""
    if serialised_size(value, TEMPLATE_LIMIT) > TEMPLATE_LIMIT:
        raise ValueError(f"must be at most {TEMPLATE_LIMIT // 1024} KiB as JSON")
    unknown = sorted(str(key) for key in value if key not in ("metadata", "spec"))
    if unknown:
        raise ValueError(f"is a pod template and has only metadata and spec, not {unknown[0][:64]}")
    if not isinstance(value.get("metadata") or {}, dict):
        raise ValueError("needs an object as its metadata")
    for key in ("labels", "annotations"):
        if not isinstance((value.get("metadata") or {}).get(key) or {}, dict):
            raise ValueError(f"needs an object as its metadata.{key}")
    spec = value.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    if not isinstance(containers, list) or not containers:
        raise ValueError("needs a spec with at least one container")
    if not all(isinstance(container, dict) for container in containers):
        raise ValueError("needs objects as its containers")
    return value


def _schema(**extra: Any) -> dict[str, Any]:
    """Extra keys for the CRD's schema; `crds.generate` carries x-kubernetes-* and format over as they stand."""
    return extra


INT_OR_STRING = _schema(**{"x-kubernetes-int-or-string": True})
FREE_OBJECT = _schema(**{"x-kubernetes-preserve-unknown-fields": True})

_ONE_SEAT = "gpuFraction is a part of one GPU, given as a seat: gpuCount must be 1, and gpuResource left out"

Int = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(ge=0, json_schema_extra={"format": "int32"})]
Generation = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
Quantity = Annotated[
    Annotated[str, Field(strict=True, max_length=64)] | Annotated[int, Field(strict=True, ge=0, le=2**62)],
    AfterValidator(_quantity),
    Field(json_schema_extra={**INT_OR_STRING, "pattern": QUANTITY_PATTERN, "maxLength": 64}),
]
LabelKey = Annotated[str, Field(strict=True, max_length=317), AfterValidator(_label_key)]
LabelValue = Annotated[str, Field(strict=True, max_length=63, pattern=LABEL_VALUE_PATTERN)]
ResourceName = Annotated[str, Field(strict=True, max_length=317), AfterValidator(_label_key)]
Argument = Annotated[str, Field(strict=True, max_length=16384)]
ObjectName = Annotated[
    StrictStr,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"),
]
NamespaceName = Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class CRDModel(BaseModel):
    """The common rules: camelCase names, unknown fields refused, values frozen."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    @classmethod
    def validated(cls, raw: object, where: str) -> tuple[Self | None, str]:
        """The value, or None and a sentence with path (from `where` on) and reason. Never raises, whatever `raw` is."""
        try:
            return cls.model_validate(raw), ""
        except ValidationError as error:
            return None, explain_refusal(error, where)
        except (RecursionError, TypeError, ValueError) as error:
            return None, f"{where}: cannot be read ({type(error).__name__})"


class RetryPolicy(CRDModel):
    """How often a failure is answered with another Job, and after how long."""

    max_retries: Int = Field(
        default=3, ge=1, le=10, description="Failures answered with another Job.", json_schema_extra={"format": "int32"}
    )
    backoff_seconds: Int = Field(
        default=30,
        ge=1,
        le=300,
        description="Wait before the first retry; it doubles with every further one, up to 300 seconds.",
        json_schema_extra={"format": "int32"},
    )


class EnvVar(CRDModel):
    """An environment variable; `valueFrom` is passed to the pod as it stands."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=r"^[ -<>-~]+$")]
    value: Annotated[StrictStr, Field(max_length=16384)] | None = None
    value_from: Annotated[dict[str, Any], AfterValidator(_small), Field(json_schema_extra=FREE_OBJECT)] | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "!(has(self.value) && self.value != '' && has(self.valueFrom))",
                    "message": "an environment variable has either value or valueFrom, not both",
                }
            ]
        }
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.value and self.value_from is not None:
            raise ValueError("has either value or valueFrom, not both")
        return self


class Toleration(CRDModel):
    """A toleration as in a pod."""

    key: Annotated[StrictStr, Field(max_length=317)] = ""
    operator: Literal["", "Exists", "Equal"] = ""
    value: Annotated[StrictStr, Field(max_length=63)] = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    toleration_seconds: Annotated[Int, Field(json_schema_extra={"format": "int64"})] | None = None


class ContainerResources(CRDModel):
    """CPU, memory and the like; GPUs are asked for by `gpuCount` alone."""

    requests: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] = Field(default_factory=dict)
    limits: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] = Field(default_factory=dict)


class Topology(CRDModel):
    """How near to each other a gang's pods must be."""

    level: LabelKey = Field(
        min_length=1,
        description="A node label whose value names the domain, such as topology.kubernetes.io/zone.",
    )
    mode: Literal["Required", "Preferred"] = Field(
        default="Required",
        description="Required: all pods in one domain, or none runs. Preferred: in as few domains as can be.",
    )


class GPUWorkloadSpec(CRDModel):
    """What a person asks for: a model, a number of GPUs on one node, and what runs there."""

    model_name: Annotated[StrictStr, Field(min_length=1, max_length=255)] = Field(
        description="The model this workload serves or trains; the container reads it as MODEL_NAME."
    )
    gpu_count: Annotated[Int, Field(ge=1, le=MAX_GPUS, json_schema_extra={"format": "int32"})] = Field(
        description="GPUs of each pod, all on one node; the container reads it as GPU_COUNT."
    )
    gpu_resource: Annotated[StrictStr, Field(max_length=317, pattern=EXTENDED_RESOURCE_PATTERN)] | None = Field(
        default=None,
        description="The resource that counts the GPUs, such as amd.com/gpu; left out, the installation's.",
    )
    gpu_memory: Quantity | None = Field(
        default=None, description="Memory that each GPU must have at least, as the node's labels tell it, such as 40G."
    )
    gpu_fraction: Annotated[float, Field(strict=True, ge=0.001, le=0.999)] | None = Field(
        default=None,
        description="The part of one GPU that is enough, such as 0.5; in a cluster it becomes a seat.",
    )
    replicas: Annotated[Int, Field(ge=1, le=MAX_REPLICAS, json_schema_extra={"format": "int32"})] = Field(
        default=1,
        description="Pods with gpuCount GPUs each. More than one are a gang: they start together or not at all.",
    )
    min_replicas: Annotated[Int, Field(ge=1, le=MAX_REPLICAS, json_schema_extra={"format": "int32"})] | None = Field(
        default=None, description="Pods with which a gang may start where not all find a place. Left out: all."
    )
    topology: Topology | None = Field(default=None, description="How near to each other a gang's pods must be.")
    priority: Annotated[int | Literal["low", "normal", "high"], BeforeValidator(_priority)] = Field(
        default="normal",
        description="low (-100), normal (0), high (100) or an integer; higher goes first.",
        json_schema_extra={
            **INT_OR_STRING,
            "x-kubernetes-validations": [
                {
                    "rule": (
                        f"type(self) == int ? (self >= {-PRIORITY_LIMIT} && self <= {PRIORITY_LIMIT}) "
                        ": self in ['low', 'normal', 'high']"
                    ),
                    "message": f"must be low, normal, high or an integer from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}",
                }
            ],
        },
    )
    preemptible: StrictBool | None = Field(
        default=None,
        description=(
            "Whether it may be stopped and queued again when others need its place; only such work borrows beyond its "
            "GPUQuota's nominal. Left out: true for priority low and below, else false."
        ),
    )
    scheduling_strategy: Annotated[StrictStr, Field(max_length=63, pattern=STRATEGY_PATTERN)] | None = Field(
        default=None,
        description="How a node is chosen, such as leastLoaded; left out, the namespace's or the installation's.",
    )
    retry_policy: RetryPolicy = Field(
        default_factory=RetryPolicy, description="What happens after a failure.", json_schema_extra={"default": {}}
    )
    image: Annotated[StrictStr, Field(min_length=1, max_length=1024, pattern=r"^\S+$")] | None = Field(
        default=None, description="Container image; left out, the installation's default."
    )
    command: Annotated[list[Argument], Field(max_length=64)] | None = Field(
        default=None, description="The container's command."
    )
    args: Annotated[list[Argument], Field(max_length=64)] | None = Field(
        default=None, description="The container's arguments."
    )
    env: Annotated[list[EnvVar], Field(max_length=128)] | None = Field(
        default=None,
        description="The container's environment, beside MODEL_NAME and GPU_COUNT.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    resources: ContainerResources | None = Field(
        default=None, description="The container's CPU, memory and the like; GPUs come from gpuCount."
    )
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] | None = Field(
        default=None, description="Labels that the node must have."
    )
    tolerations: Annotated[list[Toleration], Field(max_length=32)] | None = Field(
        default=None, description="Taints that do not keep this workload off a node."
    )
    active_deadline_seconds: Annotated[Int, Field(ge=1, le=MAX_INT32, json_schema_extra={"format": "int64"})] | None = (
        Field(default=None, description="Seconds that one Job may take from its start; after them the workload fails.")
    )
    ttl_seconds_after_finished: (
        Annotated[Int, Field(ge=0, le=MAX_INT32, json_schema_extra={"format": "int32"})] | None
    ) = Field(default=None, description="Seconds after which the finished workload is deleted; left out, never.")
    reservation: ObjectName | None = Field(
        default=None,
        description="The GPUReservation whose GPUs it runs on: it waits for the window, and runs nowhere else.",
    )
    suspend: StrictBool = Field(default=False, description="Take the Job back and keep the workload out of the queue.")
    template: Annotated[dict[str, Any], AfterValidator(_template), Field(json_schema_extra=FREE_OBJECT)] | None = Field(
        default=None,
        description="A whole pod template (at most 64 KiB) instead of image, command, args, env and resources.",
    )

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": (
                        "!has(self.template) || !(has(self.image) || has(self.command) || has(self.args) "
                        "|| has(self.env) || has(self.resources))"
                    ),
                    "message": "template cannot be combined with image, command, args, env or resources: "
                    "put them into the template's containers",
                },
                {
                    "rule": "!has(self.minReplicas) || self.minReplicas <= self.replicas",
                    "fieldPath": ".minReplicas",
                    "message": "must be at most replicas",
                },
                {
                    "rule": "!has(self.gpuFraction) || (self.gpuCount == 1 && !has(self.gpuResource))",
                    "message": _ONE_SEAT,
                },
            ]
        }
    )

    @model_validator(mode="after")
    def _replicas_agree(self) -> Self:
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise ValueError(f"minReplicas must be at most replicas ({self.replicas}), not {self.min_replicas}")
        return self

    @model_validator(mode="after")
    def _env_names_differ(self) -> Self:
        names = [item.name for item in self.env or ()]
        twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            raise ValueError(f"env names {twice[:64]} twice")
        return self

    @model_validator(mode="after")
    def _template_stands_alone(self) -> Self:
        if self.template is not None:
            for name in ("image", "command", "args", "env", "resources"):
                if getattr(self, name) is not None:
                    raise ValueError(f"template cannot be combined with {name}: put it into the template's containers")
        return self

    @model_validator(mode="after")
    def _a_part_is_of_one(self) -> Self:
        if self.gpu_fraction is not None and (self.gpu_count != 1 or self.gpu_resource is not None):
            raise ValueError(_ONE_SEAT)
        return self

    @property
    def priority_value(self) -> int:
        """The priority as a number; higher goes first."""
        return self.priority if isinstance(self.priority, int) else PRIORITIES[self.priority]

    @property
    def may_be_preempted(self) -> bool:
        """`preemptible`, or what holds where it is left out."""
        return self.priority_value <= PRIORITIES["low"] if self.preemptible is None else self.preemptible

    @classmethod
    def parse(cls, raw: object) -> tuple[GPUWorkloadSpec | None, str]:
        """The spec, or None and a sentence with path and reason. Never raises, whatever `raw` is."""
        if not isinstance(raw, Mapping):
            return None, "spec: must be an object"
        # the template is measured first: a spec that is too large is not worth a detailed complaint
        if "template" in raw and serialised_size(raw["template"], TEMPLATE_LIMIT) > TEMPLATE_LIMIT:
            return None, f"spec.template: must be at most {TEMPLATE_LIMIT // 1024} KiB as JSON"
        if nested(raw.get("template"), TEMPLATE_DEPTH):
            return None, f"spec.template: must not be nested deeper than {TEMPLATE_DEPTH} levels"
        if serialised_size(raw, SPEC_LIMIT) > SPEC_LIMIT:
            return None, f"spec: must be at most {SPEC_LIMIT // 1024} KiB as JSON"
        return cls.validated(raw, "spec")


# What may change once a Job was created; all else stays as the Job was made from it.
MUTABLE = ("suspend", "priority", "preemptible", "activeDeadlineSeconds")


class Condition(CRDModel):
    """One condition of the status, as metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    observed_generation: Generation | None = None
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    reason: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Field(max_length=8192)] = ""


Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Name = Annotated[str, Field(max_length=253)]
