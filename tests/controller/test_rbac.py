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


def test_each_account_may_do_with_kernel_caches_what_it_does_and_no_more() -> None:
    documents = [*yaml.safe_load_all(MANIFEST.read_text())]
    rules = {each["metadata"]["name"]: each["rules"] for each in documents if each["kind"] == "ClusterRole"}

    def verbs(account: str, group: str = "tkm.io") -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for rule in rules[account]:
            if group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    found.setdefault(resource, set()).update(rule["verbs"])
        return found

    caches, statuses = ("tritonkernelcaches", "tritonkernelcacheclusters"), ("nodestatuses", "nodestatusclusters")
    on_nodes = tuple(f"tritonkernelcache{each}" for each in statuses)
    assert verbs("berth-controller") == {key: {"list", "watch"} for key in (*caches, "kernelcachepolicies")}
    assert verbs("berth-worker") == {
        **{key: {"get", "patch"} for key in caches},
        **{f"{each}/status": {"patch"} for each in caches},
        **{key: {"list", "watch"} for key in (*on_nodes, "kernelcachepolicies")},
    }
    assert verbs("berth-node") == {
        **{key: {"get"} for key in caches},
        "kernelcachepolicies": {"list"},
        **{key: {"get", "create", "delete"} for key in on_nodes},
        **{f"{each}/status": {"patch"} for each in on_nodes},
    }
    assert verbs("berth-worker", "storage.k8s.io") == {"csinodes": {"list", "watch"}}
    assert verbs("berth-worker", "")["nodes"] == {
        "get",
        "list",
        "watch",
        "patch",
    }  # labels alone: deploy/policies/nodes.yaml


def test_no_account_may_read_a_pull_secret_unless_it_was_granted() -> None:
    rules = [
        (each["metadata"]["name"], rule)
        for each in yaml.safe_load_all(MANIFEST.read_text())
        if each["kind"] in ("Role", "ClusterRole")
        for rule in each["rules"]
        if {"secrets", "*"} & set(rule["resources"])
    ]
    assert [name for name, _ in rules] == ["berth-webhooks"]
    assert rules[0][1]["resourceNames"] == ["berth-webhook-certificates"]


def test_a_node_gets_settings_by_name_and_no_more() -> None:
    documents = [*yaml.safe_load_all(MANIFEST.read_text())]
    roles = {each["metadata"]["name"]: each["rules"] for each in documents if each["kind"] == "Role"}
    bound = [
        each["roleRef"]["name"]
        for each in documents
        if each["kind"] == "RoleBinding" and "berth-node" in [subject["name"] for subject in each["subjects"]]
    ]
    assert [roles[name] for name in bound] == [[{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]]


def test_a_node_writes_events_and_does_no_more_with_them() -> None:
    """Which ones is held by deploy/policies/seats.yaml: tests/application/test_seat_services.py."""
    folder = MANIFEST.parent
    documents = [each for file in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]
    bound = {
        (each["roleRef"]["kind"], each["roleRef"]["name"])
        for each in documents
        if each["kind"].endswith("Binding") and "berth-node" in [subject["name"] for subject in each["subjects"]]
    }
    writing = [
        (each["kind"], each["metadata"].get("namespace"), rule["apiGroups"], rule["verbs"])
        for each in documents
        if (each["kind"], each["metadata"]["name"]) in bound
        for rule in each["rules"]
        if {"events", "*"} & set(rule["resources"])
    ]
    assert writing == [("ClusterRole", None, ["events.k8s.io"], ["create", "patch"])]
