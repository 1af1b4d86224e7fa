"""GPUSeatProfile on a real kube-apiserver: what it refuses before any node sees it, and what kubectl shows."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from crds.definitions import DEFINITIONS
from crds.generate import render
from stack import Stack
from tests.crds.test_gpuseatprofile import HOURS, PAIR, QUAD, UUID, policy, spec
from tests.docs.pages import ROOT

pytestmark = pytest.mark.stack
(DEFINITION,) = [each for each in DEFINITIONS if each.kind == "GPUSeatProfile"]


class Door:
    """kubectl's door, for GPUSeatProfiles of one name."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.name = f"seats-{uuid.uuid4().hex[:8]}"

    def apply(self, wanted: dict[str, Any], *args: str) -> str:
        body = {
            "apiVersion": "kyb.ai/v1alpha1",
            "kind": "GPUSeatProfile",
            "metadata": {"name": self.name},
            "spec": wanted,
        }
        return self.stack.kubectl("apply", "--server-side", "-f", "-", *args, stdin=json.dumps(body))

    def refused(self, wanted: dict[str, Any]) -> str:
        with pytest.raises(Exception) as caught:
            self.apply(wanted)
        return str(caught.value) + str(getattr(caught.value, "hint", "")) + str(getattr(caught.value, "stderr", ""))


@pytest.fixture(scope="module")
def door(stack: Stack) -> Iterator[Door]:
    stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=render(DEFINITION))
    stack.kubectl("wait", "--for=condition=Established", "crd/gpuseatprofiles.kyb.ai", "--timeout=30s")
    found = Door(stack)
    yield found
    stack.kubectl("delete", "gpusp", found.name, "--ignore-not-found", "--wait=false")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (spec(("G01", [0, 1]), ("G12", [1, 2])), "groups overlap"),
        (spec(("A", [0, UUID]), ("B", [UUID, 2])), "groups overlap"),
        (spec(("G012", [0, 1, 2])), "no profile's groupSize"),
        (spec(("G01", [0, 1]), ("G01", [2, 3])), "duplicate entries for key"),
        (spec(("G01", [0, "one"])), "spec.gpuTopology.groups[0].gpus[1]"),
        (spec(("G01", [0, 256])), "spec.gpuTopology.groups[0].gpus[1]"),
        (spec(profiles=(PAIR, PAIR | {"name": "other"})), "same groupSize"),
        (spec(profiles=(PAIR | {"resource": "nvidia.com/gpu"},)), "must be kyb.ai/gpu-<groupSize>x-seat"),
        (spec(profiles=()), "spec.profiles"),
        (policy(type="schedule"), "must be there with type schedule, and with no other"),
        (policy(type="fair", schedule=[HOURS]), "must be there with type schedule, and with no other"),
        (policy(schedule=[HOURS]), "must be there with type schedule, and with no other"),
        (policy(type="fastest"), "spec.profiles[0].policy.type"),
        (policy(type="schedule", schedule=[HOURS | {"days": ["Mon", "Mon"]}]), "days: duplicate entries for key"),
        (policy(type="schedule", schedule=[HOURS | {"end": "24:00"}]), "schedule[0].end"),
    ],
)
def test_the_api_server_refuses_what_no_node_could_serve(door: Door, bad: dict[str, Any], told: str) -> None:
    assert told in door.refused(bad)


def test_it_takes_what_nodes_can_serve(door: Door) -> None:
    door.apply(spec(("G0123", [0, 1, 2, 3]), ("G45", [4, UUID]), profiles=(PAIR, QUAD)))
    door.apply(policy(type="schedule", timeZone="Europe/Berlin", schedule=[HOURS]))
    door.apply(policy(lostPercent=5), "--force-conflicts")
    for file in sorted((ROOT / "examples" / "seats").glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            if document["kind"] == "GPUSeatProfile":
                door.apply(document["spec"], "--force-conflicts")


def test_columns(door: Door) -> None:
    door.apply(spec(), "--force-conflicts")
    status = {
        "groups": 4,
        "seats": 16,
        "nodesServing": 2,
        "nodesRefused": 1,
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Refused",
                "message": "",
                "lastTransitionTime": "2026-11-22T12:00:00Z",
            }
        ],
    }
    patch = json.dumps({"status": status})
    door.stack.kubectl("patch", "gpusp", door.name, "--subresource=status", "--type=merge", "-p", patch)
    head, row = door.stack.kubectl("get", "gpusp", door.name).splitlines()[:2]
    assert head.split() == ["NAME", "GROUPS", "SEATS", "SERVING", "REFUSED", "READY", "REASON", "AGE"]
    assert row.split()[:7] == [door.name, "4", "16", "2", "1", "False", "Refused"]
