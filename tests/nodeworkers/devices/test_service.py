"""A node's device work in one place: what breaks off is begun anew, what was lost is had again from beside the ledger,
and what people are told is so.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeworkers.devices import metrics, service
from nodeworkers.devices.core import FrontEnds
from nodeworkers.devices.service import DeviceOptions, DeviceService
from nodeworkers.dra.prepared import Given, Part, Prepared, PreparedClaims, edits
from nodeworkers.hardware.resetting import Resets
from nodeworkers.hardware.simulated import Simulated
from nodeworkers.inventory import Hardware
from nodeworkers.ledger import Ledger
from planning.devices.cards import Card, Sight
from planning.devices.claims import cdi_device
from planning.devices.health import Health
from planning.devices.offers import Injection, Refused
from tests.scraping import scraping

GPU = "nvidia.com/gpu"
GPUS = tuple(Card(f"GPU-{n}", "nvidia", "H100", GPU, n, nodes=(f"/dev/nvidia{n}",)) for n in range(2))
GIVEN = Injection({"NVIDIA_VISIBLE_DEVICES": "void"}, cdi=("berth.dev/nvidia=GPU-0",))
CLAIM = Prepared(
    "c-1", "team-a", "trainer", (Given("gpu", "n", "gpu-0", GIVEN.cdi),), {cdi_device("c-1", 0): edits(GIVEN)},
    (Part(GPU, ("GPU-0",), GIVEN),),
)  # fmt: skip


class Node:
    """A node's folders, of which any may be lost."""

    def __init__(self, root: Path) -> None:
        self.kubelet, self.own, self.cdi = root / "kubelet", root / "berth", root / "cdi"
        self._ledgers: list[Ledger] = []

    def begin(self, *, plugin: tuple[str, ...] = (), dra: tuple[str, ...] = (), **more: Any) -> DeviceService:
        options = DeviceOptions(FrontEnds(plugin, dra), cdi=self.cdi, plugins=self.kubelet / "device-plugins", **more)
        self.end()
        self._ledgers.append(ledger := Ledger(self.own))
        hardware = Hardware(Simulated("1xH100"), ledger.identity)
        return DeviceService("n", self.kubelet, self.own, ledger, cast(Any, SimpleNamespace()), options, hardware)

    def end(self) -> None:
        while self._ledgers:
            self._ledgers.pop().close()

    def prepare(self) -> None:
        claims = PreparedClaims(self.own / "claims", self.cdi)
        claims.open()
        claims.put(CLAIM)

    def loses_the_ledger(self) -> None:
        self.end()
        for file in self.own.glob("ledger.*"):
            file.unlink()

    def loses_all_its_own(self) -> None:
        self.end()
        shutil.rmtree(self.own)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("lose", [Node.loses_the_ledger, Node.loses_all_its_own])
@pytest.mark.parametrize("front", ["plugin", "dra"])
async def test_what_claims_have_is_known_though_the_ledger_is_lost(
    node: Node, lose: Callable[[Node], None], front: str
) -> None:
    node.begin(dra=(GPU,))
    node.prepare()
    lose(node)
    made = node.begin(**cast(Any, {front: (GPU,)}))
    assert {id: holder.claim for id, holder in made.holdings.held.items()} == {"GPU-0": "c-1"}
    made.core.seen(Sight("nvidia", GPUS))
    await made.core.settle()
    with pytest.raises(Refused, match="GPU-0 is held by the claim c-1"):
        made.core.view("device-plugin").allocate(GPU, ["GPU-0"])
    with pytest.raises(Refused, match="GPU-0 is held by the claim c-1"):
        made.core.view("dra").allocate(GPU, ["GPU-0"], claim="c-2")
    made.core.view("dra").allocate(GPU, ["GPU-0"], claim="c-1")
    made.core.release("c-1")
    made.core.view("device-plugin").allocate(GPU, ["GPU-0"])


