"""The controller's rights: as many as it uses."""

from __future__ import annotations

from pathlib import Path

import yaml

MANIFEST = Path(__file__).parents[2] / "deploy" / "rbac" / "berth.yaml"


def test_the_lease_is_never_replaced() -> None:
    roles = [r for r in yaml.safe_load_all(MANIFEST.read_text()) if r["metadata"]["name"] == "berth-leader"]
    rules = next(role["rules"] for role in roles if role["kind"] == "Role")
    assert {verb for rule in rules for verb in rule["verbs"]} == {"create", "get", "patch"}


def test_requests_are_made_by_the_worker_alone_and_never_changed() -> None:
    rules = {
        role["metadata"]["name"]: role["rules"]
        for role in yaml.safe_load_all(MANIFEST.read_text())
        if role["kind"] == "ClusterRole"
    }

    def verbs(account: str, resource: str) -> set[str]:
        return {verb for rule in rules[account] if resource in rule["resources"] for verb in rule["verbs"]}

    assert verbs("berth-controller", "provisioningrequests") == {"list", "watch"}
    assert verbs("berth-worker", "provisioningrequests") == {"list", "create", "delete"}
    assert verbs("berth-worker", "podtemplates") == {"create", "delete"}
