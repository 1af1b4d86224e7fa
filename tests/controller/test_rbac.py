"""The controller's rights: as many as it uses."""

from __future__ import annotations

from pathlib import Path

import yaml

MANIFEST = Path(__file__).parents[2] / "deploy" / "rbac" / "berth.yaml"


def test_the_lease_is_never_replaced() -> None:
    roles = [r for r in yaml.safe_load_all(MANIFEST.read_text()) if r["metadata"]["name"] == "berth-leader"]
    rules = next(role["rules"] for role in roles if role["kind"] == "Role")
    assert {verb for rule in rules for verb in rule["verbs"]} == {"create", "get", "patch"}
