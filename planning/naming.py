"""Decides the names, labels and annotations of everything berth creates, for Jobs, their readers and the sweep.

Whatever a person calls a workload or a model, the results are valid in Kubernetes: what has to be cut or changed gets
a short hash of the original, so that different originals stay different.
"""

from __future__ import annotations

import hashlib
import json
import re

from crds.gpuworkload import GROUP, MUTABLE, GPUWorkloadSpec

FINALIZER = f"{GROUP}/finalizer"
CONTROLLER_VALUE = "gpu-orchestrator"

APP_LABEL = "app"
WORKLOAD_LABEL = f"{GROUP}/workload"
WORKLOAD_UID_LABEL = f"{GROUP}/workload-uid"
ATTEMPT_LABEL = f"{GROUP}/attempt"
CONTROLLER_LABEL = f"{GROUP}/controller"

CREATED_BY_ANNOTATION = f"{GROUP}/created-by"
CREATED_BY = "berth"
MODEL_NAME_ANNOTATION = f"{GROUP}/model-name"
RETRIES_ANNOTATION = f"{GROUP}/retries"
STRATEGY_ANNOTATION = f"{GROUP}/strategy"  # on a Job: who chose its node; on a namespace: its default
NODE_ANNOTATION = f"{GROUP}/node"
REQUESTS_ANNOTATION = f"{GROUP}/requests"
PLACES_ANNOTATION = f"{GROUP}/places"  # on a gang's Job: where its pods go
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"  # on a Job: of the spec that it was made from
PREEMPTED_ANNOTATION = f"{GROUP}/preempted"  # on a Job that the ledger suspended: for whom
RESUMED_ANNOTATION = f"{GROUP}/resumed"  # on a Job that goes on after it was stopped: since when
BACKFILL_ANNOTATION = f"{GROUP}/backfill"  # on a Job whose room is kept for a workload before it: until when, or 0
GENERATION_ANNOTATION = f"{GROUP}/generation"  # on a ProvisioningRequest: of the workload that it was made for
LENT_ANNOTATION = f"{GROUP}/lent"  # on a Job that has reserved GPUs as it could be stopped: "true"
WITHDRAWN_ANNOTATION = f"{GROUP}/withdrawn"  # on a Job that the ledger takes back: why
SIMULATED_LABEL = f"{GROUP}/simulated"  # on a node that nobody runs anything on: "true"

# The Cluster Autoscaler's, on a pod that uses what a ProvisioningRequest booked; it looks for both.
CONSUME_ANNOTATION = "autoscaling.x-k8s.io/consume-provisioning-request"
CLASS_ANNOTATION = "autoscaling.x-k8s.io/provisioning-class-name"

CONTAINER = "gpu-workload"
GATE = f"{GROUP}/placement"  # keeps the scheduler off a gang's pods until all are there
INDEX_KEY = "batch.kubernetes.io/job-completion-index"  # label that the Job controller writes on pods
JOB_SELECTOR = f"{CONTROLLER_LABEL}={CONTROLLER_VALUE}"

_LIMIT = 63
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def short_hash(text: str) -> str:
    """The first eight hex digits of the SHA-256 of `text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def spec_hash(spec: GPUWorkloadSpec) -> str:
    """Equal for specs that differ at most in what may change while there is a Job.

    Defaults are left out: a field that a later build adds must not make a running Job look like another spec's.
    """
    given = spec.model_dump(by_alias=True, exclude_defaults=True)
    return short_hash(json.dumps({key: value for key, value in given.items() if key not in MUTABLE}, sort_keys=True))


def label_value(text: str) -> str:
    """`text` where it is a valid label value, else what can be kept of it and a hash of the whole (at most 63)."""
    if _LABEL_VALUE.fullmatch(text):
        return text
    kept = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[: _LIMIT - 9].strip("-_.")
    return f"{kept}-{short_hash(text)}" if kept else short_hash(text)


def profile_name(model_name: str) -> str:
    """The name of a model's GPUModelProfile: the model's own where a resource can be called so, else what can be kept
    of it and a hash of the whole (a DNS label of at most 63 characters).
    """
    if re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", model_name):
        return model_name
    kept = re.sub(r"[^a-z0-9]+", "-", model_name.lower())[: _LIMIT - 9].strip("-")
    return f"{kept}-{short_hash(model_name)}" if kept else short_hash(model_name)


def job_name(cr_name: str, uid: str, attempt: int, *, indexed: bool = False) -> str:
    """`<cr name, cut>-<first 8 of the uid>-<attempt>`: a DNS label of at most 63 characters, of which the hostnames of
    pods that are `indexed` need four more.

    The uid makes it unique, so a cut name needs no hash. Dots (allowed in a resource's name, not in a label) become
    dashes, since pods and hostnames derive from a Job's name.
    """
    uid8 = re.sub(r"[^a-z0-9]", "", uid.lower())[:8] or short_hash(uid)
    tail = f"-{uid8}-{attempt}"
    head = re.sub(r"[^a-z0-9-]+", "-", cr_name.lower()).strip("-")[: _LIMIT - 4 * indexed - len(tail)].strip("-")
    return f"{head or 'w'}{tail}"


def request_name(cr_name: str, uid: str, generation: int, attempt: int) -> str:
    """`<cr name, cut>-<first 8 of the uid>-g<generation>-<attempt>`: of a ProvisioningRequest and its PodTemplate, the
    same however often they are made.
    """
    head, _, uid8 = job_name(cr_name, uid, 0).removesuffix("-0").rpartition("-")
    tail = f"-{uid8}-g{generation}-{attempt}"
    return f"{head[: _LIMIT - len(tail)].rstrip('-')}{tail}"


def workload_labels(name: str, uid: str, model_name: str, attempt: int) -> dict[str, str]:
    """The labels of a Job and its pods."""
    return {
        APP_LABEL: label_value(model_name),
        WORKLOAD_LABEL: label_value(name),
        WORKLOAD_UID_LABEL: label_value(uid),
        ATTEMPT_LABEL: str(attempt),
        CONTROLLER_LABEL: CONTROLLER_VALUE,
    }
