"""The settings as they are read, whatever stands in the ConfigMap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.settings import SETTINGS_KEY, Settings
from planning.settings import read_settings
from tests.planning.caches.test_cache_use import JSON


def test_what_is_not_set_has_its_default() -> None:
    for data in (None, {}, {"other.yaml": "x: 1"}, {SETTINGS_KEY: ""}, {SETTINGS_KEY: "# nothing"}):
        assert read_settings(data) == (Settings(), "")
    settings, problem = read_settings({SETTINGS_KEY: "verifyEnabled: false"})
    assert settings == Settings(verify_enabled=False) and problem == ""


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("a: [", "settings.yaml is not YAML: "),
        ("a: 2026-99-99", "settings.yaml is not YAML: month must be in 1..12"),
        ("[" * 5000, "settings.yaml is not YAML: "),
        ("[1]", "settings.yaml: must be a mapping"),
        ("verifyEnabled: perhaps", "settings.yaml.verifyEnabled: "),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(written: str, told: str) -> None:
    settings, problem = read_settings({SETTINGS_KEY: written})
    assert settings is None and "\n" not in problem
    assert problem.startswith(f"ConfigMap berth-system/berth-settings cannot be used: {told}")


@given(data=JSON | st.fixed_dictionaries({SETTINGS_KEY: st.text() | JSON}))
def test_nothing_raises(data: object) -> None:
    settings, problem = read_settings(data)
    assert (settings is None) == bool(problem)
