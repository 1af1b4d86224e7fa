"""Jobs as planning writes them, before a real kube-apiserver: it takes them, and they read back as they were meant."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from crds.settings import Settings
from planning.jobs import examination_manifest, job_manifest, resumed, shape_of
from planning.model import Assignment, Stopped, Turn, WorkloadView
from planning.naming import ATTEMPT_LABEL, BACKFILL_ANNOTATION, job_name
from planning.views import job_view, pod_view, workload_view
from stack import Stack

pytestmark = pytest.mark.stack
SETTINGS = Settings()


@pytest.fixture(scope="module")
def namespace(stack: Stack) -> Iterator[str]:
    name = f"jobs-{uuid.uuid4().hex[:8]}"
    stack.kubectl("create", "namespace", name)
    yield name
    stack.kubectl("delete", "namespace", name, "--wait=false")


def workload(namespace: str, name: str, **spec: Any) -> WorkloadView:
    raw = {
        "metadata": {"name": name, "namespace": namespace, "uid": str(uuid.uuid4()), "resourceVersion": "1"},
        "spec": {"modelName": "meta-llama/Llama-2-70b" + "x" * 200, "gpuCount": 2, **spec},
    }
    view = workload_view(raw)
    assert view.spec is not None, view.invalid
    return view


def manifest(view: WorkloadView) -> dict[str, Any]:
    assert view.spec is not None
    turn = Turn(3, 1)
    assignment = Assignment(
        view.uid, view.namespace, view.name, 1, 1, turn, "node-1", shape_of(view.spec, SETTINGS).requests, "random",
        job_name(view.name, view.uid, turn.attempt, indexed=view.spec.replicas > 1),
        places=PLACES if view.spec.replicas > 1 else (),
    )  # fmt: skip
    return job_manifest(view, assignment, SETTINGS)


TEMPLATE = {
    "metadata": {"labels": {"team": "a"}},
    "spec": {
        "containers": [{"name": "a", "image": "b"}, {"name": "side", "image": "c"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
                }
            }
        },
    },
}
PLACES = (("node-1", 500), ("node-2", 12))
SPECS: list[dict[str, Any]] = [
    {},
    {"image": "a", "command": ["sh"], "args": ["-c", "exit 3"], "env": [{"name": "A", "value": ""}, {"name": "B"}]},
    {"resources": {"requests": {"cpu": "500m", "memory": 1073741824}, "limits": {"memory": "2Gi"}}},
    {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "x", "operator": "Exists"}, {"key": "y", "value": "z"}]},
    {"activeDeadlineSeconds": 60},
    {"template": TEMPLATE},
    {"replicas": 512, "template": TEMPLATE},
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["w", ".".join(["n" * 63] * 3 + ["n" * 61])])
def test_the_api_server_takes_every_job_and_it_reads_back(
    stack: Stack, namespace: str, spec: dict[str, Any], name: str
) -> None:
    wanted = manifest(workload(namespace, name, **spec))
    made = json.loads(
        stack.kubectl(
            "create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", stdin=json.dumps(wanted)
        )
    )
    read, meant = job_view(made, SETTINGS.gpu_resource), job_view(wanted, SETTINGS.gpu_resource)
    assert read is not None and meant is not None
    told = ("name", "workload_uid", "attempt", "retries", "node", "requests", "active_deadline", "strategy", "places")
    assert [getattr(read, key) for key in told] == [getattr(meant, key) for key in told]
    pod = pod_view({"metadata": {}, **made["spec"]["template"]}, SETTINGS.gpu_resource)
    assert pod is not None and pod.requests == read.requests and read.requests.gpus == 2


def test_a_stopped_job_is_let_go_on_elsewhere_once_its_controller_has_let_go_of_it(
    stack: Stack, namespace: str
) -> None:
    view = workload(namespace, "stopped", template=TEMPLATE, activeDeadlineSeconds=60)
    made = manifest(view)
    made["metadata"]["annotations"][BACKFILL_ANNOTATION] = "0"
    del made["metadata"]["ownerReferences"]  # there is none, and the garbage collector would find that out
    # The test is this Job's controller, and says what one does.
    made["spec"] |= {"managedBy": "example.com/test", "suspend": True}
    assert view.spec is not None
    requests, name = shape_of(view.spec, SETTINGS).requests, made["metadata"]["name"]
    place = Assignment(view.uid, namespace, view.name, 1, 1, Turn(4, 1), "node-2", requests, "fgd", f"{name}-next")
    shorter = replace(view, spec=view.spec.model_copy(update={"active_deadline_seconds": None}))
    stack.kubectl("create", "-f", "-", stdin=json.dumps(made))

    def patch(body: dict[str, Any], *more: str) -> dict[str, Any]:
        said = stack.kubectl(
            "patch", "job", name, "-n", namespace, "--type=merge", "-p", json.dumps(body), "-o=json", *more
        )
        raw: dict[str, Any] = json.loads(said)
        return raw

    def status(**told: Any) -> Stopped:
        raw = patch({"status": told}, "--subresource=status")
        return Stopped(name, raw["metadata"]["uid"], int(raw["metadata"]["resourceVersion"]))

    at = "2026-01-01T00:00:00Z"
    stopped = status(startTime=at, active=0)
    with pytest.raises(Exception, match="field is immutable"):
        patch(resumed(job_manifest(shorter, place, SETTINGS), stopped, 7.0))
    told = {"type": "Suspended", "status": "True", "lastTransitionTime": at}
    stopped = status(startTime=None, conditions=[told])
    changed = job_manifest(shorter, place, SETTINGS)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "another"
    with pytest.raises(Exception, match="field is immutable"):
        patch(resumed(changed, stopped, 7.0))
    with pytest.raises(Exception, match="the object has been modified"):
        patch(resumed(job_manifest(shorter, place, SETTINGS), replace(stopped, version=stopped.version - 1), 7.0))
    raw = patch(resumed(job_manifest(shorter, place, SETTINGS), stopped, 1e10))
    assert raw["spec"]["suspend"] is False and "activeDeadlineSeconds" not in raw["spec"]
    read = job_view(raw, SETTINGS.gpu_resource)
    assert read is not None and (read.uid, read.name) == (stopped.uid, name)
    assert (read.attempt, read.retries, read.node, read.strategy, read.backfill) == (4, 1, "node-2", "fgd", None)
    assert (read.preempted, read.resumed, read.created) == (False, True, 1e10)
    template = raw["spec"]["template"]
    assert template["metadata"]["labels"][ATTEMPT_LABEL] == "4"
    assert template["metadata"]["labels"]["batch.kubernetes.io/controller-uid"] == stopped.uid
    new = json.loads(
        stack.kubectl(
            "create", "--dry-run=server", "-o=json", "-f", "-", stdin=json.dumps(job_manifest(shorter, place, SETTINGS))
        )
    )
    assert template["spec"] == new["spec"]["template"]["spec"], "as a new Job's would be"


def test_a_template_is_examined_by_a_dry_run(stack: Stack, namespace: str) -> None:
    good = examination_manifest(workload(namespace, "good", template=TEMPLATE), SETTINGS)
    stack.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(good))
    bad = {"spec": {"containers": [{"name": "NOT a name", "image": "b"}]}}
    wrong = examination_manifest(workload(namespace, "bad", template=bad), SETTINGS)
    with pytest.raises(Exception, match="containers"):
        stack.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(wrong))
