"""A cache is prepared: verified, checked for the GPUs, extracted, shown; nothing is done twice, and the newest order
wins.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from aiohttp import web
from temporalio.exceptions import ApplicationError

from images.descriptor import Manifest
from kube.resources import TRITONKERNELCACHENODESTATUSES, TRITONKERNELCACHES
from nodeworkers.caches.pulling import Incoming
from planning.caches.orders import SUPERSEDED
from planning.caches.volumes import Admission, Refusal, VolumeRequest, admit
from tests.images import caches, hostile
from tests.nodeworkers.caches.rig import MI300X, Rig

DEADLINE = 20.0


def kernels(folder: Path, *targets: object, seed: str = "add") -> Path:
    for number, target in enumerate(targets or (caches.CUDA,)):
        caches.kernel(folder, f"{seed}{number}", target=target)  # type: ignore[arg-type]
    return folder


def asked(name: str = "llama") -> VolumeRequest:
    return VolumeRequest("TritonKernelCache", name, "", False, "p", "team-a", "server")


def layers(registry: hostile.Registry, digest: str) -> list[str]:
    data, media = registry.manifests[digest]
    return [each.digest for each in Manifest.read(data, digest, media).layers()]


def fetched(registry: hostile.Registry) -> list[str]:
    """The manifests and blobs that were asked for, by tag or digest."""
    paths = [path.partition("?")[0].split("/") for method, path, _ in registry.requests if method == "GET"]
    return [parts[-1] for parts in paths if parts[-2] in ("manifests", "blobs")]


async def test_from_a_signed_image_to_a_mount(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    report = await rig.prepare(ref, digest)
    assert (report.outcome, report.reason, report.serves, report.epoch) == ("ready", "Verified", digest, 1)
    row = rig.row(ref)
    assert row.serves == digest == row.digest and row.mount_path == caches.AT and row.signatures and row.epoch == 1
    assert isinstance(admit(asked(), rig.ledger.caches("llama")), Admission)
    (content,) = rig.store.lower(row.digest, row.mount_path)
    assert list(content.rglob("add.cubin"))
    status = rig.told(ref)["status"]
    assert (status["digest"], status["targetDigest"], status["kernels"]) == (digest, digest, 1)
    assert (status["gpuType"], status["driverVersion"]) == ("NVIDIA H100", "580.10")
    assert {kind: found[:2] for kind, found in rig.conditions(ref).items()} == {
        "Verified": ("True", "Verified"), "Compatible": ("True", "Compatible"),
        "HitPredicted": ("Unknown", "RuntimeNotGiven"), "Ready": ("True", "Ready"),
    }  # fmt: skip
    assert rig.clean() and rig.beats


async def test_again_nothing_is_fetched_but_the_signatures(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    await rig.prepare(ref, digest)
    registry.requests.clear()
    assert (await rig.prepare(ref, digest)).outcome == "ready"
    again = fetched(registry)
    assert digest.replace(":", "-") in again, "the signatures are asked for anew"
    assert not {*layers(registry, digest)} & {*again}


async def test_a_second_cache_of_the_same_image_fetches_it_no_more(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    (layer,) = layers(registry, digest)

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.2)  # so that both are at it, and it is not called silent
        return await registry.honest(request)

    registry.trick(layer, slow)
    rig.settle(verifyEnabled=False)
    one, other = rig.cache("one"), rig.cache("other")
    reports = await asyncio.gather(rig.prepare(one, digest), rig.prepare(other, digest))
    assert [report.outcome for report in reports] == ["ready", "ready"]
    assert fetched(registry).count(layer) == 1


async def test_an_index_gives_each_node_the_image_for_its_gpus(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    digest = await rig.push(kernels(tmp_path / "cache", caches.CUDA, caches.HIP), index=True)
    ref = rig.cache()
    assert (await rig.prepare(ref, digest)).serves == digest
    nvidia = rig.row(ref)
    assert nvidia.goal == digest != nvidia.digest
    registry.requests.clear()
    assert (await rig.prepare(ref, digest)).outcome == "ready"
    assert digest not in fetched(registry), "which image it is was remembered"
    rig.hardware.gpus = (MI300X,)
    report = await rig.prepare(ref, digest)
    amd = rig.row(ref)
    assert report.outcome == "ready" and amd.goal == digest and amd.digest != nvidia.digest
    assert amd.last_known_good == nvidia.digest
    assert rig.told(ref)["status"]["gpuType"] == "AMD MI300X"


async def test_gpus_that_nothing_fits_are_told_before_any_layer_comes(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    plain = await rig.push(kernels(tmp_path / "plain"))
    index = await rig.push(kernels(tmp_path / "index", caches.CUDA), index=True)
    rig.hardware.gpus = (MI300X,)
    ref = rig.cache()
    for epoch, digest in enumerate((plain, index), 1):
        report = await rig.prepare(ref, digest, epoch)
        assert (report.outcome, report.reason, report.serves) == ("incompatible", "Incompatible", "")
        assert "gfx942" in report.message
        assert rig.conditions(ref)["Compatible"][:2] == ("False", "Incompatible")
    assert not {*layers(registry, plain)} & {*fetched(registry)}
    refused = admit(asked(), rig.ledger.caches("llama"))
    assert isinstance(refused, Refusal) and "does not fit the GPUs of this node" in refused.message


async def test_gpus_that_are_not_known_yet_are_waited_for(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    rig.hardware.gpus, rig.hardware.problem = None, "The driver does not answer."
    report = await rig.prepare(rig.cache(), digest)
    assert (report.outcome, report.reason, report.within) == ("retrying", "HardwareUnknown", 60.0)
    assert report.message == "The driver does not answer."


async def test_the_path_of_the_mount_and_the_prediction_are_the_specs(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    runtime = {"triton": "3.5.0", "ptxas": "12.9.86"}
    ref = rig.cache(mountPath="/elsewhere", runtime=runtime)
    assert (await rig.prepare(ref, digest)).outcome == "ready"
    assert rig.row(ref).mount_path == "/elsewhere" == rig.told(ref)["status"]["mountPath"]
    assert rig.conditions(ref)["HitPredicted"][:2] == ("False", "TritonDiffers")


async def test_never_takes_only_what_is_there(rig: Rig, registry: hostile.Registry, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache", caches.CUDA, caches.HIP), index=True)
    never = rig.cache("never", image={"pullPolicy": "Never"})
    report = await rig.prepare(never, digest)
    assert (report.outcome, report.reason) == ("failed", "NotOnNode")
    await rig.prepare(rig.cache("other"), digest)
    registry.requests.clear()
    report = await rig.prepare(never, digest, 2)
    assert report.outcome == "ready", report.message
    assert digest not in fetched(registry)


async def test_always_asks_for_the_manifest_and_fetches_no_layer_twice(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache(image={"pullPolicy": "Always"})
    await rig.prepare(ref, digest)
    registry.requests.clear()
    assert (await rig.prepare(ref, digest)).outcome == "ready"
    assert digest in fetched(registry) and not {*layers(registry, digest)} & {*fetched(registry)}


async def test_what_an_image_says_wrongly_is_told_and_its_kernels_decide(rig: Rig, tmp_path: Path) -> None:
    """Labels for two targets, kernels of one: a warning. Kernels of another: incompatible, and nothing is kept."""
    cuda = await rig.push(kernels(tmp_path / "cache", caches.CUDA))
    lying = await rig.relabelled(cuda, caches.CUDA, caches.HIP)
    ref = rig.cache()
    assert (await rig.prepare(ref, lying)).outcome == "ready"
    assert "Its labels say cuda sm_90" in rig.conditions(ref)["Ready"][2]
    wrong = await rig.relabelled(await rig.push(kernels(tmp_path / "hip", caches.HIP)), caches.CUDA)
    report = await rig.prepare(ref, wrong, 2)
    assert (report.outcome, report.serves) == ("incompatible", lying)
    assert rig.store.get(wrong) is None and rig.clean()


# ---- orders


async def test_an_older_order_is_refused_however_late_it_comes(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    await rig.prepare(ref, digest, 5)
    for act in (rig.prepare(ref, digest, 4), rig.remove(ref, 4)):
        report = await act
        assert (report.outcome, report.reason, report.newest, report.epoch) == ("retrying", SUPERSEDED, 5, 4)
        assert report.serves == digest and rig.row(ref).state == "Ready", "nothing was done"
    assert (await rig.remove(ref, 6)).outcome == "removed"
    report = await rig.prepare(ref, digest, 5)
    assert (report.newest, report.serves) == (6, "") and "Order 5 is older than 6" in report.message
    assert rig.ledger.cache(ref.uid) is None


async def test_a_newer_order_ends_the_older_that_is_under_way(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    first, second = await rig.push(kernels(tmp_path / "a")), await rig.push(kernels(tmp_path / "b", seed="b"))
    reached = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        reached.set()
        await asyncio.sleep(DEADLINE)
        return web.Response(status=500)

    registry.trick(layers(registry, first)[0], hang)
    ref = rig.cache()
    old = asyncio.create_task(rig.prepare(ref, first, 1))
    async with asyncio.timeout(DEADLINE):
        await reached.wait()
        report = await rig.prepare(ref, second, 2)
        assert report.serves == second
        with pytest.raises(ApplicationError) as ended:
            await old
    assert ended.value.type == SUPERSEDED and rig.row(ref).epoch == 2


async def test_cancelled_midway_it_leaves_nothing_half_made_and_goes_on_later(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    folder = kernels(tmp_path / "cache")
    (folder / "noise").write_bytes(os.urandom(3_000_000))
    digest = await rig.push(folder)
    (layer,) = layers(registry, digest)
    blob = registry.blobs[layer]
    halfway = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(blob))})
        await response.prepare(request)
        await response.write(blob[:2_000_000])
        halfway.set()
        await asyncio.sleep(DEADLINE)
        return response

    registry.trick(layer, half, 1)
    ref, env = rig.cache(), rig.env()
    running = asyncio.create_task(rig.prepare(ref, digest, env=env))
    async with asyncio.timeout(DEADLINE):
        await halfway.wait()
        while not list((rig.folder / "incoming").rglob("*.part")) or rig.arrived() < 1_000_000:
            await asyncio.sleep(0.01)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert rig.row(ref).state == "Pending" and not list((rig.store.root / "staging").iterdir())
    registry.requests.clear()
    assert (await rig.prepare(ref, digest)).outcome == "ready"
    (headers,) = registry.asked(layer)
    assert headers["Range"].startswith("bytes=") and rig.clean()


async def test_what_was_given_up_goes_with_the_next_pull(rig: Rig, tmp_path: Path) -> None:
    """Newer images may come for weeks while the process runs, each before the last had come whole."""
    for name, age in (("fresh", 3600.0), ("old", 2 * 86400.0)):
        folder = rig.folder / "incoming" / name
        folder.mkdir()
        (folder / "x.part").write_bytes(b"x")
        os.utime(folder, (time.time() - age, time.time() - age))
    assert (await rig.prepare(rig.cache(), await rig.push(kernels(tmp_path / "cache")))).outcome == "ready"
    assert [place.name for place in (rig.folder / "incoming").iterdir()] == ["fresh"]


async def test_what_is_being_fetched_is_never_given_up(tmp_path: Path) -> None:
    incoming, digest = Incoming(tmp_path / "incoming"), f"sha256:{'ab' * 32}"
    folder = tmp_path / "incoming" / ("ab" * 32)
    folder.mkdir()
    os.utime(folder, (0, 0))
    assert incoming.sweep({digest}) == 0 and folder.exists()
    assert incoming.sweep() == 1 and not folder.exists()


# ---- removal


async def test_a_removal_waits_for_pods_and_leaves_nothing(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    await rig.prepare(ref, digest)
    mounts = [rig.mount(ref, f"pod-{number}") for number in range(5)]
    report = await rig.remove(ref)
    assert (report.outcome, report.pods, report.serves) == ("busy", 5, "")
    few = "team-a/name-pod-0, team-a/name-pod-1, team-a/name-pod-2"
    assert report.message == f"5 pods have it mounted: {few} and 2 more."
    refused = admit(asked(), rig.ledger.caches("llama"))
    assert isinstance(refused, Refusal) and "is being deleted" in refused.message
    assert rig.conditions(ref)["Ready"][:2] == ("False", "Removing")
    rig.beats.clear()
    waiting = asyncio.create_task(rig.remove(ref, pods=5))
    async with asyncio.timeout(DEADLINE):
        while not rig.beats:
            await asyncio.sleep(0.01)
        rig.ledger.remove_mount(mounts[0].volume_id)
        report = await waiting
        assert (report.outcome, report.pods) == ("busy", 4), "it waited until one was gone"
        waiting = asyncio.create_task(rig.remove(ref, pods=4))
        for mount in mounts[1:]:
            rig.ledger.remove_mount(mount.volume_id)
        report = await waiting
        if report.outcome == "busy":  # it saw some of them go
            report = await rig.remove(ref)
    assert (report.outcome, report.pods) == ("removed", 0)
    assert rig.ledger.cache(ref.uid) is None and not rig.api.objects(TRITONKERNELCACHENODESTATUSES)
    assert (await rig.remove(ref)).outcome == "removed", "once more is no harm"


async def test_it_comes_back_after_a_removal_without_being_fetched_again(
    rig: Rig, registry: hostile.Registry, tmp_path: Path
) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    await rig.prepare(ref, digest, 1)
    rig.mount(ref)
    await rig.remove(ref, 2)
    registry.requests.clear()
    assert (await rig.prepare(ref, digest, 3)).serves == digest
    assert not {*layers(registry, digest)} & {*fetched(registry)}


async def test_a_cache_that_is_gone_leaves_nothing(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    await rig.prepare(ref, digest)
    rig.api.remove(TRITONKERNELCACHES, "llama", "team-a")
    again = rig.cache()
    assert again.uid != ref.uid
    report = await rig.prepare(ref, digest, 2)
    assert (report.outcome, report.reason, report.serves) == ("failed", "Gone", "")
    assert rig.ledger.cache(ref.uid) is None and not rig.api.objects(TRITONKERNELCACHENODESTATUSES)
    assert (await rig.prepare(again, digest)).outcome == "ready"
    assert rig.told(again)["spec"]["kernelCacheRef"]["uid"] == again.uid


async def test_a_cache_that_is_being_deleted_is_not_prepared(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    leaving = {"finalizers": ["x"], "deletionTimestamp": "2026-11-22T12:00:00Z"}
    rig.api.put(TRITONKERNELCACHES, "llama", "team-a", metadata=leaving)
    report = await rig.prepare(ref, digest)
    assert (report.outcome, report.reason) == ("failed", "Deleting")


async def test_what_is_needed_is_not_driven_out_by_another(rig: Rig, tmp_path: Path) -> None:
    """The quota holds two of three; the one that nobody has goes."""
    digests = []
    for name in "abc":
        folder = kernels(tmp_path / name, seed=name)
        (folder / "noise").write_bytes(os.urandom(400_000))
        digests.append(await rig.push(folder))
    one, two, three = (rig.cache(name) for name in ("one", "two", "three"))
    await rig.prepare(one, digests[0])
    await rig.prepare(two, digests[1])
    rig.store.quota = sum(cached.size for cached in rig.store.cached()) + 50_000
    report = await rig.prepare(three, digests[2])
    assert (report.outcome, report.reason) == ("retrying", "NoSpace") and "in use" in report.message
    await rig.remove(one)
    assert (await rig.prepare(three, digests[2], 2)).outcome == "ready"
    assert rig.store.get(digests[0]) is None and rig.store.get(digests[1]) is not None
