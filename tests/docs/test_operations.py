"""Holds docs/operations.md against the code: metrics, settings, and the name of the deployment."""

from __future__ import annotations

from crds.settings import Settings
from tests.docs.offered import default, fields, metrics
from tests.docs.pages import OPERATIONS, read, rows


def test_the_metrics_table_is_what_is_exported() -> None:
    table = rows(OPERATIONS, "Metrics")
    assert {name: cells[0] for name, cells in table.items()} == metrics()


def test_the_settings_table_is_complete() -> None:
    table = rows(OPERATIONS, "Settings")
    assert set(table) == {name for name, _ in fields(Settings)}
    for name, field in fields(Settings):
        if name != "defaultArgs":  # a line of shell, described in words
            assert table[name][0] == default(field), name


def test_the_deployment_name_is_right() -> None:
    from berth.version import DEPLOYMENT

    text = read(OPERATIONS)
    assert f"--name {DEPLOYMENT}" in text and f"--deployment-name {DEPLOYMENT} " in text
