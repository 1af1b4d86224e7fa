"""Which nodes take a request, and the sentence a person reads when none does."""

from __future__ import annotations

import pytest

from planning.capacity import Room
from planning.filters import (
    Constraints,
    Requirement,
    Shape,
    TolerationView,
    able_when_empty,
    explain_never,
    explain_now,
    lacking,
    matches,
    refusal,
    tolerates,
)
from planning.model import NodeView, Resources
from tests.planning.builders import GIB, node, taint

FREE = Constraints()


def shape(gpus: int = 1, cpu: int = 0, memory: int = 0, constraints: Constraints = FREE) -> Shape:
    return Shape(Resources(gpus, cpu, memory, 1), constraints)


def left(nodes: list[NodeView], gpus: int | None, cpu: int | None) -> dict[str, Room]:
    return {
        n.name: Room(
            n.allocatable.gpus if gpus is None else gpus, n.allocatable.cpu_milli if cpu is None else cpu,
            n.allocatable.memory, n.allocatable.pods,
        )
        for n in nodes
    }  # fmt: skip


def why_not(wanted: Shape, nodes: list[NodeView], gpus: int | None = None, cpu: int | None = None) -> str:
    refusals = [refusal(wanted.constraints, n) for n in nodes]
    return explain_now(wanted, nodes, left(nodes, gpus, cpu), refusals)


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (TolerationView("", "Exists", "", ""), True),
        (TolerationView("k", "Exists", "", ""), True),
        (TolerationView("k", "Exists", "", "NoSchedule"), True),
        (TolerationView("k", "Exists", "", "NoExecute"), False),
        (TolerationView("k", "Equal", "v", ""), True),
        (TolerationView("k", "", "v", ""), True),
        (TolerationView("k", "Equal", "w", ""), False),
        (TolerationView("other", "Exists", "", ""), False),
    ],
)
def test_tolerations(toleration: TolerationView, tolerated: bool) -> None:
    assert tolerates([toleration], taint("k", value="v")) is tolerated


@pytest.mark.parametrize(
    ("operator", "values", "matched"),
    [
        ("In", ("a", "b"), True), ("In", ("c",), False), ("NotIn", ("a",), False), ("NotIn", ("c",), True),
        ("Exists", (), True), ("DoesNotExist", (), False), ("Gt", ("1",), False), ("Unknown", ("a",), False),
    ],
)  # fmt: skip
def test_expressions_on_labels(operator: str, values: tuple[str, ...], matched: bool) -> None:
    assert matches(Requirement("zone", operator, values), node("n", labels={"zone": "a"})) is matched


def test_expressions_on_numbers_absent_labels_and_fields() -> None:
    view = node("n", labels={"memory": "80"})
    assert matches(Requirement("memory", "Gt", ("79",)), view) and not matches(
        Requirement("memory", "Gt", ("80",)), view
    )
    assert matches(Requirement("memory", "Lt", ("81",)), view) and not matches(
        Requirement("memory", "Gt", ("x",)), view
    )
    assert matches(Requirement("zone", "NotIn", ("a",)), view) and matches(
        Requirement("zone", "DoesNotExist", ()), view
    )
    assert not matches(Requirement("zone", "Gt", ("1",)), view)
    assert matches(Requirement("metadata.name", "In", ("n",), True), view)
    assert not matches(Requirement("metadata.name", "NotIn", ("n",), True), view)
    assert not matches(Requirement("metadata.namespace", "In", ("n",), True), view)


