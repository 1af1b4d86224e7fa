"""Whether pods will hit: what is compared, what wins, and that nothing unknown is called a hit or a miss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.kernelcache import Runtime
from planning.caches.compatibility import Target
from planning.caches.hits import Seen, build_key_digest, predict, ptxas_version
from planning.caches.labels import Packed

KEY = "3.9.0" + "-".join(f"{number:064x}" for number in (1, 2, 3))
PTXAS = (
    "ptxas: NVIDIA (R) Ptx optimizing assembler\nCopyright (c) 2005-2025 NVIDIA Corporation\n"
    "Built on Tue_May_27_02:24:01_PDT_2025\nCuda compilation tools, release 12.9, V12.9.86\n"
    "Build cuda_12.9.r12.9/compiler.36037853_0"
)
CUDA, HIP = Target("cuda", "90", 32), Target("hip", "gfx942", 64)
FULL = Packed("triton", (CUDA,), triton_key=KEY, triton_version="3.9.0", ptxas=PTXAS, environment={})
RUNTIME = Runtime(triton="3.9.0", ptxas="12.9.86")


def runtime(**given: object) -> Runtime:
    return Runtime.model_validate({"triton": "3.9.0", "ptxas": "12.9.86", **given})


def test_all_that_the_key_holds_agrees() -> None:
    assert predict(FULL, RUNTIME, None, None).hit is True
    exact = predict(FULL, runtime(triton=build_key_digest(KEY), ptxas=PTXAS[:256]), None, None)
    assert exact.hit is True, exact.message
    assert "its version, not its build" in predict(FULL, RUNTIME, None, None).message


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        ({"triton": "3.8.0"}, "TritonDiffers", "compiled by Triton 3.9.0, the pods have 3.8.0"),
        ({"triton": "sha256:" + "0" * 64}, "TritonDiffers", "another build"),
        ({"ptxas": "12.8.93"}, "PtxasDiffers", "ptxas 12.9.86, the pods have 12.8.93"),
        (
            {"environment": {"TRITON_DEFAULT_FP_FUSION": "0"}},
            "EnvironmentDiffers",
            "TRITON_DEFAULT_FP_FUSION was unset when the kernels were compiled and is 'false' now",
        ),
    ],
)
def test_one_difference_suffices(given: dict[str, object], reason: str, words: str) -> None:
    found = predict(FULL, runtime(**given), None, None)
    assert (found.hit, found.reason) == (False, reason) and words in found.message


@pytest.mark.parametrize(
    ("packed", "given"),
    [
        (replace(FULL, triton_key=None, triton_version=None), {}),
        (replace(FULL, triton_key=None), {"triton": build_key_digest(KEY)}),
        (replace(FULL, ptxas=None), {}),
        (replace(FULL, environment=None), {}),
        (FULL, {"triton": None}),
        (FULL, {"ptxas": None}),
        (replace(FULL, ptxas="unknown"), {}),
        (replace(FULL, kind="vllm"), {}),
        (Packed(), {}),
    ],
)
def test_what_is_not_said_is_unknown(packed: Packed, given: dict[str, object]) -> None:
    """A constant in place of a build that was not known would equal itself everywhere, and differ from the truth."""
    found = predict(packed, runtime(**given), None, None)
    assert found.hit is None and found.message


def test_a_known_difference_wins_over_what_is_not_known() -> None:
    assert predict(replace(FULL, triton_version=None, triton_key=None), runtime(ptxas="1.2"), None, None).hit is False


def test_the_version_may_be_read_from_the_key() -> None:
    found = predict(replace(FULL, triton_version=None), runtime(triton="3.8.0"), None, None)
    assert found.message == "The kernels were compiled by Triton 3.9.0, the pods have 3.8.0."


def test_kernels_for_amd_do_not_depend_on_ptxas() -> None:
    assert predict(replace(FULL, targets=(HIP,), ptxas=None), Runtime(triton="3.9.0"), None, None).hit is True


def test_what_pods_reported_wins() -> None:
    wrong = runtime(triton="1.0")
    assert predict(FULL, wrong, None, Seen(12, 0)).hit is True
    missed = predict(FULL, RUNTIME, None, Seen(10, 2))
    assert missed.hit is False and missed.message == "Pods found 10 of 12 kernels and compiled 2."
    assert predict(FULL, RUNTIME, None, Seen(0, 0)).reason == "RuntimeMatches", "no report is no report"


def test_variables_are_compared_as_triton_does() -> None:
    packed = replace(FULL, environment={"A": "1", "B": "off", "C": "x", "D": ""})
    assert predict(packed, runtime(environment={"A": "true", "B": "0", "C": "x"}), None, None).hit is True
    assert predict(packed, runtime(environment={"A": "true", "C": "x"}), None, None).hit is False, "off is not unset"


def test_a_path_that_cannot_be_rewritten_must_be_the_one_of_the_capture() -> None:
    triton = replace(FULL, capture_path="/a")
    assert predict(triton, RUNTIME, "/b", None).hit is True
    vllm = replace(triton, kind="vllm")
    assert predict(vllm, RUNTIME, "/b", None).reason == "PathDiffers"
    assert predict(vllm, RUNTIME, "/a", None).reason == predict(vllm, RUNTIME, None, None).reason == "FrameworkDecides"


@pytest.mark.parametrize(
    ("text", "version"), [(PTXAS, "12.9.86"), ("12.9.86", "12.9.86"), ("V12.8.93", "12.8.93"), ("none", None)]
)
def test_versions_of_ptxas(text: str, version: str | None) -> None:
    assert ptxas_version(text) == version


texts = st.none() | st.sampled_from(["3.9.0", "3.8.0", KEY, "V12.9.86", "sha256:" + "0" * 64]) | st.text(max_size=80)
environments = st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["", "1", "true", "x"]))


@given(
    st.builds(
        Packed,
        st.sampled_from(["triton", "vllm", None]),
        st.sampled_from([(), (CUDA,), (HIP,)]),
        triton_key=texts,
        triton_version=texts,
        ptxas=texts,
        environment=st.none() | environments,
        capture_path=st.none() | st.just("/a"),
    ),
    texts,
    texts,
    environments,
    st.sampled_from([None, "/a", "/b"]),
)
def test_there_is_always_an_answer_and_a_hit_needs_all(
    packed: Packed, triton: str | None, ptxas: str | None, environment: dict[str, str], path: str | None
) -> None:
    found = predict(packed, Runtime.model_construct(triton=triton, ptxas=ptxas, environment=environment), path, None)
    assert found.message
    if found.hit is True:
        assert packed.kind != "vllm" and packed.environment is not None and triton is not None
        assert packed.triton_key is not None or packed.triton_version is not None
    if found.hit is False:
        assert found.reason.endswith("Differs")
