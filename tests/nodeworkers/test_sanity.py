"""csi-sanity, the judge of CSI drivers, against ours: all that applies to the services offered passes.

It makes its volumes by a controller's service, which an inline volume has not. A pretended one gives it volumes as the
kubelet describes them to us, so that it publishes them for real.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.csi import targets
from nodeworkers.csi.driver import Driver, Places
from nodeworkers.ledger import Ledger
from nodeworkers.rpc import csi_pb2
from nodeworkers.sockets import Sockets
from stack import Lines, StackError
from stack.tools import Toolbox
from tests.nodeworkers.csi_rig import CACHE, DIGEST, FILES, UPPER_BYTES, Rig, Store, needs_mounts

pytestmark = [*needs_mounts, pytest.mark.stack, pytest.mark.timeout(600)]

KUBELETS = "csi.storage.k8s.io/"
ATTRIBUTES = {
    f"{KUBELETS}ephemeral": "true",
    f"{KUBELETS}pod.name": "p",
    f"{KUBELETS}pod.namespace": "team-a",
    f"{KUBELETS}pod.uid": "sanity",
    "kernel-name": "llama",
}
# Other services than ours; staging and expansion, which are not offered, it leaves out by itself.
NOT_OURS = r"Controller Server|GroupController|SnapshotMetadata"


class PretendedController:
    """As much of a controller as csi-sanity needs to have volumes."""

    def __init__(self) -> None:
        self.made = 0

    async def GetPluginInfo(self, request: Any, context: Any) -> csi_pb2.GetPluginInfoResponse:
        return csi_pb2.GetPluginInfoResponse(name="pretended.tkm.io", vendor_version="0")

    async def GetPluginCapabilities(self, request: Any, context: Any) -> csi_pb2.GetPluginCapabilitiesResponse:
        kind = csi_pb2.PluginCapability
        service = kind.Service(type=kind.Service.CONTROLLER_SERVICE)
        return csi_pb2.GetPluginCapabilitiesResponse(capabilities=[kind(service=service)])

    async def Probe(self, request: Any, context: Any) -> csi_pb2.ProbeResponse:
        return csi_pb2.ProbeResponse()

    async def ControllerGetCapabilities(self, request: Any, context: Any) -> csi_pb2.ControllerGetCapabilitiesResponse:
        kind = csi_pb2.ControllerServiceCapability
        can = kind(rpc=kind.RPC(type=kind.RPC.CREATE_DELETE_VOLUME))
        return csi_pb2.ControllerGetCapabilitiesResponse(capabilities=[can])

    async def CreateVolume(self, request: csi_pb2.CreateVolumeRequest, context: Any) -> csi_pb2.CreateVolumeResponse:
        self.made += 1
        volume = csi_pb2.Volume(
            volume_id=f"csi-{self.made}",
            capacity_bytes=request.capacity_range.required_bytes,
            volume_context=ATTRIBUTES,
        )
        return csi_pb2.CreateVolumeResponse(volume=volume)

    async def DeleteVolume(self, request: Any, context: Any) -> csi_pb2.DeleteVolumeResponse:
        return csi_pb2.DeleteVolumeResponse()


@pytest.fixture(scope="module")
def program() -> Path:
    """csi-sanity, found or built."""
    try:
        return Toolbox().ensure(["csi-sanity"], Lines())["csi-sanity"].path
    except StackError as error:
        pytest.skip(f"csi-sanity cannot be had here: {error}")


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Places, Driver, Path, Path]]:
    """The driver on its own socket, a pretended controller on another, and both services of ours with it on a third."""
    places = Places(folder / "k", folder / "berth")
    (places.kubelet_root / "pods" / "sanity" / "volumes" / "kubernetes.io~csi").mkdir(parents=True)
    ledger = Ledger(places.folder)
    ledger.put_cache(CACHE)
    store = Store(places.folder / "store")
    store.add(DIGEST, FILES)
    driver = Driver(places, "node-1", ledger, store, UPPER_BYTES)
    pretended = PretendedController()
    services = csi_pb2.DESCRIPTOR.services_by_name
    alone, together = folder / "controller.sock", folder / "together.sock"
    others = [(services["Identity"], pretended), (services["Controller"], pretended)]
    more = Sockets([(alone, others), (together, [*others, (services["Node"], driver.node)])])
    await driver.start()
    await more.start()
    try:
        yield places, driver, alone, together
        rig = Rig(places.kubelet_root, places.folder, store)
        assert rig.left() == [], "csi-sanity unpublishes what it published"
        assert ledger.mounts() == []
    finally:
        await more.stop()
        await driver.stop()
        ledger.close()


async def ran(program: Path, *arguments: str) -> tuple[int, str]:
    """Runs csi-sanity: its exit code, and what it said.

    Where a connection is there before it looks at it first, it waits for a change of that for a minute, and gives up
    (csi-test v5.4.0, utils/grpcutil.go, Connect). So it is asked anew then; a driver that answers nobody fails always.
    """
    for _ in range(3):
        process = await asyncio.create_subprocess_exec(
            str(program), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        told = (await process.communicate())[0].decode()
        if process.returncode == 0 or "Connection timed out" not in told:
            break
    return process.returncode or 0, told


async def judged(program: Path, folder: Path, *arguments: str) -> dict[str, set[str]]:
    """The names of csi-sanity's tests by how they ended."""
    report = folder / "report.json"
    code, told = await ran(
        program, f"--csi.mountdir={folder}/k/pods/sanity/volumes/kubernetes.io~csi/v",
        f"--csi.stagingdir={folder}/staging", f"--ginkgo.json-report={report}", "--ginkgo.no-color", *arguments,
    )  # fmt: skip
    assert code == 0, told[-6000:]
    states: dict[str, set[str]] = {}
    for suite in json.loads(report.read_text()):
        for spec in suite["SpecReports"]:
            name = " ".join([*spec["ContainerHierarchyTexts"], spec["LeafNodeText"]])
            if spec["LeafNodeType"] == "It" and not re.search(NOT_OURS, name):
                states.setdefault(spec["State"], set()).add(name)
    return states


async def test_csi_sanity_finds_nothing_wrong(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MOUNT", "target")  # its name for what the kubelet calls mount
    async with served(tmp_path) as (places, _, alone, together):
        own = (f"--csi.endpoint={places.endpoint}", f"--csi.controllerendpoint={alone}")
        states = await judged(program, tmp_path, *own, f"--ginkgo.skip={NOT_OURS}")
        whole = await judged(program, tmp_path, f"--csi.endpoint={together}", "--ginkgo.focus=Node Service should")
    assert states.keys() <= {"passed", "skipped"} and whole.keys() <= {"passed", "skipped"}
    assert whole["passed"] == {"Node Service should work", "Node Service should be idempotent"}
    unoffered = {name for name in states["skipped"] if not re.search("NodeStage|NodeUnstage|NodeExpand", name)}
    assert unoffered == whole["passed"], "there is more that applies to what is served"
    passed = " | ".join(sorted(states["passed"]))
    for wanted in (
        "GetPluginInfo should return", "Probe should return", "NodeGetInfo should return",
        "NodePublishVolume should fail when no volume capability", "NodeUnpublishVolume should remove target path",
        "NodeGetVolumeStats should fail when volume does not exist on the specified path",
    ):  # fmt: skip
        assert wanted in passed
