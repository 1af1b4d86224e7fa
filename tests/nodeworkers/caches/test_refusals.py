"""What goes wrong while a cache is prepared: each is told as what it is, nothing of it is kept, and what was served
stays, but for an image that is refused itself.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from images import download, layout
from images.extraction import Bounds, Extracted, extract
from images.signatures import limits
from images.triton import folder_name
from kube.resources import KERNELCACHEPOLICIES, SECRETS, TRITONKERNELCACHES
from nodeworkers.caches import obtaining
from planning.caches import labels
from planning.caches.labels import Kind
from planning.caches.orders import CacheRef, Report
from planning.caches.volumes import Refusal, admit
from tests.images import archives, caches, hostile
from tests.images.signatures.rig import new_key
from tests.nodeworkers.caches.rig import MI300X, Rig
from tests.nodeworkers.caches.test_preparing import asked, kernels, layers

GRANTED = (
    'secrets "pull" is forbidden: User "system:serviceaccount:berth-system:berth-node" cannot get resource "secrets"'
)
CONFIG = json.dumps(
    {
        "os": "linux",
        "config": {"Labels": {labels.summary("triton"): json.dumps({"targets": [caches.CUDA]})}},
    }
).encode()
ROOT = layout.cache_folder("triton")


def outcome(report: Report) -> tuple[str, str]:
    return report.outcome, report.reason


async def served(rig: Rig, tmp_path: Path) -> tuple[CacheRef, str]:
    """A cache that is Ready, which whatever follows must leave so. (To check its signature takes a second.)"""
    digest = await rig.push(kernels(tmp_path / "good", seed="good"))
    ref = rig.cache()
    rig.settle(verifyEnabled=False)
    assert (await rig.prepare(ref, digest)).outcome == "ready"
    rig.settle()
    return ref, digest


async def still(rig: Rig, ref: CacheRef, report: Report, good: str) -> None:
    assert report.serves == good == rig.row(ref).serves and rig.row(ref).state == "Ready"
    assert rig.store.lower(rig.row(ref).digest, caches.AT)
    truth, reason, message = rig.conditions(ref)["Ready"]
    assert (truth, reason) == ("True", "PreviousImage") and report.message[:40] in message
    assert rig.told(ref)["status"]["digest"] == good
    assert not list((rig.store.root / "staging").iterdir())


# ---- who has signed


async def test_a_signature_by_nobody_who_counts(rig: Rig, registry: hostile.Registry, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    wrong = await rig.push(kernels(tmp_path / "bad", seed="bad"), signed=new_key())
    registry.requests.clear()
    report = await rig.prepare(ref, wrong, 2)
    assert outcome(report) == ("failed", "SignatureRefused")
    assert not registry.asked(layers(registry, wrong)[0]), "nothing of it was fetched"
    await still(rig, ref, report, good)
    assert rig.conditions(ref)["Verified"][:2] == ("False", "SignatureRefused")
    fresh = rig.cache("fresh")
    assert (await rig.prepare(fresh, wrong)).serves == "" and rig.row(fresh).state == "Failed"
    assert isinstance(admit(asked("fresh"), rig.ledger.caches("fresh")), Refusal)


async def test_no_policy_and_one_that_cannot_be_read(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache()
    rig.api.put(KERNELCACHEPOLICIES, "team", spec={"images": ["elsewhere.example/**"], "signers": [
        {"name": "release", "key": "-----BEGIN PUBLIC KEY-----\nnothing that anybody could read\n"}]})  # fmt: skip
    assert outcome(await rig.prepare(ref, digest)) == ("failed", "NoPolicy")
    rig.api.put(KERNELCACHEPOLICIES, "team", spec={"images": "**"})
    assert outcome(await rig.prepare(ref, digest)) == ("failed", "PolicyUnreadable")
    rig.trust()
    assert outcome(await rig.prepare(ref, digest)) == ("ready", "Verified")


async def test_a_revoked_signer_ends_what_was_served(rig: Rig, tmp_path: Path) -> None:
    """The same image, and a policy that names another key now: it is mounted into new pods no more."""
    ref, good = await served(rig, tmp_path)
    rig.trust(new_key())
    report = await rig.prepare(ref, good, 2)
    assert outcome(report) == ("failed", "SignatureRefused") and report.serves == ""
    refused = admit(asked(), rig.ledger.caches("llama"))
    assert isinstance(refused, Refusal) and "is not Ready on this node: " in refused.message
    assert rig.conditions(ref)["Ready"][:2] == ("False", "SignatureRefused")
    assert "digest" not in rig.told(ref)["status"]
    assert rig.store.get(good) is not None, "pods may have it mounted"
    rig.trust()
    assert (await rig.prepare(ref, good, 3)).serves == good


async def test_a_verifier_that_dies_has_refused_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, good = await served(rig, tmp_path)
    new = await rig.push(kernels(tmp_path / "new", seed="new"))
    with monkeypatch.context() as patched:
        patched.setattr(limits, "WALL_SECONDS", 0.0)
        for digest, epoch in ((good, 2), (new, 3)):
            report = await rig.prepare(ref, digest, epoch)
            assert outcome(report) == ("retrying", "VerifierFailed") and report.within == 60.0
            assert report.serves == good and rig.row(ref).state == "Ready"
            assert rig.conditions(ref)["Verified"][:2] == ("Unknown", "VerifierFailed")
        fresh = rig.cache("fresh")
        assert outcome(await rig.prepare(fresh, new)) == ("retrying", "VerifierFailed")
        assert isinstance(admit(asked("fresh"), rig.ledger.caches("fresh")), Refusal), "and it has admitted nothing"
    assert outcome(await rig.prepare(ref, new, 4)) == ("ready", "Verified")


async def test_the_settings_of_the_installation_decide(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"), signed=new_key())
    ref = rig.cache()
    rig.settle(verifyEnabled=False)
    report = await rig.prepare(ref, digest)
    assert outcome(report) == ("ready", "VerificationDisabled")
    assert rig.conditions(ref)["Verified"][:2] == ("False", "VerificationDisabled")
    rig.settle(verifyEnabled="perhaps")
    assert outcome(await rig.prepare(ref, digest)) == ("retrying", "SettingsRefused")
    rig.settle(registries={"proxy": "nonsense"})
    report = await rig.prepare(ref, digest)
    assert outcome(report) == ("retrying", "SettingsRefused") and "registries.proxy" in report.message
    assert report.serves == digest, "nobody said that the image is bad"


# ---- the pull secret


async def test_a_missing_grant_prints_what_to_apply(rig: Rig, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache(image={"pullSecret": "pull"})
    rig.api.fail(status=403, reason="Forbidden", message=GRANTED, contains="/secrets/pull", count=1)
    report = await rig.prepare(ref, digest)
    assert outcome(report) == ("retrying", "PullSecretNotGranted") and report.within == 60.0
    told = rig.conditions(ref)["Ready"][2]
    for part in (
        "kubectl -n team-a create role", "--resource-name=pull", "create rolebinding",
        "--serviceaccount=berth-system:berth-node", "--serviceaccount=berth-system:berth-worker",
    ):  # fmt: skip
        assert part in told and part in report.message


async def test_a_secret_that_is_missing_or_none(rig: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    ref = rig.cache(image={"pullSecret": "pull"})
    assert outcome(await rig.prepare(ref, digest)) == ("retrying", "PullSecretMissing")
    hidden = "aHVudGVyMi1vZi1hbGwtcGxhY2Vz"
    rig.api.put(SECRETS, "pull", "team-a", type="kubernetes.io/dockerconfigjson", data={".dockerconfigjson": hidden})
    report = await rig.prepare(ref, digest)
    assert outcome(report) == ("retrying", "PullSecretRefused")
    everything = f"{report} {rig.told(ref)} {rig.beats} {caplog.text} {rig.row(ref)}"
    assert hidden not in everything and "hunter2" not in everything


# ---- registries


async def test_a_registry_that_is_away_changes_nothing(rig: Rig, registry: hostile.Registry, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    other = await rig.push(kernels(tmp_path / "other", seed="other"))
    registry.trick("/v2/", hostile.answering(503), 10_000)
    report = await rig.prepare(ref, good, 2)
    assert outcome(report) == ("retrying", "RegistryAway") and 0 < report.within <= 60
    assert report.serves == good and rig.conditions(ref)["Ready"][1] == "Ready"
    assert rig.conditions(ref)["Verified"][0] == "Unknown"
    report = await rig.prepare(ref, other, 3)
    assert outcome(report) == ("retrying", "RegistryAway")
    await still(rig, ref, report, good)


async def test_a_registry_that_asks_to_be_left_alone_is(rig: Rig, registry: hostile.Registry, tmp_path: Path) -> None:
    digest = await rig.push(kernels(tmp_path / "cache"))
    registry.trick("/v2/", hostile.answering(429, Retry_After="77"), 10_000)
    report = await rig.prepare(rig.cache(), digest)
    assert outcome(report) == ("retrying", "RegistryAway") and report.within == 77.0


async def test_a_registry_that_lies_about_a_digest(rig: Rig, registry: hostile.Registry, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    digest = await rig.push(kernels(tmp_path / "other", seed="other"))
    (layer,) = layers(registry, digest)
    blob = registry.blobs[layer]
    registry.trick(layer, hostile.answering(200, blob[:-1] + bytes([blob[-1] ^ 1])), 10_000)
    report = await rig.prepare(ref, digest, 2)
    assert outcome(report) == ("failed", "RegistryLied")
    await still(rig, ref, report, good)
    assert rig.clean()


async def test_a_manifest_without_end(rig: Rig, registry: hostile.Registry, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    rig.settle(verifyEnabled=False)
    digest = "sha256:" + "ab" * 32
    registry.trick(f"manifests/{digest}", hostile.endless(), 10_000)
    report = await rig.prepare(ref, digest, 2)
    assert outcome(report) == ("failed", "TooLarge")
    await still(rig, ref, report, good)


async def test_an_image_that_is_not_there(rig: Rig, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    rig.settle(verifyEnabled=False)
    report = await rig.prepare(ref, "sha256:" + "ab" * 32, 2)
    assert outcome(report) == ("failed", "ImageNotFound")
    await still(rig, ref, report, good)


# ---- hostile images, signed by the right key


def within(name: str, content: bytes = b"x") -> bytes:
    return archives.member(f"{ROOT}/{name}".encode(), content)


def forged() -> bytes:
    """A kernel in a folder of another's hash."""
    metadata = {"hash": "ab" * 32, "target": dict(caches.CUDA), "triton_version": "3.9.0"}
    return archives.layer(within(f"{folder_name('cd' * 32)}/add.json", json.dumps(metadata).encode()))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (archives.layer(archives.member(f"{ROOT}/../../../escape".encode(), b"x")), "Unsafe"),
        (archives.layer(archives.member(b"/etc/escape", b"x")), "Unsafe"),
        (archives.layer(archives.member(f"{ROOT}/link".encode(), type_=b"2", link=b"/etc/passwd")), "Unsafe"),
        (archives.layer(within("zeros", bytes(64 * 2**20))), "TooLarge"),
        (forged(), "Inconsistent"),
        (gzip.compress(b"no archive at all" * 100), "Malformed"),
        (b"not even gzip", "Malformed"),
    ],
    ids=["dot-dot", "absolute", "link", "bomb", "forged-hash", "no-archive", "no-gzip"],
)
async def test_a_hostile_layer_is_refused_and_leaves_nothing(
    rig: Rig, tmp_path: Path, layer: bytes, reason: str
) -> None:
    ref, good = await served(rig, tmp_path)
    digest = await rig.push_raw(CONFIG, layer)
    rig.settle(verifyEnabled=False)
    report = await rig.prepare(ref, digest, 2)
    assert outcome(report) == ("failed", reason), report.message
    await still(rig, ref, report, good)
    assert rig.clean() and rig.store.get(digest) is None
    assert not list((tmp_path / "node").rglob("escape*")) and not os.path.exists("/etc/escape")  # noqa: ASYNC240


