"""Which configuration a node follows: through watches, edits of a file, outages, restarts, and what nobody can read."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from crds.gpuseatprofile import GPUSeatProfileSpec
from kube.client import KubeClient
from kube.resources import GPUSEATPROFILES, NODES
from nodeworkers.devices.profiles import KEPT, Profiles
from planning.devices.seats import configured
from tests.crds.test_gpuseatprofile import PAIR, spec
from tests.kube.fake_api import FakeApi
from tests.kube.reflector_rig import Impatient
from tests.planning.devices.test_seats import gpus

NODE = "node-1"
H100 = {"gpu": "h100"}


@asynccontextmanager
async def following(profiles: Profiles) -> AsyncIterator[Profiles]:
    task = asyncio.create_task(profiles.run())
    try:
        yield profiles
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(profiles: Profiles, holds: Callable[[Profiles], bool]) -> None:
    """Waits for a change after which it holds."""
    async with asyncio.timeout(20):
        version = 0
        while not holds(profiles):
            version = await profiles.changed(version if version else profiles.version)


def node(api: FakeApi, labels: dict[str, str] | None = None, name: str = NODE) -> None:
    api.put(NODES, name, metadata={"labels": labels or {}})


def put(api: FakeApi, name: str, wanted: Any, created: str = "2026-11-22T12:00:00Z") -> None:
    api.put(GPUSEATPROFILES, name, spec=wanted, metadata={"creationTimestamp": created})


def from_api(client: KubeClient | None, folder: Path) -> Profiles:
    return Profiles(client, NODE, folder, backoff=Impatient())


async def test_the_profile_that_selects_the_node_is_followed(tmp_path: Path) -> None:
    async with FakeApi() as api, await api.client() as client:
        node(api, H100)
        node(api, {"gpu": "l4"}, "node-2")
        put(api, "others", spec() | {"nodeSelector": {"gpu": "l4"}}, "2026-01-01T00:00:00Z")
        put(api, "pairs", spec(("G01", [0, 1])) | {"nodeSelector": H100})
        async with following(from_api(client, tmp_path)) as profiles:
            await until(profiles, lambda it: it.now.source == "GPUSeatProfile pairs")
            assert profiles.now.spec["gpuTopology"]["groups"] == [{"name": "G01", "gpus": [0, 1]}]
            assert profiles.now.profile is not None and profiles.now.profile.generation == 1
            put(api, "pairs", spec(("G23", [2, 3])) | {"nodeSelector": H100})
            await until(profiles, lambda it: it.now.profile is not None and it.now.profile.generation == 2)
            assert profiles.now.spec["gpuTopology"]["groups"][0]["name"] == "G23"
            node(api, {"gpu": "l4"})
            await until(profiles, lambda it: it.now.source == "GPUSeatProfile others")
            api.remove(GPUSEATPROFILES, "others")
            await until(profiles, lambda it: it.now.source == "")
            assert profiles.now.spec is None
            put(api, "all", spec())
            await until(profiles, lambda it: it.now.source == "GPUSeatProfile all")


async def test_a_status_that_is_written_is_no_news(tmp_path: Path) -> None:
    async with FakeApi() as api, await api.client() as client:
        node(api)
        put(api, "pairs", spec())
        async with following(from_api(client, tmp_path)) as profiles:
            await until(profiles, lambda it: it.now.source != "")
            version = profiles.version
            api.put(GPUSEATPROFILES, "pairs", spec=spec(), status={"seats": 3})
            put(api, "second", spec())
            await until(profiles, lambda it: len(it.now.overruled) == 1)
            assert profiles.version == version + 1
            assert profiles.now.overruled[0].name == "second"


async def test_without_an_api_server_a_node_has_what_it_had(tmp_path: Path) -> None:
    wanted = spec(("G01", [0, 1]))
    async with FakeApi() as api, await api.client() as client:
        node(api)
        put(api, "pairs", wanted)
        async with following(from_api(client, tmp_path)) as profiles:
            await until(profiles, lambda it: it.now.source != "")
            plan = configured(profiles.now.spec, gpus(4))
            await profiles.accept(plan.accepted)
            api.fail(status=503, count=1000)
            api.drop_watches()
            assert profiles.now.spec == wanted
        again = from_api(client, tmp_path)
        assert (again.now, again.last) == (profiles.now, plan.accepted), "before anybody is asked"
        async with following(again):
            seen = len(api.requests)
            async with asyncio.timeout(20):
                while len(api.requests) < seen + 6:
                    await asyncio.sleep(0.005)
            assert again.now == profiles.now
            assert configured(again.now.spec, gpus(4), last=again.last).seats == plan.seats
            api.faults.clear()
            put(api, "pairs", spec(("G12", [1, 2])))
            await until(again, lambda it: it.now.profile is not None and it.now.profile.generation == 2)


async def test_a_kind_that_is_not_served_yet_is_waited_for(tmp_path: Path) -> None:
    async with FakeApi() as api, await api.client() as client:
        node(api)
        fault = api.fail(status=404, reason="NotFound", contains="gpuseatprofiles", count=1000)
        async with following(from_api(client, tmp_path)) as profiles:
            async with asyncio.timeout(20):
                while fault.count > 995:
                    await asyncio.sleep(0.005)
            put(api, "pairs", spec())
            api.faults.clear()
            await until(profiles, lambda it: it.now.source == "GPUSeatProfile pairs")


async def test_profiles_that_cannot_be_listed_are_not_none(tmp_path: Path) -> None:
    async with FakeApi() as api, await api.client() as client:
        node(api)
        put(api, "pairs", spec())
        async with following(from_api(client, tmp_path)) as profiles:
            await until(profiles, lambda it: it.now.source != "")
        fault = api.fail(status=503, contains="gpuseatprofiles", count=1000)
        async with following(from_api(client, tmp_path)) as again:
            async with asyncio.timeout(20):
                while fault.count > 990 or not api.watching:  # the node itself is known by now
                    await asyncio.sleep(0.005)
            assert again.now == profiles.now


async def test_a_node_that_is_gone_from_the_api_server_keeps_its_seats(tmp_path: Path) -> None:
    async with FakeApi() as api, await api.client() as client:
        node(api)
        put(api, "pairs", spec())
        async with following(from_api(client, tmp_path)) as profiles:
            await until(profiles, lambda it: it.now.source != "")
            api.remove(NODES, NODE)
            put(api, "pairs", spec(("G01", [0, 1])))
            put(api, "younger", spec(), "2027-01-01T00:00:00Z")
            node(api, {"back": "yes"})
            await until(profiles, lambda it: len(it.now.overruled) == 1)
            assert profiles.now.profile is not None and profiles.now.profile.generation == 2


async def test_a_bad_edit_keeps_what_was_accepted_also_through_a_restart(tmp_path: Path) -> None:
    async with FakeApi() as api, await api.client() as client:
        node(api)
        put(api, "pairs", spec(("G01", [0, 1])))
        async with following(from_api(client, tmp_path)) as profiles:
            await until(profiles, lambda it: it.now.source != "")
            before = configured(profiles.now.spec, gpus(4), last=profiles.last)
            await profiles.accept(before.accepted)
            put(api, "pairs", spec(("G01", [0, 1]), ("G12", [1, 2])))
            await until(profiles, lambda it: it.now.profile is not None and it.now.profile.generation == 2)
        again = from_api(client, tmp_path)
        after = configured(again.now.spec, gpus(4), last=again.last)
        assert after.seats == before.seats and "GPU 1 is in G01 and in G12" in after.problems[0]
        await again.accept(after.accepted)
        assert from_api(client, tmp_path).last == before.accepted


# A file


def document(wanted: Any) -> str:
    return yaml.safe_dump(
        {"apiVersion": "kyb.ai/v1alpha1", "kind": "GPUSeatProfile", "metadata": {"name": "here"}, "spec": wanted}
    )


def from_file(folder: Path, file: Path) -> Profiles:
    return Profiles(None, NODE, folder, file, poll=0.01)


async def test_a_file_is_followed_and_its_node_selector_selects_nothing(tmp_path: Path) -> None:
    file = tmp_path / "seats.yaml"
    file.write_text(document(spec(("G01", [0, 1])) | {"nodeSelector": {"no": "such"}}))
    async with following(from_file(tmp_path, file)) as profiles:
        await until(profiles, lambda it: it.now.source != "")
        assert profiles.now.source == f"the file {file}" and profiles.now.profile is None
        assert len(configured(profiles.now.spec, gpus(4)).seats) == 4
        beside = tmp_path / "fresh"
        beside.write_text(document(spec()))
        os.replace(beside, file)
        await until(profiles, lambda it: it.now.spec == spec())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "It must be one document with apiVersion kyb.ai/v1alpha1 and kind GPUSeatProfile"),
        (b"{", "It is not YAML that could be JSON"),
        (b"\xff\xfe", "It is not YAML that could be JSON"),
        (b"profiles: []", "Its apiVersion must be kyb.ai/v1alpha1, not None"),
        (document(spec()).replace("GPUSeatProfile", "GPUQuota").encode(), "Its kind must be GPUSeatProfile"),
        (b"apiVersion: kyb.ai/v1alpha1\nkind: GPUSeatProfile\nspec: 3", "It has no spec"),
        (f"{document(spec())}---\n{document(spec())}".encode(), "It must be one document"),
        (document(spec()).encode() + b"when: 2026-11-22", "It is not YAML that could be JSON"),
        (document(spec()).encode() + b"much: .nan", "It is not YAML that could be JSON"),
        (b"a: &a [x]\nb: [*a, *a]", "It has YAML aliases"),
        (b"[" * 20_000, "It is nested more than 16 levels deep"),
        (b"#" * 300_000, "It has more than 256 KiB"),
        (None, "No such file or directory"),
    ],
    ids=range(13),
)  # fmt: skip
async def test_a_file_that_cannot_be_read_leaves_what_was_there(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    file = tmp_path / "seats.yaml"
    file.write_text(document(spec()))
    async with following(from_file(tmp_path, file)) as profiles:
        await until(profiles, lambda it: it.now.source != "")
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        await until(profiles, lambda it: it.now.problem != "")
        assert told in profiles.now.problem and profiles.now.spec == spec()
        file.write_text(document(spec(("G01", [0, 1]))))
        await until(profiles, lambda it: it.now.problem == "")
        assert profiles.now.spec == spec(("G01", [0, 1]))


async def test_a_file_that_went_is_remembered_through_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "seats.yaml"
    file.write_text(document(spec()))
    async with following(from_file(tmp_path, file)) as profiles:
        await until(profiles, lambda it: it.now.source != "")
    file.unlink()
    async with following(from_file(tmp_path, file)) as again:
        assert again.now.spec == spec()
        await until(again, lambda it: it.now.problem != "")
        assert again.now.spec == spec()


def test_somebody_must_say_what_seats_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither can be read"):
        Profiles(None, NODE, tmp_path)


# What is on disk


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"now": 3}', b"\xff", b'{"now": {"source": 1}}', b"[" * 9999])
async def test_what_was_kept_and_cannot_be_read_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / KEPT).write_bytes(content)
    async with FakeApi() as api, await api.client() as client:
        profiles = from_api(client, tmp_path)
        assert profiles.now.source == "" and profiles.last is None
        assert (tmp_path / "seats.damaged").read_bytes() == content and not (tmp_path / KEPT).exists()


async def test_what_another_release_accepted_and_this_one_refuses_is_nothing(tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text(json.dumps({"now": {}, "accepted": {"profiles": [PAIR], "future": 1}}))
    assert from_file(tmp_path, tmp_path / "seats.yaml").last is None
    assert not (tmp_path / "seats.damaged").exists()


async def test_a_disk_that_takes_nothing_does_not_stop_the_seats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, gone = tmp_path / "seats.yaml", tmp_path / "gone"
    file.write_text(document(spec()))
    async with following(from_file(gone, file)) as profiles:
        await until(profiles, lambda it: it.now.source != "")
        file.write_text(document(spec(("G01", [0, 1]))))
        await until(profiles, lambda it: it.now.spec == spec(("G01", [0, 1])))
        accepted, _ = GPUSeatProfileSpec.parse(spec())
        await profiles.accept(accepted)
        assert profiles.last == accepted
    assert f"is not kept in {gone / KEPT}" in caplog.text