def test_why_a_node_does_not_take_a_request() -> None:
    zone = Constraints(selector=(("zone", "a"),))
    assert refusal(FREE, node("n")) == ""
    assert refusal(zone, node("n")) == "not matched by its nodeSelector"
    assert refusal(Constraints(affinity=()), node("n")) == "not matched by its node affinity"
    assert refusal(Constraints(affinity=((),)), node("n")) == "not matched by its node affinity"
    assert refusal(FREE, node("n", ready=False)) == "not ready"
    assert refusal(FREE, node("n", unschedulable=True)) == "cordoned"
    assert refusal(FREE, node("n", taints=(taint("dedicated", value="x"),))) == "tainted dedicated=x:NoSchedule"
    assert refusal(FREE, node("n", taints=(taint("k", "PreferNoSchedule"),))) == ""
    assert refusal(FREE, node("n", taints=(taint("node.kubernetes.io/out-of-service"),))) == "out of service"


def test_what_a_node_lacks() -> None:
    whole = Resources(4, 1000, GIB, 10)
    assert lacking(Resources(4, 1000, GIB, 10), whole) == ""
    assert lacking(Resources(5), whole) == "GPUs" and lacking(Resources(1, 1001), whole) == "CPU"
    assert lacking(Resources(1, 1, GIB + 1), whole) == "memory" and lacking(Resources(1, 1, 1, 11), whole) == "pods"


def test_unready_and_cordoned_nodes_may_come_back() -> None:
    assert able_when_empty(shape(8), node("n", ready=False))
    assert able_when_empty(shape(8), node("n", unschedulable=True, taints=(taint("node.kubernetes.io/unschedulable"),)))
    assert able_when_empty(shape(8), node("n", gpus=0, gpus_expected=8))
    assert not able_when_empty(shape(8), node("n", gpus=4))
    assert not able_when_empty(shape(1), node("n", taints=(taint("dedicated"),)))
    assert not able_when_empty(shape(1, cpu=65_000), node("n"))


def test_never_is_explained() -> None:
    small = [node(f"n{i}", gpus=4) for i in range(3)]
    assert explain_never(shape(8), small) == "no node has 8 GPUs; the largest has 4"
    assert explain_never(shape(1), []) == "there is no node in the cluster; it needs 1 GPU"
    zone = Constraints(selector=(("zone", "a"),))
    assert explain_never(shape(1, constraints=zone), small) == "none of 3 nodes is matched by its nodeSelector"
    tainted = [node(f"t{i}", taints=(taint("dedicated", value="x"),)) for i in range(2)]
    message = explain_never(shape(1), tainted)
    assert message == "all 2 nodes that could be meant carry a taint it does not tolerate: 2 dedicated=x:NoSchedule"
    assert explain_never(shape(8), small + tainted) == (
        "no node has 8 GPUs; the largest of the 3 nodes it may use (2 tainted) has 4"
    )
    assert explain_never(shape(1, cpu=96_000), small) == (
        "3 of 3 nodes have 1 GPU, but none has enough CPU even when empty: it needs 96 CPU, the largest has 64 CPU"
    )
    gap = [node("g", gpus=0, gpu_gap="label nvidia.com/gpu.present=true but no GPU is registered")]
    assert "no GPU is registered" in explain_never(shape(1), gap)


def test_not_now_is_explained() -> None:
    nodes = [node(f"big{i}", gpus=4) for i in range(12)] + [node(f"small{i}", gpus=2) for i in range(188)]
    message = why_not(shape(4), nodes, gpus=3)
    assert message == "needs 4 GPUs on one node; 12 of 200 nodes have 4, none has 4 free now"
    some = [node("a", ready=False), node("b", unschedulable=True), node("c"), node("d", taints=(taint("x"),))]
    assert why_not(shape(1), some, gpus=0) == (
        "needs 1 GPU on one node; 4 of 4 nodes have 1, none can take it now: "
        "1 cordoned, 1 not ready, 1 short of free GPUs, 1 tainted x:NoSchedule"
    )
    busy = [node("a")]
    assert why_not(shape(1, cpu=1), busy, cpu=0).endswith("none can take it now: 1 short of free CPU")
    gap = [node("a", gpus=0, gpus_expected=8, gpu_gap="capacity shows 8 GPUs but allocatable 0")]
    assert "1 capacity shows 8 GPUs but allocatable 0" in why_not(shape(1), gap)
