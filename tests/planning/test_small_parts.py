"""Quantities, names, back-off and pod requests: exact, bounded and valid for every input."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.backoff import MAX_DELAY, delay
from planning.naming import job_name, label_value, workload_labels
from planning.podspecs import pod_requests
from planning.quantities import amount, milli, quantity, whole

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("8", 8), (8, 8), ("0", 0), ("500m", Decimal("0.5")), ("1.5", Decimal("1.5")), ("4Gi", 4 * 2**30),
        ("1k", 1000), ("1e3", 1000), ("1E", 10**18), ("1Ei", 2**60), ("12e-1", Decimal("1.2")),
        ("100n", Decimal("1e-7")),
        (".5", Decimal("0.5")), ("5.", 5), ("+3", 3), ("0.1", Decimal("0.1")),
    ],
)  # fmt: skip
def test_quantities_are_exact(text: object, exact: object) -> None:
    assert quantity(text) == exact


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1KiB", "Gi", "--1", "1e999999999", True, None, [], "١", "1" * 99])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        quantity(text)
    assert whole(text) == 0


def test_quantities_are_rounded_up_at_the_end_only() -> None:
    assert milli("1n") == 1 and whole("500m") == 1 and milli("0.1") == 100 and amount("cpu", "1.0001") == 1001
    assert whole("-5") == 0 and whole("9e99") == 2**63 - 1 and amount("memory", "1.5Ki") == 1536


@given(st.one_of(st.text(max_size=40), st.integers(), st.floats(), st.none(), st.lists(st.integers())))
def test_whole_never_raises(value: object) -> None:
    assert 0 <= whole(value) <= 2**63 - 1


@given(st.text(max_size=300), st.text(max_size=50), st.integers(0, 10**6))
def test_job_names_are_dns_labels(name: str, uid: str, attempt: int) -> None:
    assert DNS_LABEL.fullmatch(job_name(name, uid, attempt))


def test_job_names_tell_the_workload_and_differ_by_uid_and_attempt() -> None:
    uid = "0a1b2c3d-1111-2222-3333-444455556666"
    assert job_name("llama.v2", uid, 3) == "llama-v2-0a1b2c3d-3"
    assert job_name("n" * 253, uid, 10) == "n" * 51 + "-0a1b2c3d-10"
    assert job_name("a" * 50 + "--b", uid, 0) == "a" * 50 + "-0a1b2c3d-0"


@given(st.text(max_size=300))
def test_label_values_are_valid(value: str) -> None:
    assert LABEL_VALUE.fullmatch(label_value(value))


@given(st.lists(st.text(max_size=80), min_size=2, max_size=2, unique=True))
def test_different_names_keep_different_labels(pair: list[str]) -> None:
    assert label_value(pair[0]) != label_value(pair[1])


def test_labels_say_the_model_where_they_can() -> None:
    assert label_value("llama-2") == "llama-2"
    assert label_value("meta-llama/Llama-2").startswith("meta-llama-Llama-2-")
    assert workload_labels("w", "u", "m", 2)["gpu.warp.dev/attempt"] == "2"


@given(st.floats(1, 300), st.integers(-5, 10**6), st.floats(-1, 2))
def test_backoff_never_exceeds_300_s_in_all(base: float, attempt: int, jitter: float) -> None:
    assert 0 < delay(base, attempt, jitter) <= MAX_DELAY


def test_backoff_starts_at_the_base_and_doubles() -> None:
    assert [delay(30, attempt, 0.0) for attempt in range(5)] == [30, 60, 120, 240, 300]
    assert delay(30, 0, 0.5) == 31.5
    assert delay(300, 0, 0.999) == 300


def container(cpu: str = "0", **more: object) -> dict[str, object]:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def test_pod_requests_follow_the_scheduler() -> None:
    assert pod_requests({"containers": [container("1"), container("500m")]}) == {"cpu": 1500}
    # the largest init container, not the sum
    assert (
        pod_requests({"containers": [container("1")], "initContainers": [container("2"), container("3")]})["cpu"]
        == 3000
    )
    # sidecars go on beside the containers, and beside the init containers after them
    sidecar = container("1", restartPolicy="Always")
    assert pod_requests({"containers": [container("1")], "initContainers": [sidecar, container("3")]})["cpu"] == 4000
    assert pod_requests({"containers": [container("1")], "initContainers": [container("3"), sidecar]})["cpu"] == 3000
    assert pod_requests({"containers": [container("5")], "initContainers": [sidecar]})["cpu"] == 6000
    assert pod_requests({"containers": [container("1")], "overhead": {"cpu": "250m"}})["cpu"] == 1250
    # limits count where there is no request
    assert pod_requests({"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]}) == {"nvidia.com/gpu": 2}
    # requests of the pod as a whole stand for its containers
    assert pod_requests({"containers": [container("1")], "resources": {"requests": {"cpu": "8"}}})["cpu"] == 8000
