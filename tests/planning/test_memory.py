"""A memory of earlier rounds makes a round faster and changes nothing of what it decides."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from crds.settings import Settings
from planning.memory import Memory
from planning.model import Ledger, NodeView, WorkloadView
from planning.placement import decide
from planning.strategies import installed
from tests.planning.builders import SETTINGS, node, snapshot, workload

workloads = st.dictionaries(
    st.sampled_from([f"w{i}" for i in range(8)]),
    st.tuples(st.integers(1, 8), st.sampled_from(installed()), st.sampled_from(["T4", "H200", ""])),
)
nodes = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.tuples(st.integers(0, 8), st.sampled_from(["T4", "H200"]), st.booleans())
)


def made(
    wanted: dict[str, tuple[int, str, str]], there: dict[str, tuple[int, str, bool]]
) -> tuple[list[NodeView], list[WorkloadView]]:
    views = [
        workload(
            uid,
            gpus,
            spec={"schedulingStrategy": strategy}
            | ({"nodeSelector": {"nvidia.com/gpu.product": model}} if model else {}),
        )
        for uid, (gpus, strategy, model) in wanted.items()
    ]
    label = "nvidia.com/gpu.product"
    return [
        replace(node(name, gpus, labels={label: model}), ready=ready) for name, (gpus, model, ready) in there.items()
    ], views


@given(st.lists(st.tuples(workloads, nodes, st.integers(0, 9)), max_size=12))
def test_with_a_memory_each_round_decides_as_without(
    rounds: list[tuple[dict[str, tuple[int, str, str]], dict[str, tuple[int, str, bool]], int]],
) -> None:
    memory = Memory()
    for wanted, there, seed in rounds:
        seen = snapshot(*made(wanted, there))
        fresh = decide(seen, Ledger(), SETTINGS, limit=5, seed=seed)
        assert decide(seen, Ledger(), SETTINGS, limit=5, seed=seed, memory=memory) == fresh


def test_another_gpu_resource_is_not_taken_for_the_one_before() -> None:
    memory, view = Memory(), workload("w", 1)
    assert view.spec is not None
    for resource in ("nvidia.com/gpu", "amd.com/gpu"):
        settings = Settings.model_validate({"gpuResource": resource})
        memory.begin(settings)
        (toleration,) = memory.shape(view.spec, settings).constraints.tolerations
        assert toleration.key == resource
        memory.begin(settings)
        assert memory.shape(view.spec, settings) is memory.shape(view.spec, settings)
