"""Blobs into files: whole or not there, gone on with where they broke off, and believed by their digest alone."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from images import download
from images.descriptor import Descriptor
from images.errors import RegistryError
from images.registry import Registry, side_by_side
from tests.images import hostile
from tests.images.hostile import IMPATIENT, an_image, answering, cutting, descriptor, endless

IMAGE = an_image()
BLOB = IMAGE.layers[0]
LAYER = descriptor(BLOB)


@pytest.fixture
def server(server: hostile.Registry) -> hostile.Registry:
    server.has(IMAGE)
    return server


async def failing(registry: Registry, server: hostile.Registry, into: Path, blob: Descriptor = LAYER) -> RegistryError:
    with pytest.raises(RegistryError) as caught:
        await registry.blob(server.reference(), blob, into)
    assert into.name not in os.listdir(into.parent), "what is not whole has no name"
    return caught.value


def ranges(server: hostile.Registry) -> list[str | None]:
    return [headers.get("Range") for headers in server.asked("/blobs/")]


async def test_a_blob_becomes_a_file(registry: Registry, server: hostile.Registry, tmp_path: Path) -> None:
    told: list[int] = []
    await registry.blob(server.reference(), LAYER, tmp_path / "layer", told.append)
    assert (tmp_path / "layer").read_bytes() == BLOB
    assert told == sorted(told) and told[-1] == len(BLOB) and len(told) > 1
    assert os.listdir(tmp_path) == ["layer"]


async def test_a_connection_that_breaks_is_taken_up(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    server.trick("/blobs/", cutting(BLOB, 1_200_000), times=2)
    await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert (tmp_path / "layer").read_bytes() == BLOB
    last = len(BLOB) - 1
    assert ranges(server) == [None, f"bytes=1200000-{last}", f"bytes=2400000-{last}"]


async def test_what_another_process_left_is_gone_on_with(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    (tmp_path / "layer.part").write_bytes(BLOB[:2_000_000])
    await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert ranges(server) == [f"bytes=2000000-{len(BLOB) - 1}"]
    assert (tmp_path / "layer").read_bytes() == BLOB
    (tmp_path / "again.part").write_bytes(BLOB)
    await registry.blob(server.reference(), LAYER, tmp_path / "again")
    assert len(ranges(server)) == 1, "all of it was there"


@pytest.mark.parametrize("left", [b"x" * 2_000_000, BLOB[:-1] + b"?", BLOB + b"more"])
async def test_what_was_left_and_is_wrong_is_not_the_registrys_fault(
    registry: Registry, server: hostile.Registry, tmp_path: Path, left: bytes
) -> None:
    (tmp_path / "layer.part").write_bytes(left)
    await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert (tmp_path / "layer").read_bytes() == BLOB


@pytest.mark.parametrize(
    "handler",
    [
        answering(200, BLOB),
        answering(416),
        answering(206, BLOB[:10], Content_Range="bytes 0-9/*"),
        answering(206, BLOB[:10], Content_Range="nonsense"),
    ],
)
async def test_a_registry_without_ranges_sends_all_again(
    registry: Registry, server: hostile.Registry, tmp_path: Path, handler: hostile.Handler
) -> None:
    (tmp_path / "layer.part").write_bytes(BLOB[:2_000_000])
    server.trick("/blobs/", handler, times=1)
    await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert (tmp_path / "layer").read_bytes() == BLOB


@pytest.mark.parametrize(
    ("handler", "kind", "told"),
    [
        (answering(200, b"x" * len(BLOB)), "lied", "has another digest"),
        (answering(200, BLOB[:-1]), "lied", f"{len(BLOB) - 1} bytes of it, where the manifest promises {len(BLOB)}"),
        (answering(200, b""), "lied", "0 bytes of it"),
        (answering(200, BLOB + b"x"), "lied", "bytes of it, where the manifest promises"),
        (endless(), "lied", "sends more than"),
        (cutting(BLOB, 10, promised=2**40), "lied", f"{2**40} bytes of it"),
        (cutting(BLOB, 0), "away", "cut the connection"),
        (answering(404), "not_found", "does not have it"),
        (answering(302, Location="http://elsewhere.example/"), "lied", "plain http"),
    ],
)
async def test_a_blob_that_is_not_what_was_promised(
    registry: Registry, server: hostile.Registry, tmp_path: Path, handler: hostile.Handler, kind: str, told: str
) -> None:
    server.trick("/blobs/", handler)
    error = await failing(registry, server, tmp_path / "layer")
    assert (error.kind, told in str(error)) == (kind, True), str(error)
    assert len(server.requests) < 8
    part = tmp_path / "layer.part"
    assert not part.exists() or part.stat().st_size <= len(BLOB)


async def test_a_registry_that_cuts_every_time_is_left(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    server.trick("/blobs/", cutting(BLOB, 1000))
    error = await failing(registry, server, tmp_path / "layer")
    assert error.kind == "away" and "cut the connection 16 times" in str(error)
    assert (tmp_path / "layer.part").stat().st_size == 16_000, "and what came is kept for the next attempt"


async def test_a_registry_that_falls_silent_midway(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(BLOB)
        await response.prepare(request)
        await response.write(BLOB[:1_500_000])
        await asyncio.sleep(60)
        return response

    server.trick("/blobs/", stall, times=1)
    await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert ranges(server)[1] == f"bytes=1500000-{len(BLOB) - 1}"


async def test_a_blob_that_comes_too_slowly_is_given_up(
    server: hostile.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("images.download._GRACE", 0.0)

    async def drip(request: web.Request) -> web.StreamResponse:
        start = request.http_range.start or 0
        response = web.StreamResponse(status=206 if start else 200)
        response.headers["Content-Range"] = f"bytes {start}-{len(BLOB) - 1}/{len(BLOB)}"
        response.content_length = len(BLOB) - start
        await response.prepare(request)
        for at in range(start, len(BLOB)):
            await response.write(BLOB[at : at + 1])
            await asyncio.sleep(0.05)
        return response

    server.trick("/blobs/", drip)
    slow = replace(server.settings, timeouts=replace(IMPATIENT, slowest=2_000_000))
    started = time.monotonic()
    async with Registry(slow) as registry:
        assert (await failing(registry, server, tmp_path / "layer")).kind == "away"
    assert time.monotonic() - started < 5, "though a byte came all the time"


@pytest.mark.parametrize(
    ("blob", "kind", "told"),
    [
        (Descriptor("a/b", LAYER.digest, 8 * 2**30 + 1), "too_large", "where 8589934592 are allowed"),
        (descriptor(b""), "malformed", "it is empty (0 bytes)"),
    ],
)
async def test_what_is_not_even_asked_for(
    registry: Registry, server: hostile.Registry, tmp_path: Path, blob: Descriptor, kind: str, told: str
) -> None:
    error = await failing(registry, server, tmp_path / "layer", blob)
    assert error.kind == kind and told in str(error)
    assert not server.requests


async def test_the_next_mirror_goes_on(server: hostile.Registry, tmp_path: Path) -> None:
    async with hostile.Registry() as mirror:
        mirror.trick("/blobs/", cutting(BLOB, 1_000_000), times=1)
        mirror.trick("/blobs/", answering(503, Retry_After="99"))
        settings = replace(
            server.settings,
            mirrors={server.host: (mirror.host,)},
            insecure=frozenset({server.host, mirror.host}),
        )
        async with Registry(settings) as registry:
            await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert ranges(server) == [f"bytes=1000000-{len(BLOB) - 1}"]


async def test_a_mirrors_wrong_beginning_does_not_spoil_the_rest(server: hostile.Registry, tmp_path: Path) -> None:
    async with hostile.Registry() as mirror:
        mirror.trick("/blobs/", cutting(b"x" * len(BLOB), 1_000_000), times=1)
        mirror.trick("/blobs/", answering(404))
        settings = replace(
            server.settings,
            mirrors={server.host: (mirror.host,)},
            insecure=frozenset({server.host, mirror.host}),
        )
        async with Registry(settings) as registry:
            await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert (tmp_path / "layer").read_bytes() == BLOB


async def test_several_blobs_side_by_side(registry: Registry, server: hostile.Registry, tmp_path: Path) -> None:
    image = hostile.Image(b"{}", tuple(bytes([number]) * 100_000 for number in range(8)))
    at_once = most = 0

    async def counted(request: web.Request) -> web.StreamResponse:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.1)
        at_once -= 1
        return await server.honest(request)

    reference = server.has(image)
    server.trick("/blobs/", counted)
    wanted = [(descriptor(layer), tmp_path / str(number)) for number, layer in enumerate(image.layers)]
    await registry.blobs(reference, wanted)
    assert [path.read_bytes() for _, path in wanted] == list(image.layers)
    assert most == 4


async def test_one_of_several_that_fails_ends_all(registry: Registry, server: hostile.Registry, tmp_path: Path) -> None:
    image = hostile.Image(b"{}", tuple(bytes([number]) * 100_000 for number in range(4)))
    reference = server.has(image)
    del server.blobs[descriptor(image.layers[0]).digest]

    async def slow(request: web.Request) -> web.StreamResponse:
        if descriptor(image.layers[0]).digest not in request.path:
            await asyncio.sleep(60)
        return await server.honest(request)

    server.trick("/blobs/", slow)
    started = time.monotonic()
    with pytest.raises(RegistryError) as caught:
        await registry.blobs(
            reference, [(descriptor(layer), tmp_path / str(number)) for number, layer in enumerate(image.layers)]
        )
    assert caught.value.kind == "not_found" and time.monotonic() - started < 5


async def test_what_goes_on_side_by_side_has_ended_when_one_failed() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work(first: bool) -> None:
        if first:
            await begun.wait()
            raise LookupError
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    with pytest.raises(LookupError):
        await side_by_side((True, False), work)
    assert ended.is_set()


async def test_two_processes_do_not_write_into_one_file(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    """The digest is of what came, so a file that somebody else writes into could be wrong and look right."""
    with (tmp_path / "layer.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        error = await failing(registry, server, tmp_path / "layer")
    assert error.kind == "away" and "another process fetches it" in str(error)
    await registry.blob(server.reference(), LAYER, tmp_path / "layer")


async def test_one_that_is_cancelled_while_it_opens_its_file_leaves_it_to_the_next(
    registry: Registry, server: hostile.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, slow, go_on = descriptor(BLOB), threading.Event(), threading.Event()
    server.blobs[blob.digest] = BLOB
    real = download._Part.open

    def opened(path: Path, size: int) -> download._Part | None:
        slow.set()
        assert go_on.wait(10)
        return real(path, size)

    monkeypatch.setattr(download._Part, "open", opened)
    first = asyncio.create_task(registry.blob(server.reference(), blob, tmp_path / "blob"))
    await asyncio.to_thread(slow.wait, 10)
    first.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (tmp_path / "blob.part").exists(), "it was still opened, and whoever cleans up finds it"
    await registry.blob(server.reference(), blob, tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == BLOB


async def test_a_link_in_the_way_is_not_written_through(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / "layer.part").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert (tmp_path / "precious").read_bytes() == b"mine"


async def test_a_full_disk_is_told_and_what_fits_is_kept(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["layer.part"]
    await registry.blob(server.reference(), LAYER, tmp_path / "layer")
    assert (tmp_path / "layer").read_bytes() == BLOB


PULLER = """
import asyncio, sys
from pathlib import Path
from images.descriptor import Descriptor
from images.endpoints import Settings
from images.reference import Reference
from images.registry import Registry, side_by_side
async def main(host, digest, size, into):
    async with Registry(Settings(insecure=frozenset({host}))) as registry:
        await registry.blob(Reference.parse(f"{host}/team/cache:v1"), Descriptor("a/b", digest, int(size)), Path(into))
