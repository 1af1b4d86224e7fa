"""deploy/node and deploy/csi: what they say fits the process, its rights, and what a real API server takes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import typer.main

from berth.cli import command_line
from berth.install import manifests
from berth.node_process import DRAIN
from nodeworkers.devices import service
from planning.caches.volumes import DRIVER
from stack import Stack


def daemon_set() -> dict[str, Any]:
    (found,) = manifests("node")
    return found


def container() -> dict[str, Any]:
    (found,) = daemon_set()["spec"]["template"]["spec"]["containers"]
    return dict(found)


def options() -> dict[str, Any]:
    """Defaults of `berth node`, by the option's name."""
    group = typer.main.get_command(command_line())
    command = group.commands["node"]  # type: ignore[attr-defined]
    return {each.name: each.default for each in command.params}


def test_the_driver_is_the_one_that_registers() -> None:
    (found,) = manifests("csi")
    assert found["metadata"]["name"] == DRIVER
    assert found["spec"] == {
        "attachRequired": False,
        "podInfoOnMount": True,
        "volumeLifecycleModes": ["Ephemeral"],
        "fsGroupPolicy": "None",
        "requiresRepublish": False,
        "storageCapacity": False,
    }


def test_the_process_finds_what_it_looks_for() -> None:
    defaults, ports = options(), {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert ports == {"health": defaults["health_port"], "metrics": defaults["metrics_port"]}
    assert container()["command"] == ["berth", "node"]
    mounted = {each["mountPath"]: each for each in container()["volumeMounts"]}
    for folder in (defaults["root"], defaults["kubelet_root"]):
        assert mounted[str(folder)]["mountPropagation"] == "Bidirectional"
    volumes = {each["name"]: each for each in daemon_set()["spec"]["template"]["spec"]["volumes"]}
    for path in (str(defaults["root"]), str(defaults["kubelet_root"]), "/dev"):
        assert volumes[mounted[path]["name"]]["hostPath"]["path"] == path, "a path is not the host's"


def test_the_hosts_root_is_looked_into_and_no_more_of_it_than_is_needed() -> None:
    (place,) = (value for option, value in itertools.pairwise(container()["args"]) if option == "--host-root")
    volumes = {each["name"]: each for each in daemon_set()["spec"]["template"]["spec"]["volumes"]}
    (mount,) = (each for each in container()["volumeMounts"] if each["mountPath"].startswith(f"{place}/"))
    assert volumes[mount["name"]]["hostPath"]["path"] == mount["mountPath"].removeprefix(place) == "/usr"
    # With links that are followed, and unmounted with the host: what is mounted there must not be kept busy.
    assert mount["readOnly"] is True and mount["mountPropagation"] == "HostToContainer"
    assert not any(each.get("hostPath", {}).get("path") in ("/", "/etc", "/var", "/run") for each in volumes.values())
    assert options()["host_root"] == Path("/"), "where it runs on the host itself"


def test_every_node_has_it_and_nothing_more_than_it_needs() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}] and "nodeSelector" not in pod
    assert pod["serviceAccountName"] == "berth-node"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    named = {each["name"]: each.get("valueFrom") for each in container()["env"]}
    assert named["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_it_may_end_what_it_began() -> None:
    """A card whose reset is killed midway is lost until somebody resets it by force."""
    servers = 2 * 10  # seconds for their last calls: CSI's, then DRA's (nodeworkers/sockets.py)
    grace = daemon_set()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > DRAIN.total_seconds() + servers + service._LAST_RESETS


def test_its_namespace_admits_it() -> None:
    """Wherever a cluster's own default is stricter: only privileged pods pass mounts on to the host."""
    namespace = next(each for each in manifests("rbac") if each["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    assert container()["securityContext"]["privileged"] is True


@pytest.mark.stack
def test_an_api_server_takes_them(stack: Stack) -> None:
    for manifest in [*manifests("rbac"), *manifests("csi")]:
        stack.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(manifest))
    stack.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(daemon_set()))
    template = daemon_set()["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "like-the-daemons", "namespace": "berth-system", **template["metadata"]},
        "spec": template["spec"],
    }
    stack.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
