"""What the worker's cache keeps of each object, and what equal objects share."""

from __future__ import annotations

import gc

from activities.cache import ByOwner, Specs
from planning.views import workload_view

SPEC = {"modelName": "m", "gpuCount": 1, "retryPolicy": {"maxRetries": 2, "backoffSeconds": 5}}


def test_equal_specs_are_one_object_whatever_the_order_of_their_keys() -> None:
    specs = Specs()
    first, second = specs.parse(SPEC), specs.parse(dict(reversed(SPEC.items())))
    assert first[0] is second[0] is not None
    other, _ = specs.parse({**SPEC, "gpuCount": 2})
    assert other is not None
    assert other.gpu_count == 2


def test_a_spec_that_is_refused_is_refused_every_time() -> None:
    specs = Specs()
    for _ in range(2):
        spec, invalid = specs.parse({"modelName": "m", "gpuCount": 9})
        assert spec is None
        assert "gpuCount" in invalid
    assert specs.parse(None) == (None, "spec: must be an object")


def test_a_bottomless_spec_is_refused_in_words() -> None:
    template: dict[str, object] = {}
    for _ in range(600):
        template = {"a": template}
    spec, invalid = Specs().parse({**SPEC, "template": template})
    assert spec is None
    assert "spec.template: must" in invalid


def test_of_another_namespace_nobody_can_pose_as_ones_own() -> None:
    mine: ByOwner[str] = ByOwner()
    mine.change(None, ("a", "u"), "1", "real")
    mine.change(None, ("b", "u"), "2", "forged")
    assert (mine.of(("a", "u")), mine.of(("b", "u")), mine.of(("c", "u"))) == (("real",), ("forged",), ())
    mine.change(("b", "u"), None, "2", None)
    assert mine.of(("b", "u")) == ()


def test_a_spec_goes_with_the_last_workload_that_has_it() -> None:
    specs = Specs()
    spec, _ = specs.parse(SPEC)
    assert len(specs._known) == 1
    del spec
    gc.collect()
    assert len(specs._known) == 0


def test_of_a_tombstone_little_is_kept() -> None:
    status = {"phase": "Failed", "message": "why", "conditions": [{"type": "Finished"}], "jobName": "j"}
    view = workload_view({"metadata": {"uid": "u"}, "spec": SPEC, "status": status})
    assert view.finished
    assert view.status == {"phase": "Failed", "message": "why"}
    going = workload_view({"metadata": {"uid": "u"}, "spec": SPEC, "status": {**status, "phase": "Running"}})
    assert going.status["jobName"] == "j"
