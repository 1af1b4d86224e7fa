"""A cache's object as it is read, whatever stands in it."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from planning.caches.model import FINALIZER, FORCE_ANNOTATION, cache_view
from planning.caches.orders import CacheRef
from tests.planning.caches.test_cache_use import JSON

SPEC = {"ociImage": {"image": "registry.example/team/cache:v1"}}


def raw(**meta: Any) -> dict[str, Any]:
    metadata = {"name": "llama", "namespace": "ns", "uid": "u", "resourceVersion": "7", "generation": 2, **meta}
    return {"kind": "TritonKernelCache", "metadata": metadata, "spec": SPEC}


def test_a_cache_and_one_of_the_cluster() -> None:
    view = cache_view(raw())
    assert view.ref == CacheRef("TritonKernelCache", "ns", "llama", "u")
    assert (view.generation, view.resource_version) == (2, "7")
    assert not (view.deleting or view.finalizer or view.forced)
    assert view.spec is not None and view.problem == ""
    spec = {"ociImage": {**SPEC["ociImage"], "pullSecret": "s", "pullSecretNamespace": "other"}}
    whole = cache_view({**raw(namespace=None), "kind": "TritonKernelCacheCluster", "spec": spec})
    assert (whole.ref.kind, whole.ref.namespace) == ("TritonKernelCacheCluster", "")
    assert whole.spec is not None
    assert cache_view({**raw(), "spec": spec}).spec is None, "which Secret is not for a namespace to say"


def test_who_else_holds_it_is_kept_apart() -> None:
    view = cache_view(raw(deletionTimestamp="now", finalizers=["example.com/other", FINALIZER]))
    assert (view.deleting, view.finalizer, view.other_finalizers) == (True, True, ("example.com/other",))


def test_only_true_forces() -> None:
    for value, forced in (("true", True), ("false", False), ("", False), ("True", False)):
        assert cache_view(raw(annotations={FORCE_ANNOTATION: value})).forced is forced


def test_a_spec_that_cannot_be_read_says_why() -> None:
    view = cache_view({**raw(), "spec": {"ociImage": {}}})
    assert view.spec is None and "spec.ociImage.image" in view.problem


@given(JSON, JSON, JSON)
def test_nothing_raises(whole: Any, metadata: Any, spec: Any) -> None:
    cache_view(whole)
    cache_view({"kind": "TritonKernelCacheCluster", "metadata": metadata, "spec": spec, "status": spec})
    for key in ("finalizers", "annotations", "generation", "uid"):
        cache_view({"metadata": {key: metadata}})
