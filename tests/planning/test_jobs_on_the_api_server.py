"""Jobs as planning writes them, before a real kube-apiserver: it takes them, and they read back as they were meant."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from crds.settings import Settings
from planning.jobs import examination_manifest, job_manifest, shape_of
from planning.model import Assignment, Turn, WorkloadView
from planning.naming import job_name
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
    read, meant = job_view(made), job_view(wanted)
    assert read is not None and meant is not None
    told = ("name", "workload_uid", "attempt", "retries", "node", "requests", "active_deadline", "strategy", "places")
    assert [getattr(read, key) for key in told] == [getattr(meant, key) for key in told]
    pod = pod_view({"metadata": {}, **made["spec"]["template"]}, SETTINGS.gpu_resource)
    assert pod is not None and pod.requests == read.requests and read.requests.gpus == 2


def test_a_template_is_examined_by_a_dry_run(stack: Stack, namespace: str) -> None:
    good = examination_manifest(workload(namespace, "good", template=TEMPLATE), SETTINGS)
    stack.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(good))
    bad = {"spec": {"containers": [{"name": "NOT a name", "image": "b"}]}}
    wrong = examination_manifest(workload(namespace, "bad", template=bad), SETTINGS)
    with pytest.raises(Exception, match="containers"):
        stack.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(wrong))
