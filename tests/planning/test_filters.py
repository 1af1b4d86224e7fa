"""Which nodes take a request, and the sentence a person reads when none does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning.accelerators import AMD, SEAT
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
    shortage,
    tolerates,
)
from planning.model import Gap, NodeView, Resources
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
    assert refusal(zone, node("n")) == "not matched by its nodeSelector zone=a"
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
    assert able_when_empty(shape(8), node("n", gpus=0, gaps=(Gap(8, "its driver is not ready"),)))
    assert not able_when_empty(shape(8), node("n", gpus=4))
    assert not able_when_empty(shape(1), node("n", taints=(taint("dedicated"),)))
    assert not able_when_empty(shape(1, cpu=65_000), node("n"))


def test_never_is_explained() -> None:
    small = [node(f"n{i}", gpus=4) for i in range(3)]
    assert explain_never(shape(8), small) == "no node has 8 GPUs; the largest has 4"
    assert explain_never(shape(1), []) == "there is no node in the cluster; it needs 1 GPU"
    zone = Constraints(selector=(("zone", "a"),))
    assert explain_never(shape(1, constraints=zone), small) == "none of 3 nodes is matched by its nodeSelector zone=a"
    tainted = [node(f"t{i}", taints=(taint("dedicated", value="x"),)) for i in range(2)]
    message = explain_never(shape(1), tainted)
    assert message == "all 2 nodes that could be meant carry a taint it does not tolerate: 2 dedicated=x:NoSchedule"
    assert explain_never(shape(8), small + tainted) == (
        "no node has 8 GPUs; the largest of the 3 nodes it may use (2 tainted) has 4"
    )
    assert explain_never(shape(1, cpu=96_000), small) == (
        "3 of 3 nodes have 1 GPU, but none has enough CPU even when empty: it needs 96 CPU, the largest has 64 CPU"
    )
    gap = [node("g", gpus=0, gaps=(Gap(0, "label nvidia.com/gpu.present=true but no GPU is registered"),))]
    assert "no GPU is registered" in explain_never(shape(1), gap)


def test_gpu_memory_is_asked_of_each_gpu() -> None:
    small, large = node("s", gpu_memory=(("", 24_576),)), node("l", gpu_memory=(("", 81_559),))
    forty = Constraints(gpu_memory=40 * 1024)
    assert refusal(forty, small) == "with GPUs of 24 GiB (it needs 40 GiB)"
    assert refusal(forty, large) == ""
    assert refusal(forty, node("u")) == "whose labels do not tell their GPUs' memory (it needs 40 GiB)"
    assert refusal(forty, node("cpu", 0)) == "", "it has none of which the memory would matter"
    assert able_when_empty(shape(1, constraints=forty), large)
    assert not able_when_empty(shape(1, constraints=forty), small)
    assert why_not(shape(4, constraints=forty), [small, replace(small, name="t"), large], gpus=3) == (
        "needs 4 GPUs on one node; 3 of 3 nodes have 4, none can take it now: "
        "2 with GPUs of 24 GiB (it needs 40 GiB), 1 short of free GPUs"
    )
    assert explain_never(shape(1, constraints=forty), [small, small, node("u")]) == (
        "it needs GPUs of 40 GiB or more, but none of 3 nodes has such: "
        "2 with GPUs of 24 GiB, 1 whose labels do not tell their GPUs' memory"
    )
    assert explain_never(shape(1, constraints=forty), [small, node("cpu", 0)]) == (
        "it needs GPUs of 40 GiB or more, but none of 2 nodes has such: 1 with GPUs of 24 GiB"
    ), "one without any GPU has no such either"
    assert explain_never(shape(16, constraints=forty), [small, large]) == (
        "no node has 16 GPUs; the largest of the 1 node it may use (1 with too little GPU memory) has 8"
    )


def test_gpus_of_another_resource() -> None:
    mixed = node("m", allocatable=Resources.counting([("", 2), (AMD, 4)], 64_000, GIB, 110))
    amd = node("a", allocatable=Resources(2, 64_000, GIB, 110, gpu_resource=AMD))
    asks = Shape(Resources(4, pods=1, gpu_resource=AMD))
    assert able_when_empty(asks, mixed) and not able_when_empty(asks, amd) and not able_when_empty(asks, node("n"))
    assert lacking(asks.requests, mixed.allocatable) == "" and lacking(asks.requests, amd.allocatable) == "GPUs"
    assert explain_never(asks, [amd, node("n")]) == f"no node has 4 {AMD}; the largest has 2"
    assert explain_never(asks, [node("n")]) == f"no node offers {AMD}"
    left = {"m": Room(2, 64_000, GIB, 110, other_gpus=((AMD, 3),)), "a": Room(2, 64_000, GIB, 110, AMD)}
    assert explain_now(asks, [mixed, amd], left, ["", ""]) == (
        f"needs 4 {AMD} on one node; 1 of 2 nodes has 4, none has 4 free now"
    )
    assert shortage(asks.requests, mixed, left["m"]) == "short of free GPUs"
    assert shortage(asks.requests, amd, left["a"]) == f"too few {AMD}"
    assert shortage(asks.requests, node("n"), Room(8, 64_000, GIB, 110)) == f"no {AMD}"


def test_a_part_of_a_gpu_needs_seats() -> None:
    seat = Shape(Resources(1, pods=1, gpu_resource=SEAT))
    assert explain_never(seat, [node("n")]) == (
        f"no node offers seats on single GPUs ({SEAT}), and berth gives parts of GPUs only as seats: "
        "install seats, or ask for a whole GPU, without gpuFraction"
    )
    larger = Shape(Resources(1, pods=1, gpu_resource="kyb.ai/gpu-2x-seat"))
    assert explain_never(larger, [node("n")]) == "no node offers seats of that size (kyb.ai/gpu-2x-seat)"
    coming = node("n", 0, gaps=(Gap(3, "its seats are not there yet", SEAT),))
    assert able_when_empty(seat, coming) and not able_when_empty(shape(1), coming)
    assert shortage(seat.requests, coming, Room(0, 1, 1, 1)) == "its seats are not there yet"


def test_where_a_node_is_counts_by_its_labels() -> None:
    """Zones, GPU models, NVLink domains: what nodeSelector names is what is told."""
    domain = "nvidia.com/gpu.clique"
    asks = Constraints(selector=((domain, "d1.0"), ("topology.kubernetes.io/zone", "a")))
    near = node("n", labels={"topology.kubernetes.io/zone": "a", domain: "d1.0"})
    far = node("f", labels={"topology.kubernetes.io/zone": "b", domain: "d1.0"})
    assert refusal(asks, near) == ""
    assert refusal(asks, far) == "not matched by its nodeSelector topology.kubernetes.io/zone=a"
    assert refusal(asks, node("o")) == f"not matched by its nodeSelector {domain}=d1.0"


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
    gap = [node("a", gpus=0, gaps=(Gap(8, "capacity shows 8 GPUs but allocatable 0"),))]
    assert "1 capacity shows 8 GPUs but allocatable 0" in why_not(shape(1), gap)
