"""Pods that mount a cache, as an ML engineer writes them, for tests under a real kubelet."""

from __future__ import annotations

from typing import Any

from stack.node_images import BUSYBOX
from tests.nodeworkers.csi_rig import CAPTURED

NODE = "node-1"  # the stack's real one


def pod(name: str, cache: str, script: str = "true", namespace: str = "team-a") -> dict[str, Any]:
    """One that runs `script` and stays: not root, a group for volumes, the cache where its kernels were compiled."""
    attributes = {"kernel-name": cache, "mountPath": CAPTURED}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "nodeName": NODE,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000},
            "containers": [
                {
                    "name": "c",
                    "image": BUSYBOX,
                    "command": ["sh", "-ec", f"{script}; sleep 100000"],
                    "volumeMounts": [{"name": "kernels", "mountPath": CAPTURED}],
                }
            ],
            "volumes": [{"name": "kernels", "csi": {"driver": "csi.tkm.io", "volumeAttributes": attributes}}],
        },
    }
