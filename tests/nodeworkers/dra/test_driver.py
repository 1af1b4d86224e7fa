"""The DRA driver as a kubelet sees it: registration, claims that are prepared and given back, and health."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from nodeworkers.dra import plugin
from nodeworkers.dra.prepared import PreparedClaims
from nodeworkers.dra.publisher import RESOURCESLICES
from planning.devices.offers import Device
from tests.nodeworkers.dra.rig import NODE, Rig, result, serving, until
from tests.nodeworkers.dra.simulated_devices import N150, SEAT, SimulatedDevices, seat

A, B, C = (Device(f"TT-{letter}", N150, (f"card-{letter}",)) for letter in "abc")
SEAT_0 = seat("pair0", 0, ("GPU-1", "GPU-2"))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(tmp_path, SimulatedDevices(A, B, C, SEAT_0)) as made:
        yield made


def specs(rig: Rig) -> dict[str, dict[str, object]]:
    """The CDI devices of all claims, by their fully qualified names."""
    found: dict[str, dict[str, object]] = {}
    for file in rig.places.cdi.glob("*.json"):
        spec = json.loads(file.read_text())
        assert spec["cdiVersion"] == "0.6.0"
        found |= {f"{spec['kind']}={each['name']}": each["containerEdits"] for each in spec["devices"]}
    return found


async def test_the_kubelet_is_told_who_we_are_and_the_slices_are_looked_at_when_it_has_registered_us(rig: Rig) -> None:
    info = await rig.kubelet.info()
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", "devices.kyb.ai", str(rig.places.endpoint))
    assert list(info.supported_versions) == ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]
    await rig.kubelet.notify(False, "no")
    assert (rig.driver.registration.registered, rig.driver.registration.error) == (False, "no")
    await until(lambda: rig.driver.publisher.published == 1, "published")
    listed = len([1 for method, path, _ in rig.api.requests if method == "GET" and "resourceslices" in path])
    await rig.kubelet.notify(True)
    await until(
        lambda: len([1 for m, path, _ in rig.api.requests if m == "GET" and "resourceslices" in path]) > listed,
        "the slices are read again",
    )


async def test_a_claim_gets_its_devices_by_cdi_and_gives_them_back(rig: Rig) -> None:
    asked = rig.claim("c", result("cards", A.id), result("cards", B.id), result("best/seat", SEAT_0.id))
    answer = (await rig.kubelet.prepare(asked)).claims[asked["uid"]]
    assert answer.error == ""
    told = [
        (
            list(each.request_names),
            each.pool_name,
            each.device_name,
            list(each.cdi_device_ids),
            each.HasField("share_id"),
        )
        for each in answer.devices
    ]
    one, two = (f"devices.kyb.ai/claim={asked['uid']}-{number}" for number in (0, 1))
    assert told == [
        (["cards"], NODE, "tt-a", [one], False), (["cards"], NODE, "tt-b", [], False),
        (["best"], NODE, "kyb-pair0-s0", [two], False),
    ]  # fmt: skip
    assert specs(rig)[one] == {
        "env": ["SIMULATED_DEVICES=TT-a,TT-b"],
        "deviceNodes": [
            {"path": f"/dev/simulated/{each}", "hostPath": "/dev/null", "permissions": "rw"} for each in (A.id, B.id)
        ],
        "mounts": [
            {
                "hostPath": "/etc/hostname", "containerPath": "/etc/simulated",
                "options": ["rbind", "nosuid", "nodev", "ro"],
            }
        ],
    }  # fmt: skip
    assert specs(rig)[two]["env"] == ["SIMULATED_DEVICES=kyb-pair0-s0"]
    assert rig.devices.held == dict.fromkeys((A.id, B.id, SEAT_0.id), asked["uid"])
    assert rig.devices.started == [(A.id, B.id), (SEAT_0.id,)]

    for _ in range(2):
        back = await rig.kubelet.unprepare(asked)
        assert back.claims[asked["uid"]].error == ""
        assert rig.devices.held == {} and specs(rig) == {} and len(rig.driver.claims) == 0


async def test_a_claim_that_is_prepared_is_answered_from_the_record_alone_also_after_a_restart(rig: Rig) -> None:
    asked = rig.claim("c", result("cards", A.id))
    first = await rig.kubelet.prepare(asked)
    before = specs(rig)
    await rig.stop()
    for file in rig.places.cdi.glob("*"):
        file.unlink()  # a reboot
    (rig.places.cdi / "devices.kyb.ai-claim_of-nobody.json").write_text("{}")
    (rig.places.cdi / "another.json").write_text("{}")
    await rig.start()
    assert (rig.places.cdi / "another.json").exists()
    (rig.places.cdi / "another.json").unlink()
    assert specs(rig) == before
    rig.api.fail(contains="resourceclaims", count=100)
    rig.devices.remove(A.id)
    for file in rig.places.cdi.glob("*"):
        file.unlink()
    assert await rig.kubelet.prepare(asked) == first
    assert specs(rig) == before


async def test_a_claim_waits_until_the_one_before_it_is_given_back(rig: Rig) -> None:
    before, other = rig.claim("before", result("r", B.id)), rig.claim("other", result("r", C.id))
    after = rig.claim("after", result("r", A.id), result("s", B.id))
    for asked in (before, other):
        assert (await rig.kubelet.prepare(asked)).claims[asked["uid"]].error == ""
    waiting = asyncio.ensure_future(rig.kubelet.prepare(after))
    # What is not its own coming back changes nothing, and what it could have had nobody keeps meanwhile.
    await rig.kubelet.unprepare(other)
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done and rig.devices.held == {B.id: before["uid"]}
    await rig.kubelet.unprepare(before)
    assert (await waiting).claims[after["uid"]].error == ""
    assert rig.devices.held == {A.id: after["uid"], B.id: after["uid"]}


async def test_a_claim_that_waits_and_is_given_back_holds_up_nobody(rig: Rig) -> None:
    before, after = rig.claim("before", result("r", A.id)), rig.claim("after", result("r", A.id))
    assert (await rig.kubelet.prepare(before)).claims[before["uid"]].error == ""
    waiting = asyncio.ensure_future(rig.kubelet.prepare(after))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    async with asyncio.timeout(3):  # far less than it would wait
        await rig.kubelet.unprepare(after)
        assert "held by another claim" in (await waiting).claims[after["uid"]].error
    assert rig.devices.held == {A.id: before["uid"]}


async def test_a_claim_that_has_its_devices_keeps_them_when_it_is_refused(rig: Rig) -> None:
    asked = rig.claim("c", result("r", A.id), result("s", B.id))
    rig.devices.held |= {A.id: asked["uid"], B.id: asked["uid"]}  # by the kubelet's word: its record was lost
    rig.devices.ail(B.id)
    assert "not well" in (await rig.kubelet.prepare(asked)).claims[asked["uid"]].error
    assert rig.devices.held == {A.id: asked["uid"], B.id: asked["uid"]}


async def test_cards_of_one_claim_are_made_ready_at_once(rig: Rig) -> None:
    asked = rig.claim("c", result("r", A.id), result("s", B.id))
    assert (await rig.kubelet.prepare(asked)).claims[asked["uid"]].error == ""
    assert [sorted(each) for each in rig.devices.started] == [sorted((A.id, B.id))]


async def test_each_claim_is_refused_for_its_own_reason(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeworkers.dra.plugin.RETURN_SECONDS", 1.0)
    rig.devices.ail(C.id)
    good, held = rig.claim("good", result("r", A.id)), rig.claim("held", result("r", A.id))
    half = rig.claim("half", result("r", B.id), result("s", C.id))
    gone = rig.claim("gone", result("r", "tt-z"))
    old = {**rig.claim("old", result("r", B.id)), "uid": "0-0"}
    nobody = {"namespace": "team-a", "name": "nobody", "uid": "0-1"}
    empty = {"namespace": "", "name": "", "uid": "0-2"}
    assert (await rig.kubelet.prepare(good)).claims[good["uid"]].error == ""
    answer = await rig.kubelet.prepare(held, half, gone, old, nobody, empty)
    errors = [answer.claims[each["uid"]].error for each in (held, half, gone, old, nobody, empty)]
    assert errors[0] == f"The card {A.id} is held by another claim."
    assert errors[1] == f"The card {C.id} is not well: Its heartbeat stands still."
    assert errors[2].startswith(f"The device tt-z is not on the node {NODE} any more.")
    assert errors[3].startswith("The ResourceClaim team-a/old is another one by now")
    assert errors[4].startswith("There is no ResourceClaim team-a/nobody")
    assert errors[5].startswith("What the kubelet asked for is not a ResourceClaim")
    assert rig.devices.held == {A.id: good["uid"]}, "a claim gets all its devices or none"
    assert len(rig.driver.claims) == 1


async def test_a_claim_whose_cards_are_being_reset_waits_alone_and_is_handed_out_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = rig.claim("slow", result("r", A.id)), rig.claim("other", result("r", B.id))
    rig.devices.going[A.id] = threading.Event()
    waiting = [asyncio.ensure_future(rig.kubelet.prepare(slow)) for _ in range(2)]
    try:
        async with asyncio.timeout(30):
            while not rig.devices.started:
                await asyncio.sleep(0.01)
            assert (await rig.kubelet.prepare(other)).claims[other["uid"]].error == ""
        back = asyncio.ensure_future(rig.kubelet.unprepare(slow))
        done, _ = await asyncio.wait([back], timeout=0.3)
        assert not done and not any(each.done() for each in waiting)
    finally:
        rig.devices.going[A.id].set()
    assert [(await each).claims[slow["uid"]].error for each in waiting] == ["", ""]
    assert rig.devices.started == [(A.id,), (B.id,)]
    await back
    assert rig.devices.held == {B.id: other["uid"]} and len(rig.driver.claims) == 1, "it came before it went"


async def test_a_claim_whose_cards_are_not_ready_in_time_is_told_and_gets_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodeworkers.dra.plugin.READY_SECONDS", 0.05)
    asked = rig.claim("c", result("r", A.id))
    rig.devices.going[A.id] = threading.Event()
    try:
        answer = await rig.kubelet.prepare(asked)
    finally:
        rig.devices.going[A.id].set()
    assert answer.claims[asked["uid"]].error.startswith(f"{A.id} cannot be made ready for a container within 0 s.")
    assert rig.devices.held == {} and len(rig.driver.claims) == 0
    monkeypatch.undo()
    assert (await rig.kubelet.prepare(asked)).claims[asked["uid"]].error == ""


async def test_an_api_server_that_says_nothing_is_not_waited_for_long(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "READ_SECONDS", 0.2)
    asked = rig.claim("c", result("cards", A.id))
    rig.api.fail("hang", contains="resourceclaims")
    answer = await rig.kubelet.prepare(asked)
    assert "did not say within 0 s which devices" in answer.claims[asked["uid"]].error
    assert rig.devices.held == {}
    assert (await rig.kubelet.prepare(asked)).claims[asked["uid"]].error == ""


async def test_an_admin_looks_at_what_others_have_and_takes_nothing(rig: Rig) -> None:
    asked = rig.claim("c", result("cards", A.id))
    await rig.kubelet.prepare(asked)
    looker = rig.claim("looker", result("all", A.id, adminAccess=True), result("all", C.id, adminAccess=True))
    answer = (await rig.kubelet.prepare(looker)).claims[looker["uid"]]
    assert answer.error == "" and [each.device_name for each in answer.devices] == ["tt-a", "tt-c"]
    assert rig.devices.held == {A.id: asked["uid"]} and rig.devices.admin == [A.id, C.id]
    await rig.kubelet.unprepare(looker)
    assert rig.devices.held == {A.id: asked["uid"]}


async def test_a_disk_that_takes_nothing_is_told_and_nothing_is_half_given(rig: Rig) -> None:
    asked = rig.claim("c", result("cards", A.id))
    rig.places.cdi.rmdir() if rig.places.cdi.exists() else None
    rig.places.cdi.write_text("no folder")
    answer = await rig.kubelet.prepare(asked)
    assert "The record of the claim cannot be written" in answer.claims[asked["uid"]].error
    assert rig.devices.held == {} and len(rig.driver.claims) == 0
    rig.places.cdi.unlink()
    assert (await rig.kubelet.prepare(asked)).claims[asked["uid"]].error == ""


async def test_many_calls_for_one_claim_give_its_devices_once(rig: Rig) -> None:
    asked = rig.claim("c", result("cards", A.id))
    answers = await asyncio.gather(*(rig.kubelet.prepare(asked) for _ in range(10)))
    assert all(each == answers[0] for each in answers)
    assert rig.devices.started == [(A.id,)]


async def test_health_comes_at_once_and_with_every_change(rig: Rig) -> None:
    stream = rig.kubelet.health()
    messages = aiter(stream)
    first = await anext(messages)
    assert {each.device.device_name: each.health for each in first.devices} == {
        "tt-a": 1, "tt-b": 1, "tt-c": 1, "kyb-pair0-s0": 1,
    }  # fmt: skip
    assert all(each.device.pool_name == NODE and each.health_check_timeout_seconds == 90 for each in first.devices)
    rig.devices.ail(A.id, "Overheated", "ü" * 2000)
    second = {each.device.device_name: each for each in (await anext(messages)).devices}
    assert second["tt-a"].health == 2 and second["tt-b"].health == 1 and second["tt-b"].message == ""
    assert second["tt-a"].message.startswith("Overheated: üü") and second["tt-a"].message.endswith("...")
    assert 1020 <= len(second["tt-a"].message.encode()) <= 1024
    rig.devices.recover(A.id)
    third = {each.device.device_name: each for each in (await anext(messages)).devices}
    assert third["tt-a"].health == 1 and third["tt-a"].message == ""
    assert rig.driver.health.streams == 1
    stream.cancel()
    await until(lambda: rig.driver.health.streams == 0, "the stream has ended")


async def test_an_open_stream_does_not_hold_up_the_end(rig: Rig) -> None:
    messages = aiter(rig.kubelet.health())
    await anext(messages)
    async with asyncio.timeout(5):
        await rig.stop()
    with pytest.raises(StopAsyncIteration):
        await anext(messages)
    await rig.start()


async def test_health_of_many_devices_comes_in_messages_that_the_kubelet_takes(tmp_path: Path) -> None:
    many = [replace(A, id=f"tt-{number}", healthy=False, reason="Lost", message="x" * 2000) for number in range(2500)]
    async with serving(tmp_path, SimulatedDevices(*many)) as rig:
        messages = aiter(rig.kubelet.health())
        sizes = [await anext(messages) for _ in range(3)]
        assert sum(len(each.devices) for each in sizes) == 2500
        assert max(each.ByteSize() for each in sizes) < 2 * 1024**2


def test_damaged_records_are_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    folder.mkdir()
    for name, text in {
        "u-1": "{", "u-2": "[]", "u-3": json.dumps({"uid": "u-4", "namespace": "", "name": "", "devices": []}),
        "u-5": json.dumps({"uid": "u-5", "namespace": "n", "name": "c", "devices": [{"request": 3}]}),
    }.items():  # fmt: skip
        (folder / f"{name}.json").write_text(text)
    claims = PreparedClaims(folder, tmp_path / "cdi")
    claims.open()
    assert len(claims) == 0
    assert sorted(file.name for file in folder.iterdir()) == [f"u-{number}.damaged" for number in (1, 2, 3, 5)]


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("uid", ["", "../../etc/passwd", "a/b", "-", "x" * 65, "a\n"])
async def test_no_uid_leads_out_of_the_folder(rig: Rig, tmp_path: Path, uid: str) -> None:
    before = everything(tmp_path)
    asked = rig.claim("c", result("cards", A.id), uid=uid)
    assert "is not a UID of a ResourceClaim" in (await rig.kubelet.prepare(asked)).claims[uid].error
    assert rig.devices.held == {}
    assert (await rig.kubelet.unprepare(asked)).claims[uid].error == ""
    assert everything(tmp_path) == before


async def test_seats_and_cards_are_published(rig: Rig) -> None:
    await until(lambda: rig.driver.publisher.published == 1, "published")
    ((_, body),) = rig.api.objects(RESOURCESLICES).items()
    resources = {each["attributes"]["resource"]["string"] for each in body["spec"]["devices"]}
    assert resources == {N150, SEAT}