async def test_a_layer_of_no_bytes(rig: Rig, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    report = await rig.prepare(ref, await rig.push_raw(CONFIG, b""), 2)
    assert outcome(report) == ("failed", "Malformed") and "0 bytes" in report.message
    await still(rig, ref, report, good)


async def test_an_image_that_is_no_cache(rig: Rig, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    report = await rig.prepare(ref, await rig.push_raw(b'{"os":"linux"}', forged()), 2)
    assert outcome(report) == ("failed", "Unsupported")
    await still(rig, ref, report, good)


async def test_an_extraction_that_takes_too_long_is_tried_again(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, good = await served(rig, tmp_path)
    digest = await rig.push(kernels(tmp_path / "other", seed="other"))

    async def hurried(layers: Sequence[Path], kind: Kind, into: Path) -> Extracted:
        return await extract(layers, kind, into, Bounds(seconds=0))

    monkeypatch.setattr(obtaining, "extract", hurried)
    report = await rig.prepare(ref, digest, 2)
    assert outcome(report) == ("retrying", "TimedOut")
    await still(rig, ref, report, good)
    monkeypatch.undo()
    assert (await rig.prepare(ref, digest, 2)).serves == digest


# ---- the node and the API server


async def test_hardware_that_changed_under_what_is_served(rig: Rig, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    rig.hardware.gpus = (MI300X,)
    report = await rig.prepare(ref, good, 2)
    assert outcome(report) == ("incompatible", "Incompatible") and report.serves == ""
    refused = admit(asked(), rig.ledger.caches("llama"))
    assert isinstance(refused, Refusal) and "does not fit" in refused.message


async def test_an_api_server_that_is_away_changes_nothing(rig: Rig, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    for fault in ("reset", "status", "garbage"):
        rig.api.fail(fault, contains=TRITONKERNELCACHES.plural, count=100)
        report = await rig.prepare(ref, good, 2)
        assert outcome(report) == ("retrying", "APIServerAway") and report.within == 10.0
        assert report.serves == good
        rig.api.faults.clear()
    missing = "injected: the server could not find the requested resource"
    rig.api.fail(status=404, reason="NotFound", message=missing, contains=TRITONKERNELCACHES.plural, count=1)
    report = await rig.prepare(ref, good, 2)
    assert outcome(report) == ("retrying", "APIServerRefused") and report.serves == good, (
        "the CRD is gone, not the cache"
    )


async def test_a_spec_that_cannot_be_read(rig: Rig, tmp_path: Path) -> None:
    ref, good = await served(rig, tmp_path)
    rig.api.put(TRITONKERNELCACHES, "llama", "team-a", spec={"ociImage": {"image": "no registry"}})
    report = await rig.prepare(ref, good, 2)
    assert outcome(report) == ("failed", "InvalidSpec") and report.serves == good


async def test_a_full_disk_is_told_and_freed(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer where there is no room, at the writes of a download."""
    ref, good = await served(rig, tmp_path)
    digest = await rig.push(kernels(tmp_path / "other", seed="other"))

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28), "somewhere")

    monkeypatch.setattr(download._Part, "take", full)
    report = await rig.prepare(ref, digest, 2)
    assert outcome(report) == ("retrying", "DiskFailed") and "No space left" in report.message
    await still(rig, ref, report, good)
    assert rig.clean(), "what came of it would keep the disk full"
    monkeypatch.undo()
    assert (await rig.prepare(ref, digest, 2)).serves == digest
