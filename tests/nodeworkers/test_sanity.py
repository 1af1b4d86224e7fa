"""csi-sanity, the judge of CSI drivers, against ours: all that applies to the services offered passes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nodeworkers.csi.driver import Driver, Places
from nodeworkers.csi.identity import Identity
from nodeworkers.ledger import Ledger
from nodeworkers.rpc import csi_pb2
from nodeworkers.sockets import Sockets
from stack import Lines, StackError
from stack.tools import Toolbox
from tests.nodeworkers.csi_rig import CACHE, UPPER_BYTES, Store

SKIPPED = {
    # What needs a volume that a controller made, and an expansion or staging that inline volumes do not have.
    "Node Service NodeUnpublishVolume should remove target path",
    "Node Service should work",
    "Node Service should be idempotent",
}


class NoController:
    """csi-sanity asks for a controller's capabilities before every test of a node, also where there is none."""

    async def ControllerGetCapabilities(
        self, request: csi_pb2.ControllerGetCapabilitiesRequest, context: Any
    ) -> csi_pb2.ControllerGetCapabilitiesResponse:
        kind = csi_pb2.ControllerServiceCapability
        return csi_pb2.ControllerGetCapabilitiesResponse(capabilities=[kind(rpc=kind.RPC(type=kind.RPC.UNKNOWN))])


@pytest.fixture(scope="module")
def program() -> Path:
    """csi-sanity, found or built."""
    try:
        return Toolbox().ensure(["csi-sanity"], Lines())["csi-sanity"].path
    except StackError as error:
        pytest.skip(f"csi-sanity cannot be had here: {error}")


@pytest.mark.stack
@pytest.mark.timeout(600)
async def test_csi_sanity_finds_nothing_wrong(program: Path, tmp_path: Path) -> None:
    places = Places(tmp_path / "k", tmp_path / "berth")
    places.kubelet_root.mkdir()
    ledger = Ledger(places.folder)
    ledger.put_cache(CACHE)
    driver = Driver(places, "node-1", ledger, Store(places.folder / "store"), UPPER_BYTES)
    services = csi_pb2.DESCRIPTOR.services_by_name
    pretended = tmp_path / "controller.sock"
    controller = Sockets(
        [(pretended, [(services["Identity"], Identity(ledger, "0")), (services["Controller"], NoController())])]
    )
    await driver.start()
    await controller.start()
    report = tmp_path / "report.json"
    pod = places.kubelet_root / "pods" / "sanity" / "volumes" / "kubernetes.io~csi" / "v"
    pod.mkdir(parents=True)
    try:
        process = await asyncio.create_subprocess_exec(
            str(program), f"--csi.endpoint={places.endpoint}", f"--csi.controllerendpoint={pretended}",
            f"--csi.mountdir={pod}/mount", f"--csi.stagingdir={tmp_path}/staging", f"--ginkgo.json-report={report}",
            "--ginkgo.no-color",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
    finally:
        await controller.stop()
        await driver.stop()
        ledger.close()
    assert process.returncode == 0, output.decode()[-6000:]
    states: dict[str, set[str]] = {}
    for suite in json.loads(report.read_text()):
        for spec in suite["SpecReports"]:
            if spec["LeafNodeType"] == "It":
                name = " ".join([*spec["ContainerHierarchyTexts"], spec["LeafNodeText"]])
                states.setdefault(spec["State"], set()).add(name)
    assert set(states) <= {"passed", "skipped"}
    ours = {name for name in states["passed"] if "Identity Service" in name or "Node Service" in name}
    assert len(ours) >= 12, sorted(ours)
    for wanted in (
        "NodePublishVolume should fail when",
        "NodeUnpublishVolume should fail",
        "NodeGetVolumeStats should fail",
    ):
        assert any(wanted in name for name in ours)