asyncio.run(main(*sys.argv[1:]))
"""


async def test_killed_at_any_moment_and_gone_on_with(server: hostile.Registry, tmp_path: Path) -> None:
    """SIGKILL while bytes come, time and again: never a file that is not whole, and in the end it is there."""
    into = tmp_path / "layer"

    async def slowly(request: web.Request) -> web.StreamResponse:
        start = request.http_range.start or 0
        response = web.StreamResponse(status=206 if start else 200)
        response.headers["Content-Range"] = f"bytes {start}-{len(BLOB) - 1}/{len(BLOB)}"
        response.content_length = len(BLOB) - start
        await response.prepare(request)
        for at in range(start, len(BLOB), 131_072):
            await response.write(BLOB[at : at + 131_072])
            await asyncio.sleep(0.01)
        return response

    server.trick("/blobs/", slowly)
    kills = 0
    for attempt in range(40):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PULLER, server.host, LAYER.digest, str(LAYER.size), str(into),
            cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL,
        )  # fmt: skip
        before = len(server.requests)
        while len(server.requests) == before and process.returncode is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.03 * (attempt % 7) + 0.01)
        if process.returncode is None:
            process.kill()
            kills += 1
        await process.wait()
        if into.exists():
            break
    assert into.read_bytes() == BLOB and kills >= 2
