"""What is refused under a real kubelet: each time the cache says why, in a condition and an Event, and goes on serving
what it served. The registry is one in this process, for a real one neither lies nor sends manifests without end.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from images.descriptor import OCI_MANIFEST
from images.endpoints import Settings
from stack.realnode import unavailable
from tests.images import archives, caches, hostile
from tests.images.signatures.rig import new_key, public_pem
from tests.nodeworkers.caches.rig import Publisher
from tests.nodeworkers.caches.test_refusals import CONFIG, within
from tests.nodeworkers.csi_rig import CAPTURED, needs_mounts
from tests.nodeworkers.pods import pod
from tests.nodeworkers.whole import Cluster, whole

pytestmark = [
    *needs_mounts,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "possible"),
]

KIND = "tritonkernelcache"
ENDLESS = "sha256:" + "ab" * 32


@contextmanager
def serving() -> Iterator[hostile.Registry]:
    """The registry, in a thread of its own: the tests block."""
    loop, registry = asyncio.new_event_loop(), hostile.Registry()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(registry.__aenter__(), loop).result(10)
    try:
        yield registry
    finally:
        asyncio.run_coroutine_threadsafe(registry.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@dataclass
class Refusing:
    """A cluster in which pods have a good cache mounted, and whoever makes bad ones."""

    cluster: Cluster
    registry: hostile.Registry
    publisher: Publisher
    folder: Path
    good: str = ""

    def kernels(self, name: str, **how: Any) -> Path:
        folder = self.folder / name
        caches.kernel(folder, seed=name, at=CAPTURED, **how)
        return folder

    def point(self, target: str) -> None:
        """Has the cache name another image: a digest or a tag."""
        separator = "@" if target.startswith("sha256:") else ":"
        self.cluster.apply(self.cluster.cache("llama", f"{self.publisher.image}{separator}{target}"))

    def told(self, *said: str) -> None:
        """Waits until the cache says it in a condition that tells of trouble, and in an Event."""

        def says(text: str) -> bool:
            return all(each in text for each in said)

        def seen() -> bool:
            for condition, bad in (("Error", "True"), ("Ready", "False")):
                truth, reason, message = self.cluster.condition(KIND, "llama", condition)
                if truth == bad and says(f"{reason}: {message}"):
                    return True
            return False

        self.cluster.until(f"the cache says {said}", seen)
        self.cluster.until(f"an Event says {said}", lambda: any(map(says, self.cluster.events("llama").splitlines())))

    def still_served(self, pod_name: str) -> None:
        """By the pod that has it, by the node, and to a pod that comes now."""
        assert self.cluster.served("llama") == self.good
        mine = self.cluster.inside("holder", f"cat {CAPTURED}/*/add.ttir")
        assert mine == "module good"
        self.cluster.apply(pod(pod_name, "llama"))
        self.cluster.running(pod_name)
        assert self.cluster.inside(pod_name, f"cat {CAPTURED}/*/add.ttir") == mine
        self.cluster.stack.kubectl("-n", "team-a", "delete", "pod", pod_name, "--wait=false")


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refusing]:
    key = new_key()
    with serving() as registry, whole(tmp_path_factory.mktemp, {registry.host: public_pem(key)}) as cluster:
        publisher = Publisher(settings=Settings(insecure=frozenset({registry.host})), host=registry.host, key=key)
        made = Refusing(cluster, registry, publisher, tmp_path_factory.mktemp("made"))
        made.good = asyncio.run(publisher.push(made.kernels("good")))
        made.point(made.good)
        cluster.until_condition("llama", "Ready", "True", "Ready")
        cluster.apply(pod("holder", "llama"))
        cluster.running("holder")
        yield made


async def signed_by_nobody_who_counts(made: Refusing) -> str:
    return await made.publisher.push(made.kernels("wrong-key"), signed=new_key())


async def for_another_gpu(made: Refusing) -> str:
    return await made.publisher.push(made.kernels("hip", target=caches.HIP))


async def out_of_its_folder(made: Refusing) -> str:
    return await made.publisher.push_raw(CONFIG, archives.layer(within("../../../../escape")))


async def a_bomb(made: Refusing) -> str:
    return await made.publisher.push_raw(CONFIG, archives.layer(within("zeros", bytes(64 * 2**20))))


async def of_no_bytes(made: Refusing) -> str:
    return await made.publisher.push_raw(CONFIG, b"")


async def lied_about(made: Refusing) -> str:
    digest = await made.publisher.push(made.kernels("lied"))
    (layer,) = json.loads(made.registry.manifests[digest][0])["layers"]
    blob = made.registry.blobs[layer["digest"]]
    made.registry.trick(layer["digest"], hostile.answering(200, blob[:-1] + bytes([blob[-1] ^ 1])))
    return digest


async def without_end(made: Refusing) -> str:
    """Signed, so that the node asks for the manifest: two GiB of it."""
    await made.publisher.sign(ENDLESS, 2**31, OCI_MANIFEST, made.publisher.key)
    made.registry.trick(f"manifests/{ENDLESS}", hostile.endless())
    return ENDLESS


async def without_end_by_tag(made: Refusing) -> str:
    """The control plane asks, for the digest."""
    made.registry.trick("manifests/endless", hostile.endless())
    return "endless"


async def away(made: Refusing) -> str:
    digest = await made.publisher.push(made.kernels("away"))
    made.registry.trick(digest, hostile.answering(503))
    return digest


REFUSED: dict[Callable[[Refusing], Any], tuple[str, ...]] = {
    signed_by_nobody_who_counts: ("is not by this key",),
    for_another_gpu: ("Incompatible", "gfx942"),
    out_of_its_folder: ("..",),
    a_bomb: ("it is a bomb",),
    of_no_bytes: ("0 bytes",),
    lied_about: ("digest",),
    without_end: ("longer than the 4194304 bytes",),
    without_end_by_tag: ("TooLarge", "longer than the 4194304 bytes"),
    away: ("RegistryAway",),
}


@pytest.mark.parametrize("image", REFUSED, ids=lambda image: str(image.__name__).replace("_", "-"))
def test_what_is_wrong_with_an_image_is_told_and_the_old_one_serves_on(
    refusing: Refusing, image: Callable[[Refusing], Any]
) -> None:
    refusing.point(asyncio.run(image(refusing)))
    refusing.told(*REFUSED[image])
    refusing.still_served(f"later-{list(REFUSED).index(image)}")


def test_a_key_that_is_missing(refusing: Refusing) -> None:
    """No policy names one for these images."""
    cluster, image = refusing.cluster, f"{refusing.cluster.registry.host}/elsewhere/cache:v1"
    layout = str(refusing.folder / "elsewhere-image")
    cluster.berth("cache", "build", str(refusing.kernels("elsewhere")), "--out", layout)
    cluster.berth("cache", "push", layout, image, "--insecure", cluster.registry.host)
    cluster.apply(cluster.cache("llama", image))
    refusing.told("no KernelCachePolicy says who must have signed")
    refusing.still_served("later-key")
