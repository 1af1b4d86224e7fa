"""Simulated GPUs, and the fingerprint of what a node has."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.hardware.provider import MOST_TEXT, Provider, fingerprint, said
from nodeworkers.hardware.simulated import MOST, PRODUCTS, Simulated, simulated_gpus
from planning.caches.compatibility import GPU, Target

A = GPU("a", "H100", "cuda", "90", 32, "590")
B = GPU("b", "MI210", "hip", "gfx90a", 64, "6.10.5")

# --- simulated -----------------------------------------------------------------------------------------------------


def test_simulated_gpus_say_so() -> None:
    provider: Provider = Simulated("2xMI210, 1xh100")
    assert provider.simulated
    assert provider.gpus() == (
        GPU("simulated-0", "MI210", "hip", "gfx90a", 64, "simulated"),
        GPU("simulated-1", "MI210", "hip", "gfx90a", 64, "simulated"),
        GPU("simulated-2", "H100", "cuda", "90", 32, "simulated"),
    )


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_is_one_that_kernels_can_be_for(product: str) -> None:
    (gpu,) = simulated_gpus(f"1x{product}")
    assert gpu.target == Target(*PRODUCTS[product])


@pytest.mark.parametrize("text", ["", "H100", "0xH100", "-1xH100", "2xV100", "2xH100,", "99999999999xH100", "٢xH100"])
def test_what_names_none_is_told_with_the_products(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no simulated GPUs.* A100, H100, H200, L4, L40S, MI210, MI300X, T4"):
        Simulated(text)


def test_a_node_has_so_many_at_most() -> None:
    assert len(simulated_gpus(f"{MOST}xT4")) == MOST
    with pytest.raises(ValueError, match="are 65 simulated GPUs; a node has at most 64"):
        simulated_gpus(f"{MOST}xT4,1xL4")


@given(st.text() | st.from_regex(r"[0-9]{1,3}x(H100|L4)(,[0-9]{1,3}x(T4|V100))?", fullmatch=True))
def test_whatever_the_text_it_is_gpus_or_a_sentence(text: str) -> None:
    try:
        gpus = simulated_gpus(text)
    except ValueError as error:
        sentence = str(error)
    else:
        sentence = "."
        assert [gpu.id for gpu in gpus] == [f"simulated-{index}" for index in range(len(gpus))] and gpus
    assert sentence.endswith(".")


# --- what is told --------------------------------------------------------------------------------------------------

gpus = st.builds(
    GPU,
    st.text(),
    st.text(),
    st.sampled_from(["cuda", "hip"]),
    st.text(),
    st.integers(0, 64),
    st.sampled_from(["1", "2"]),
)


@given(st.lists(gpus, max_size=6), st.randoms())
def test_equal_hardware_has_one_fingerprint_in_any_order(found: list[GPU], chance: random.Random) -> None:
    other = list(found)
    chance.shuffle(other)
    assert fingerprint(found) == fingerprint(other)
    assert len(fingerprint(found)) == 16


@given(st.lists(gpus, max_size=4), st.lists(gpus, max_size=4))
def test_different_hardware_has_another(one: list[GPU], other: list[GPU]) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (sorted(map(repr, one)) == sorted(map(repr, other)))


@pytest.mark.parametrize("changed", [{"driver": "591"}, {"id": "c"}, {"arch": "100"}, {"warp_size": 64}])
def test_whatever_changes_counts(changed: dict[str, object]) -> None:
    assert fingerprint([replace(A, **changed), B]) != fingerprint([A, B])  # type: ignore[arg-type]
    assert fingerprint([A]) != fingerprint([A, A])


def test_a_fingerprint_stays_the_same_over_releases() -> None:
    """Nodes tell of it when it changes: an upgrade of berth is no change of hardware."""
    assert fingerprint([A, B]) == "e39c5286a0e6cf32"


@given(st.text() | st.text(alphabet="\u2028\n\t \ud800x", max_size=300))
def test_what_a_driver_says_is_one_short_line(text: str) -> None:
    told = said(text)
    assert told.isprintable() and len(told) <= MOST_TEXT and told == told.strip()
    assert said(told) == told
