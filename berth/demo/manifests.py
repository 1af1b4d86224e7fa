"""The objects that the demo applies: a namespace, simulated nodes, and GPUWorkloads as a person would write them.

Everything simulated says so: in the nodes' labels (`stack.kwok`), in the workloads' environment and annotations.
"""

from __future__ import annotations

from typing import Any

from berth.demo.cut import Run
from berth.demo.trace import TraceNode
from crds.gpuworkload import API_VERSION, KIND
from stack.kwok import SimulatedNode

NAMESPACE = "openb"
MODEL_LABEL = "nvidia.com/gpu.product"
SIMULATED = "gpu.warp.dev/simulated"

# A failure is answered after a second instead of the usual thirty, for the demo ends within two minutes.
BACKOFF_SECONDS = 1
MAX_RETRIES = 1


def namespace() -> dict[str, Any]:
    """The namespace that holds all workloads of the demo."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": {SIMULATED: "true"}}}


def simulated_node(node: TraceNode) -> SimulatedNode:
    """The kwok node that stands for a node of the trace."""
    return SimulatedNode(
        name=node.name,
        gpus=node.gpus,
        gpu_model=node.model,
        cpu=node.cpu_milli // 1000,
        memory=node.memory_mib // 1024,
    )


def workload(run: Run) -> dict[str, Any]:
    """The GPUWorkload that stands for a pod of the trace.

    A pod that accepts several GPU models asks for the first of them, since a node selector knows no alternatives.
    """
    pod = run.pod
    env = [{"name": "SIMULATED_RUN", "value": f"{run.seconds:g}s"}]
    if run.fails:
        env.append({"name": "SIMULATED_EXIT", "value": str(run.fails)})
    spec: dict[str, Any] = {
        "modelName": f"openb/{pod.name}",
        "gpuCount": pod.gpus,
        "image": "simulated.invalid/openb:trace",
        "env": env,
        "resources": {"requests": {"cpu": f"{pod.cpu_milli}m", "memory": f"{pod.memory_mib}Mi"}},
        "retryPolicy": {"maxRetries": MAX_RETRIES, "backoffSeconds": BACKOFF_SECONDS},
    }
    if pod.gpu_models:
        spec["nodeSelector"] = {MODEL_LABEL: pod.gpu_models[0]}
    ends = "fails" if run.fails else "ends"
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": pod.name,
            "namespace": NAMESPACE,
            "annotations": {SIMULATED: f"{ends} after {run.seconds:g} s on a kwok node; {pod.seconds} s in the trace"},
        },
        "spec": spec,
    }
