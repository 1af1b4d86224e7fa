"""What a csi.tkm.io volume may ask for, and every reason for which a pod does not get a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.caches.volumes import (
    ATTRIBUTES,
    Admission,
    NodeCache,
    Refusal,
    VolumeRequest,
    admit,
    volume_request,
)

POD = {
    "csi.storage.k8s.io/ephemeral": "true",
    "csi.storage.k8s.io/pod.name": "server-0",
    "csi.storage.k8s.io/pod.namespace": "team-a",
    "csi.storage.k8s.io/pod.uid": "8f3c",
    "csi.storage.k8s.io/serviceAccount.name": "default",
}
DIGEST = "sha256:" + "ab" * 32
READY = NodeCache(
    uid="u1", kind="TritonKernelCache", namespace="team-a", name="llama", state="Ready", digest=DIGEST,
    mount_path="/home/app/.triton/cache", compatible=True,
)  # fmt: skip
CLUSTER = replace(READY, uid="u2", kind="TritonKernelCacheCluster", namespace="")


def wanted(read_only: bool = False, **attributes: str) -> VolumeRequest:
    request = volume_request({**POD, "kernel-name": "llama", **attributes}, read_only)
    assert isinstance(request, VolumeRequest), request
    return request


def refused(attributes: dict[str, str]) -> str:
    answer = volume_request({**POD, "kernel-name": "llama", **attributes}, False)
    assert isinstance(answer, Refusal)
    assert answer.code == "InvalidArgument"
    return answer.message


def test_what_is_left_out_has_a_meaning() -> None:
    assert wanted() == VolumeRequest("TritonKernelCache", "llama", "", False, "8f3c", "team-a", "server-0")
    assert wanted(scope="cluster").kind == "TritonKernelCacheCluster"
    assert wanted(mountPath="/cache").mount_path == "/cache"
    assert wanted(readOnly="true").read_only and wanted(read_only=True, readOnly="false").read_only


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        (
            {"kernelName": "llama"},
            "attribute 'kernelName', which csi.tkm.io does not know; there are kernel-name, scope",
        ),
        ({"csi.tkm.io/namespace": "team-b"}, "A pod mounts caches of its own namespace, or the cluster's."),
        ({"kernel-name": "../llama"}, "kernel-name says '../llama', which is no name"),
        ({"kernel-name": ""}, "kernel-name is missing"),
        ({"scope": "Cluster"}, "scope says 'Cluster'; it is namespace (default) or cluster"),
        ({"readOnly": "yes"}, "readOnly says 'yes'; it is true or false"),
        ({"mountPath": "cache"}, "mountPath says 'cache'; it must be the container's mountPath, an absolute path"),
        ({"mountPath": ""}, "mountPath says ''"),
        ({"mountPath": "/a/../b"}, "without empty parts, . or .."),
        ({"mountPath": "/a\nb"}, "must be the container's mountPath"),
        ({"csi.storage.k8s.io/ephemeral": "false"}, "serves inline volumes only"),
        ({"csi.storage.k8s.io/pod.uid": ""}, "needs podInfoOnMount: true"),
        ({"csi.storage.k8s.io/pod.namespace": ""}, "needs podInfoOnMount: true"),
    ],
)
def test_what_is_no_request_is_refused_by_name(attributes: dict[str, str], told: str) -> None:
    assert told in refused(attributes)


@given(
    st.dictionaries(st.sampled_from([*ATTRIBUTES, *POD]) | st.text(max_size=40), st.text(max_size=2000), max_size=12),
    st.booleans(),
)
def test_any_attributes_are_read_or_refused_with_a_short_sentence(attributes: dict[str, str], read_only: bool) -> None:
    for given_ in (attributes, {**POD, **attributes}, {**attributes, **POD, "kernel-name": "llama"}):
        answer = volume_request(given_, read_only)
        if isinstance(answer, Refusal):
            assert len(answer.message) < 512
            assert "\n" not in answer.message
        else:
            assert answer.mount_path == "" or answer.mount_path.startswith("/")
            assert isinstance(admit(answer, [READY, CLUSTER]), Admission | Refusal)


def test_a_pod_gets_the_cache_of_its_own_namespace_or_the_clusters() -> None:
    others = replace(READY, uid="u3", namespace="team-b", digest="sha256:" + "cd" * 32)
    assert admit(wanted(), [others, CLUSTER, READY]) == Admission(READY, "/home/app/.triton/cache")
    assert admit(wanted(scope="cluster"), [others, READY, CLUSTER]) == Admission(CLUSTER, "/home/app/.triton/cache")
    assert admit(wanted(mountPath="/cache"), [READY]) == Admission(READY, "/cache")


def answer(request: VolumeRequest, *caches: NodeCache) -> tuple[str, str]:
    found = admit(request, caches)
    assert isinstance(found, Refusal)
    return found.code, found.message


def test_another_namespaces_cache_is_as_if_it_were_not_there() -> None:
    others = replace(READY, namespace="team-b", state="Failed", reason="a secret of team-b's")
    code, told = answer(wanted(), others)
    assert (code, told) == answer(wanted())
    assert code == "NotFound"
    assert "TritonKernelCache team-a/llama is not known on this node" in told and "team-b" not in told


def test_a_namesake_of_the_whole_cluster_is_pointed_at() -> None:
    assert "which the attribute scope: cluster asks for" in answer(wanted(), CLUSTER)[1]
    assert answer(wanted(scope="cluster"), READY) == (
        "NotFound",
        "TritonKernelCacheCluster llama is not known on this node: it must exist, and its nodeSelector must take this "
        "node.",
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"state": "Pending", "reason": "extracting"}, "is not Ready on this node yet: extracting"),
        ({"state": "Pending"}, "is not Ready on this node yet."),
        ({"state": "Failed", "reason": "no signature"}, "is not Ready on this node: no signature"),
        ({"compatible": False, "reason": "sm_80, and the GPUs are sm_90"}, "does not fit the GPUs of this node: sm_80"),
        ({"compatible": False, "state": "Failed", "reason": "r"}, "does not fit the GPUs of this node: r"),
        ({"compatible": None}, "is not Ready on this node."),
        ({"digest": ""}, "is not Ready on this node."),
        ({"state": "Removing"}, "is being deleted"),
        ({"mount_path": ""}, "does not say where its kernels were compiled"),
    ],
)
def test_what_is_not_ready_and_compatible_is_refused_with_the_reason(changed: dict[str, Any], told: str) -> None:
    code, said = answer(wanted(), replace(READY, **changed))
    assert code == "FailedPrecondition"
    assert said.startswith("TritonKernelCache team-a/llama ") and told in said


@given(
    st.builds(
        NodeCache,
        uid=st.just("u"),
        kind=st.sampled_from(["TritonKernelCache", "TritonKernelCacheCluster"]),
        namespace=st.sampled_from(["", "team-a", "team-b"]),
        name=st.sampled_from(["llama", "other"]),
        state=st.sampled_from(["Pending", "Ready", "Failed", "Removing"]),
        digest=st.sampled_from(["", DIGEST]),
        mount_path=st.sampled_from(["", "/cache"]),
        compatible=st.sampled_from([None, True, False]),
        reason=st.text(max_size=3000),
    ),
    st.booleans(),
)
def test_only_what_is_ready_compatible_and_ones_own_is_ever_mounted(cache: NodeCache, cluster: bool) -> None:
    request = wanted(scope="cluster" if cluster else "namespace")
    found = admit(request, [cache])
    if isinstance(found, Admission):
        assert cache.state == "Ready" and cache.compatible and cache.digest and cache.name == "llama"
        assert cache.kind == request.kind and cache.namespace in ("", "team-a")
    else:
        assert len(found.message) < 1024
        assert not set(found.message) & {"\n", "\r", "\0"}