async def test_what_is_on_record_is_not_taken_down_twice(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.prepare()
    node.begin(dra=(GPU,))
    assert caplog.messages == ["The record of GPU-0 was lost, and is restored from the prepared claim team-a/trainer."]
    caplog.clear()
    node.begin(dra=(GPU,))
    assert not caplog.messages


def test_a_claims_record_is_had_from_cdi_and_a_spec_of_nobody_goes(tmp_path: Path) -> None:
    folder, cdi = tmp_path / "claims", tmp_path / "cdi"
    PreparedClaims(folder, cdi).put(CLAIM)
    (spec,) = cdi.iterdir()
    for name, text in {"x": "{}", "y": "{", "z": '{"annotations": {"devices.kyb.ai/prepared": "{}"}}'}.items():
        (cdi / f"devices.kyb.ai-claim_{name}.json").write_text(text)
    (cdi / "devices.kyb.ai-claim_c-2.json").write_bytes(spec.read_bytes())  # another's name
    shutil.rmtree(folder)
    again = PreparedClaims(folder, cdi)
    again.open()
    assert again.get("c-1") == CLAIM and list(cdi.iterdir()) == [spec]
    assert [file.name for file in folder.iterdir()] == ["c-1.json"]
    again.remove("c-1")
    assert not list(cdi.iterdir()) and not list(folder.iterdir())


async def test_a_resource_that_nobody_was_told_to_offer_says_so(node: Node) -> None:
    made = node.begin()
    made.core.seen(Sight("nvidia", GPUS))
    await made.core.settle()
    offer = made.picture().offers[GPU]
    assert offer.front_end == "none"
    assert offer.message == f"Nothing offers {GPU}: start berth node with --device-plugin or --dra for it."


@pytest.mark.parametrize(
    ("state", "reason", "kind"),
    [
        ("Healthy", "DeviceHealthy", "Normal"), ("Unhealthy", "DeviceUnhealthy", "Warning"),
        ("Unknown", "DeviceUnknown", "Warning"),
    ],
)  # fmt: skip
async def test_each_state_of_a_card_is_an_event_of_its_own(node: Node, state: Any, reason: str, kind: str) -> None:
    told: list[tuple[str, str]] = []
    made = node.begin()
    made._events = cast(Any, SimpleNamespace(record=lambda **event: told.append((event["reason"], event["type"]))))
    made._told("GPU-0", Health(state), "A sentence.")
    assert told == [(reason, kind)]


# --- labels --------------------------------------------------------------------------------------------------------

TT = Card(
    "tt-1", "tenstorrent", "n150", "tenstorrent.com/n150", 0, "0000:01:00.0", memory_mib=12288,
    nodes=("/dev/tenstorrent/0",), driver="2.10.0", firmware="18.12.0.0",
)  # fmt: skip
TT_SEEN = Sight("tenstorrent", (TT,), host={"driver": "2.10.0", "iommu/tt-1": "translated"})
TROUBLED = Sight("nvidia", GPUS, problem="The driver tells no events.", host={"cuda": "13.0"})


async def labelled(made: DeviceService, *sights: Sight) -> dict[str, str] | None:
    for sight in sights:
        made._saw(sight)
    await made.core.settle()
    found = made.picture().labels
    return None if found is None else dict(found)


async def test_a_reset_takes_no_label_away(node: Node) -> None:
    made = node.begin()
    before = await labelled(made, Sight("nvidia"), TT_SEEN)
    assert before is not None and before["berth.dev/tenstorrent.iommu"] == "translated"
    made._resets = Resets(lambda card: [sys.executable, "-I", "-c", "import time; time.sleep(600)"])
    with pytest.raises(Refused, match="still being reset"):
        made._resets.reset([TT], 0.0)
    try:
        assert await labelled(made, Sight("tenstorrent", host={"driver": "2.10.0"})) == before
    finally:
        process = made._resets._runs[TT.id].process
        process.kill()
        process.communicate()


async def test_a_vendor_in_lasting_trouble_is_labelled_by_what_is_known_of_it(node: Node) -> None:
    made = node.begin()
    assert await labelled(made, TT_SEEN) is None, "nobody has looked at NVIDIA's"
    found = await labelled(made, TROUBLED)
    assert found is not None and found["berth.dev/tenstorrent.count"] == "1"
    assert found["berth.dev/nvidia.count"] == "2" and found["berth.dev/nvidia.cuda"] == "13.0"

    made = node.begin()  # and remembers them
    silent = Sight("nvidia", problem="The driver does not answer.")
    found = await labelled(made, TT_SEEN, silent)
    assert found is not None and found["berth.dev/nvidia.count"] == "2"
    assert await labelled(made, Sight("nvidia", GPUS[:1])), "what is seen well counts from then on"
    found = await labelled(made, silent)
    assert found is not None and found["berth.dev/nvidia.count"] == "1"


async def test_a_vendor_that_nobody_sees_is_waited_for_and_not_for_ever(node: Node) -> None:
    made = node.begin()
    assert await labelled(made, TT_SEEN) is None
    assert await labelled(made, Sight("nvidia", problem="The driver lists no GPUs.")) is None
    made._began -= service._FIRST_LOOKS
    found = await labelled(made)
    assert found is not None and found["berth.dev/tenstorrent.count"] == "1"
    assert not any("nvidia" in key for key in found)


async def test_what_was_known_of_a_vendor_is_said_where_nobody_sees_it_after_the_start(node: Node) -> None:
    assert await labelled(node.begin(), TT_SEEN, Sight("nvidia", GPUS))
    made = node.begin()
    assert await labelled(made, TT_SEEN) is None, "a look may be on its way"
    made._began -= service._FIRST_LOOKS
    found = await labelled(made)
    assert found is not None and found["berth.dev/nvidia.count"] == "2"


@pytest.mark.parametrize("simulated", [True, False])
async def test_metrics_say_which_devices_are_simulated(node: Node, simulated: bool) -> None:
    made = node.begin(plugin=(GPU,))
    made.core.seen(Sight("nvidia", GPUS))
    await made.core.settle()
    with scraping(metrics) as scrape:
        metrics.observe(lambda: (made.core.state, {}, (), simulated))
        found = [name for name in scrape() if name.startswith(("berth_device_healthy{", "berth_devices{"))]
    assert len(found) == 5 and all(f'simulated="{str(simulated).lower()}"' in name for name in found)
