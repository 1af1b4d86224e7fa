"""What outlives berth gets no credentials of its."""

from __future__ import annotations

import pytest

from nodeworkers.seats.environment import outliving


def test_only_what_programs_need_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TEMPORAL_API_KEY", "AWS_SECRET_ACCESS_KEY", "KUBECONFIG"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    found = outliving()
    assert "secret" not in found.values()
    assert found["CUDA_MODULE_LOADING"] == "LAZY" and "PATH" in found
