"""Kernels and GPUs: spellings of the same target, mixed nodes, which image of an index a node takes, and why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.caches.compatibility import (
    GPU,
    MESSAGE,
    Target,
    Variant,
    choose,
    compatible,
    on_node,
    target,
    target_of,
)

H100 = GPU("GPU-0", "NVIDIA H100", "cuda", "90", 32, "590.48.01")
A100 = GPU("GPU-1", "NVIDIA A100", "cuda", "80", 32, "590.48.01")
MI210 = GPU("card0", "AMD Instinct MI210", "rocm", "gfx90a:sramecc+:xnack-", 64, "6.12.10")
RADEON = GPU("card1", "AMD Radeon PRO W7900", "hip", "gfx1100", 32, "6.12.10")

targets = st.builds(
    Target, st.sampled_from(["cuda", "hip"]), st.sampled_from(["80", "90", "gfx90a"]), st.sampled_from([32, 64])
)
gpus = st.sampled_from([H100, A100, MI210, RADEON, GPU("x", "?", "", "?", 0, "")])


@pytest.mark.parametrize(
    ("backend", "arch", "warp", "same"),
    [
        ("cuda", 90, 32, Target("cuda", "90", 32)),
        ("CUDA", "sm_90", 32, Target("cuda", "90", 32)),
        ("cuda", "sm_90a", 32, Target("cuda", "90", 32)),
        ("cuda", "100f", 32, Target("cuda", "100", 32)),
        ("rocm", "gfx942", 64, Target("hip", "gfx942", 64)),
        ("hip", "gfx90a:sramecc+:xnack-", 64, Target("hip", "gfx90a", 64)),
        ("hpu", "gaudi3", 1, Target("hpu", "gaudi3", 1)),
        ("cuda", "", 32, None),
        ("cuda", "gfx90a", 32, None),
        ("cuda", "unknown", 32, None),
        pytest.param("cuda", 10**5000, 32, None, id="too long to be written"),
        ("cuda", True, 32, None),
        ("cuda", 90, 0, None),
        ("cuda", 90, True, None),
        ("cuda", 90, 2**70, None),
        ("", 90, 32, None),
        ("a b", 90, 32, None),
        (None, 90, 32, None),
    ],
)
def test_one_spelling_for_each_target(backend: object, arch: object, warp: object, same: Target | None) -> None:
    assert target(backend, arch, warp) == same


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["backend", "arch", "warp_size"]), inner),
    max_leaves=6,
)


@given(json_values)
def test_no_json_is_too_odd(raw: object) -> None:
    found = target_of(raw)
    assert found is None or target(found.backend, found.arch, found.warp_size) == found, "its own spelling is kept"


def test_a_gpu_with_32_lanes_runs_what_was_compiled_for_32() -> None:
    """AMD's RDNA has warps of 32: tools that take 64 for every GPU of AMD's never find it compatible."""
    assert compatible([RADEON], [Target("hip", "gfx1100", 32)])[0].compatible
    (verdict,) = compatible([RADEON], [Target("hip", "gfx1100", 64)])
    assert not verdict.compatible
    assert verdict.message == "it is hip gfx1100 with warps of 32, the kernels are for hip gfx1100 with warps of 64"


def test_rocm_and_hip_are_one_backend() -> None:
    assert compatible([MI210], [Target("hip", "gfx90a", 64)])[0].compatible


def test_each_gpu_of_a_mixed_node_gets_its_own_verdict() -> None:
    """Not only GPU 0 counts, and one that fits does not speak for the others."""
    verdicts = compatible([H100, A100], [Target("cuda", "80", 32)])
    assert [each.compatible for each in verdicts] == [False, True]
    fits, told = on_node(verdicts)
    assert fits and told == (
        "1 of 2 GPUs can run the kernels. GPU GPU-0 (NVIDIA H100) cannot: it is cuda sm_90 with warps of 32, the "
        "kernels are for cuda sm_80 with warps of 32."
    )
    assert on_node(compatible([H100], [Target("cuda", "80", 32)]))[0] is False
    assert on_node([]) == (False, "The node has no GPU.")
    assert on_node(compatible([H100], [Target("cuda", "90", 32)])) == (True, "Its GPU can run them.")


def test_what_is_not_known_is_not_compatible() -> None:
    odd = GPU("0", "?", "cuda", "?", 32, "")
    (verdict,) = compatible([odd], [Target("cuda", "90", 32)])
    assert not verdict.compatible and "berth does not know" in verdict.message
    (verdict,) = compatible([H100], [])
    assert not verdict.compatible and "does not say" in verdict.message


@given(st.lists(gpus, max_size=8), st.lists(targets, max_size=30))
def test_a_verdict_for_each_gpu_and_a_reason_for_each_no(node: list[GPU], wanted: list[Target]) -> None:
    verdicts = compatible(node, wanted)
    assert [each.gpu for each in verdicts] == node
    for each in verdicts:
        assert each.compatible == (each.gpu.target in wanted)
        assert bool(each.message) != each.compatible and len(each.message) <= MESSAGE
    assert on_node(verdicts)[0] == any(each.compatible for each in verdicts)


@given(st.lists(gpus, max_size=8), st.lists(targets, max_size=5))
def test_an_image_is_chosen_that_serves_the_most_gpus(node: list[GPU], wanted: list[Target]) -> None:
    variants = [Variant(f"sha256:{number:064x}", 1, each) for number, each in enumerate(wanted)]
    chosen, why = choose(variants, node)
    served = [sum(each.compatible for each in compatible(node, [variant.target])) for variant in variants]
    if chosen is None:
        assert why and not any(served)
    else:
        assert not why and served[variants.index(chosen)] == max(served) > 0
        assert variants.index(chosen) == served.index(max(served)), "the first among equals, on every node alike"


def test_why_no_image_of_an_index_fits() -> None:
    variants = [Variant("sha256:" + "0" * 64, 1, Target("cuda", "80", 32))]
    assert choose(variants, [H100]) == (
        None,
        "The index has images for cuda sm_80 with warps of 32; the node has cuda sm_90 with warps of 32.",
    )
    assert choose([], [H100])[1] == "The index names no image with the GPU that it is for."
    assert choose(variants, [])[1] == "The node has no GPU."
