"""Holds every manifest of the pages and of examples/ against the models: it is one that berth takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from crds.gpuquota import GPUQuotaSpec
from crds.gpureservation import GPUReservationSpec
from crds.gpuseatprofile import GPUSeatProfileSpec
from crds.gpuworkload import GPUWorkloadSpec
from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from crds.kernelcachepolicy import KernelCachePolicySpec
from crds.seatmigration import SeatMigrationSpec
from crds.settings import SETTINGS_KEY, SETTINGS_NAME, SETTINGS_NAMESPACE, Settings
from images.reference import Reference
from nodeworkers.hardware.machine import read as read_machine
from planning import strategies
from planning.caches.volumes import DRIVER, VolumeRequest, volume_request
from planning.naming import STRATEGY_ANNOTATION
from planning.seats.endpoints import seat_service
from planning.seats.pod_settings import pod_settings
from tests.docs.pages import FENCE, PAGES, ROOT, named, read

_OF_THE_POD = tuple(f"csi.storage.k8s.io/{each}" for each in ("ephemeral", "pod.uid", "pod.namespace", "pod.name"))


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for page in PAGES:
        for language, block in FENCE.findall(read(page)):
            if language == "yaml":
                for number, document in enumerate(yaml.safe_load_all(block)):
                    yield f"{named(page)}: {document['kind']} {document['metadata']['name']} ({number})", document
    examples = ROOT / "examples"
    for file in sorted(
        [
            *examples.glob("*.yaml"),
            *(examples / "kernelcache").glob("*.yaml"),
            *(examples / "seats").glob("**/*.yaml"),
            examples / "devices" / "pod.yaml",
        ]
    ):
        for number, document in enumerate(yaml.safe_load_all(read(file))):
            yield f"{named(file)}: {document['kind']} {document['metadata']['name']} ({number})", document


@pytest.mark.parametrize(("where", "document"), [pytest.param(*entry, id=entry[0]) for entry in documents()])
def test_examples_are_valid(where: str, document: dict[str, Any]) -> None:
    metadata = document["metadata"]
    match document["kind"]:
        case "GPUWorkload":
            assert document["apiVersion"] == "gpu.warp.dev/v1alpha1"
            spec, refused = GPUWorkloadSpec.parse(document["spec"])
            assert spec is not None, refused
            assert spec.scheduling_strategy in (None, *strategies.installed())
        case "GPUQuota":
            assert document["apiVersion"] == "gpu.warp.dev/v1alpha1"
            quota, refused = GPUQuotaSpec.parse(document["spec"])
            assert quota is not None, refused
        case "GPUReservation":
            assert document["apiVersion"] == "gpu.warp.dev/v1alpha1"
            reservation, refused = GPUReservationSpec.parse(document["spec"])
            assert reservation is not None, refused
        case "GPUSeatProfile":
            assert document["apiVersion"] == "kyb.ai/v1alpha1"
            seats, refused = GPUSeatProfileSpec.parse(document["spec"])
            assert seats is not None, refused
        case "SeatMigration":
            assert document["apiVersion"] == "kyb.ai/v1alpha1"
            move, refused = SeatMigrationSpec.parse(document["spec"])
            assert move is not None, refused
        case "TritonKernelCache" | "TritonKernelCacheCluster" as kind:
            assert document["apiVersion"] == "tkm.io/v1alpha1"
            model = TritonKernelCacheSpec if kind == "TritonKernelCache" else TritonKernelCacheClusterSpec
            cache, refused = model.parse(document["spec"])
            assert cache is not None, refused
            Reference.parse(cache.oci_image.image)
        case "Service":
            found = seat_service(document)
            assert found is not None and not found.problem, found
        case "Pod":
            mounted = {
                each["name"]: each["mountPath"]
                for container in document["spec"]["containers"]
                for each in container.get("volumeMounts", ())
            }
            for volume in document["spec"].get("volumes", ()):
                assert volume["csi"]["driver"] == DRIVER
                attributes = volume["csi"]["volumeAttributes"]
                told = dict(zip(_OF_THE_POD, ("true", "u", metadata["namespace"], metadata["name"]), strict=True))
                request = volume_request({**attributes, **told}, volume["csi"].get("readOnly", False))
                assert isinstance(request, VolumeRequest), request
                assert request.mount_path in ("", mounted[volume["name"]])
        case "Deployment":
            template = document["spec"]["template"]
            said = pod_settings(template["metadata"]["annotations"])
            assert said.port and said.park and not said.problems, said.problems
            [container] = template["spec"]["containers"]
            [seats] = [name for name in container["resources"]["limits"] if name.startswith("kyb.ai/")]
            assert seats in {"kyb.ai/gpu-1x-seat", "kyb.ai/gpu-2x-seat"}
            assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        case "KernelCachePolicy":
            from images.signatures.keys import load_public_key

            assert document["apiVersion"] == "tkm.io/v1alpha1"
            policy, refused = KernelCachePolicySpec.parse(document["spec"])
            assert policy is not None, refused
            assert all(load_public_key(signer.key) for signer in policy.signers if signer.key is not None)
        case "ConfigMap":
            assert (metadata["namespace"], metadata["name"]) == (SETTINGS_NAMESPACE, SETTINGS_NAME)
            settings, refused = Settings.parse(yaml.safe_load(document["data"][SETTINGS_KEY]))
            assert settings is not None, refused
        case "Namespace":
            assert metadata["annotations"][STRATEGY_ANNOTATION] in strategies.installed()
        case "Node":
            from stack import SimulatedNode, node_manifest

            ours = node_manifest(SimulatedNode(metadata["name"], gpus=8))
            assert metadata["annotations"].items() <= ours["metadata"]["annotations"].items()
            assert metadata["labels"].items() <= ours["metadata"]["labels"].items()
            assert document["status"]["allocatable"].items() <= ours["status"]["allocatable"].items()
        case kind:
            pytest.fail(f"{where}: nothing checks examples of kind {kind}")


def test_the_simulated_machine_is_one() -> None:
    assert len(read_machine(ROOT / "examples" / "devices" / "machine.yaml").tenstorrent.cards) == 2
