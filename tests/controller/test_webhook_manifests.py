"""deploy/webhooks: berth's own kinds and nothing else, and nobody waits for berth to write."""

from __future__ import annotations

from typing import Any

import pytest

from berth.install import manifests, webhook_manifests
from controller.webhooks.keeper import CONFIGURATIONS
from controller.webhooks.material import SECRET_NAME, SECRET_NAMESPACE
from controller.webhooks.server import READ_SECONDS
from controller.webhooks.service import DEFAULT, PREFER_GROUP, VALIDATE
from crds.gpuworkload import GROUP, KIND
from crds.kernelcache import GROUP as CACHES
from kube.resources import KNOWN
from planning.admission import checked
from planning.devices.prefer_group import ANNOTATION

FOUND = {manifest["kind"]: manifest for manifest in manifests("webhooks")}
PATHS = {"ValidatingWebhookConfiguration": VALIDATE, "MutatingWebhookConfiguration": DEFAULT}


# The one that is about everybody's pods, and makes something.
PODS = "prefer-group.kyb.ai"


def hooks(kind: str) -> list[dict[str, Any]]:
    """Those that are about berth's own kinds."""
    return [hook for hook in FOUND[kind]["webhooks"] if hook["name"] != PODS]


@pytest.mark.parametrize("kind", PATHS)
def test_a_configuration_is_harmless(kind: str) -> None:
    assert FOUND[kind]["metadata"] == {"name": CONFIGURATIONS}
    for hook in hooks(kind):
        assert hook["failurePolicy"] == "Ignore"
        assert hook["sideEffects"] == "None"
        assert hook["matchPolicy"] == "Equivalent"
        assert hook["timeoutSeconds"] == READ_SECONDS
        assert hook["clientConfig"]["service"]["path"] == PATHS[kind]
        (group,) = {group for rule in hook["rules"] for group in rule["apiGroups"]}
        assert hook["name"].endswith(f".{group}"), "its name stands before every refusal"
        assert group in (GROUP, CACHES)
        assert {operation for rule in hook["rules"] for operation in rule["operations"]} <= {"CREATE", "UPDATE"}


def test_no_kind_is_asked_about_for_a_write_that_leaves_the_spec_alone() -> None:
    for hook in FOUND["ValidatingWebhookConfiguration"]["webhooks"]:
        (condition,) = hook["matchConditions"]
        assert condition["expression"] == "request.operation == 'CREATE' || object.spec != oldObject.spec"


def test_of_pods_only_those_are_asked_about_that_prefer_a_group_and_none_waits_for_the_answer() -> None:
    (hook,) = [each for each in FOUND["MutatingWebhookConfiguration"]["webhooks"] if each["name"] == PODS]
    (condition,) = hook["matchConditions"]
    assert ANNOTATION in condition["expression"]
    assert (hook["failurePolicy"], hook["sideEffects"]) == ("Ignore", "NoneOnDryRun")
    assert hook["clientConfig"]["service"]["path"] == PREFER_GROUP and hook["timeoutSeconds"] == READ_SECONDS
    (rule,) = hook["rules"]
    assert (rule["resources"], rule["operations"]) == (["pods"], ["CREATE"])


def test_they_ask_about_the_kinds_that_are_checked_or_filled_in_and_no_subresource() -> None:
    kinds = {(resource.group, resource.plural): resource.kind for resource in KNOWN.values()}
    asked = {
        kind: {
            (group, kinds[group, plural])
            for hook in hooks(kind)
            for rule in hook["rules"]
            for group in rule["apiGroups"]
            for plural in rule["resources"]
        }
        for kind in PATHS
    }
    known = {(group, kind) for (group, _), kind in kinds.items()}
    assert asked["ValidatingWebhookConfiguration"] == {each for each in known if checked(*each)}
    assert asked["MutatingWebhookConfiguration"] == {(GROUP, KIND)}


def test_the_secret_is_brought_along_empty() -> None:
    secret = FOUND["Secret"]
    assert (secret["metadata"]["namespace"], secret["metadata"]["name"]) == (SECRET_NAMESPACE, SECRET_NAME)
    assert "data" not in secret and "stringData" not in secret


def test_outside_a_cluster_an_address_takes_the_services_place() -> None:
    found = {manifest["kind"]: manifest for manifest in webhook_manifests("https://127.0.0.1:7")}
    assert found.keys() == {"Secret", *PATHS}
    for kind, path in PATHS.items():
        assert found[kind]["webhooks"][0]["clientConfig"] == {"url": f"https://127.0.0.1:7{path}"}


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for role in manifests("rbac") if role["metadata"]["name"] == name for rule in role.get("rules", ())]


def test_the_controller_may_touch_one_secret_and_its_own_configurations() -> None:
    mine = [*rules("berth-controller"), *rules("berth-leader"), *rules("berth-webhooks")]
    secrets = [rule for rule in mine if "secrets" in rule["resources"]]
    assert [(rule["resourceNames"], set(rule["verbs"])) for rule in secrets] == [
        ([SECRET_NAME], {"list", "watch", "patch"})
    ]
    hooks = [rule for rule in mine if "admissionregistration.k8s.io" in rule["apiGroups"]]
    assert [(rule["resourceNames"], set(rule["verbs"])) for rule in hooks] == [([CONFIGURATIONS], {"get", "patch"})]
