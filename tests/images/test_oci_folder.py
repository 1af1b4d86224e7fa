"""OCI image layouts: made of what a registry has, pushed as they are, and not believed either; and the command line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from berth.cli import command_line
from images.descriptor import OCI_INDEX
from images.errors import RegistryError
from images.oci_folder import FolderError, pull, pull_plain, push
from images.registry import Registry
from tests.images import hostile
from tests.images.hostile import Image, an_image, descriptor, sha256

IMAGE = an_image(100_000)


@pytest.fixture
def server(server: hostile.Registry) -> hostile.Registry:
    server.has(IMAGE)
    return server


def blob(folder: Path, data: bytes) -> Path:
    return folder / "blobs" / "sha256" / sha256(data).removeprefix("sha256:")


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def index_of(folder: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((folder / "index.json").read_text())["manifests"]
    return entries


async def test_a_layout_is_as_the_specification_has_it(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    assert await pull(registry, server.reference(), folder) == IMAGE.descriptor
    assert json.loads((folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    for data in (IMAGE.manifest, IMAGE.config, IMAGE.layers[0]):
        assert blob(folder, data).read_bytes() == data
    name = {"org.opencontainers.image.ref.name": "v1"}
    assert index_of(folder) == [IMAGE.descriptor.as_json() | {"annotations": name}]
    assert sorted(os.listdir(folder)) == ["blobs", "index.json", "oci-layout"]


async def test_what_is_there_and_right_is_not_fetched_again(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    await pull(registry, server.reference(), tmp_path)
    blob(tmp_path, IMAGE.config).write_bytes(b"x" * len(IMAGE.config))
    server.requests.clear()
    await pull(registry, server.reference(), tmp_path)
    assert [path.rpartition("/")[2] for _, path, _ in server.requests] == ["v1", sha256(IMAGE.config)]
    assert blob(tmp_path, IMAGE.config).read_bytes() == IMAGE.config


async def test_several_images_and_a_tag_that_moves(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    other = an_image(1000, b"other")
    await pull(registry, server.reference(), tmp_path)
    await pull(registry, server.has(other, "v2"), tmp_path)
    with pytest.raises(FolderError, match=r"holds v1, v2: none of them is v3"):
        await push(registry, tmp_path, server.reference("v3"))
    assert await push(registry, tmp_path, server.reference("v2")) == other.descriptor
    await pull(registry, server.has(other, "v1"), tmp_path)
    assert [each["digest"] for each in index_of(tmp_path)] == [other.descriptor.digest]


@pytest.mark.parametrize("nested", [False, True])
async def test_an_index_comes_with_its_images(
    registry: Registry, server: hostile.Registry, tmp_path: Path, nested: bool
) -> None:
    index = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [IMAGE.descriptor.as_json()]}).encode()
    server.manifests["multi"] = (index, OCI_INDEX)
    if nested:
        server.manifests[IMAGE.descriptor.digest] = (index, OCI_INDEX)
        with pytest.raises(RegistryError) as caught:
            await pull(registry, server.reference("multi"), tmp_path)
        assert caught.value.kind == "lied"
        return
    top = await pull(registry, server.reference("multi"), tmp_path)
    async with hostile.Registry() as other, Registry(other.settings) as there:
        assert await push(there, tmp_path, other.reference("copy")) == top
        assert set(other.manifests) == {"copy", top.digest, IMAGE.descriptor.digest}
        assert set(other.blobs.values()) == {IMAGE.config, *IMAGE.layers}
        last = [path for method, path, _ in other.requests if method == "PUT"][-1]
        assert last.endswith("/manifests/copy"), "what names others comes after them"
    with pytest.raises(RegistryError, match=IMAGE.descriptor.digest):
        await pull_plain(registry, server.reference("multi"), tmp_path / "plain")


async def test_plain_files(registry: Registry, server: hostile.Registry, tmp_path: Path) -> None:
    await pull_plain(registry, server.reference(), tmp_path / "plain")
    assert {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()} == {
        "manifest.json": IMAGE.manifest,
        "config.json": IMAGE.config,
        "layer-0.tar.gz": IMAGE.layers[0],
    }
    with pytest.raises(FolderError, match="is not empty"):
        await pull_plain(registry, server.reference(), tmp_path / "plain")


def spoil(folder: Path, what: str) -> None:
    match what:
        case "no layout":
            (folder / "oci-layout").unlink()
        case "no index":
            (folder / "index.json").unlink()
        case "an index that is none":
            (folder / "index.json").write_text("[]")
        case "a large index":
            (folder / "index.json").write_bytes(b" " * (4 * 1024 * 1024 + 1))
        case "no manifest":
            blob(folder, IMAGE.manifest).unlink()
        case "another manifest":
            blob(folder, IMAGE.manifest).write_bytes(an_image(5).manifest)
        case "no layer":
            blob(folder, IMAGE.layers[0]).unlink()
        case "another layer":
            blob(folder, IMAGE.layers[0]).write_bytes(b"x" * len(IMAGE.layers[0]))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("no layout", "is no OCI image layout: it has no file oci-layout"),
        ("no index", "index.json is missing"),
        ("an index that is none", "index.json: the manifest is not an object"),
        ("a large index", "index.json is longer than"),
        ("no manifest", "is missing"),
        ("another manifest", "has another digest"),
        ("no layer", "is missing, or not what the manifest says"),
        ("another layer", "is missing, or not what the manifest says"),
    ],
)
async def test_a_folder_that_is_wrong_is_not_pushed(
    registry: Registry, server: hostile.Registry, tmp_path: Path, what: str, told: str
) -> None:
    folder = tmp_path / "folder"
    await pull(registry, server.reference(), folder)
    spoil(folder, what)
    server.requests.clear()
    with pytest.raises(FolderError) as caught:
        await push(registry, folder, server.reference("v2"))
    assert told in str(caught.value) and "v2" not in server.manifests


async def test_a_folder_of_something_else_is_left_alone(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FolderError, match="neither empty nor an OCI image layout"):
        await pull(registry, server.reference(), tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize("get", [pull, pull_plain])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("gone", ["manifests", "blobs", IMAGE.descriptor.digest, sha256(IMAGE.layers[0])])
async def test_a_pull_that_brings_nothing_leaves_nothing(
    registry: Registry, server: hostile.Registry, tmp_path: Path, get: Any, there: bool, gone: str
) -> None:
    folder = tmp_path / "deep" / "folder"
    if there:
        folder.mkdir(parents=True)
    server.trick(gone, hostile.answering(404))
    if gone == sha256(IMAGE.layers[0]):
        server.trick(sha256(IMAGE.config), hostile.answering(404))
    reference = server.reference(IMAGE.descriptor.digest)
    with pytest.raises(RegistryError):
        await get(registry, reference, folder)
    assert everything(tmp_path) == (["deep", "deep/folder"] if there else [])
    server.tricks.clear()
    assert await get(registry, reference, folder) == IMAGE.descriptor


async def test_what_a_pull_was_cut_off_from_is_gone_on_with(
    registry: Registry, server: hostile.Registry, tmp_path: Path
) -> None:
    folder, layer = tmp_path / "folder", sha256(IMAGE.layers[0])
    server.trick(layer, hostile.cutting(IMAGE.layers[0], 40_000), times=1)
    server.trick(layer, hostile.answering(404))
    with pytest.raises(RegistryError):
        await pull(registry, server.reference(), folder)
    assert blob(folder, IMAGE.layers[0]).with_name(f"{layer[7:]}.part").stat().st_size == 40_000
    server.tricks.clear()
    server.requests.clear()
    await pull(registry, server.reference(), folder)
    assert [headers["Range"] for headers in server.asked(layer)] == ["bytes=40000-99999"]
    await push(registry, folder, server.reference("v2"))


# --- the command line


@pytest.fixture
def serving() -> Iterator[hostile.Registry]:
    """The same registry in a thread of its own, for commands have event loops of theirs."""
    server = hostile.Registry()
    started, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with server:
            server.has(IMAGE)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    yield server
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def berth(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(command_line(), ["cache", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_pull_and_push_by_command(serving: hostile.Registry, tmp_path: Path) -> None:
    reference = f"{serving.host}/team/cache"
    code, output = berth("pull", f"{reference}:v1", tmp_path / "folder", "--insecure", serving.host)
    assert (code, output) == (0, f"{reference}@{IMAGE.descriptor.digest}\n")
    code, output = berth("push", tmp_path / "folder", f"{reference}:v2", "--insecure", serving.host)
    assert (code, output) == (0, f"{reference}@{IMAGE.descriptor.digest}\n")
    assert serving.manifests["v2"] == serving.manifests["v1"]
    code, _ = berth("pull", f"{reference}:v2", tmp_path / "plain", "--plain", "--insecure", serving.host)
    assert code == 0 and (tmp_path / "plain" / "config.json").read_bytes() == IMAGE.config


def test_a_mirror_and_credentials_by_command(serving: hostile.Registry, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(json.dumps({"auths": {serving.host: {"auth": "eDp5"}}}))
    code, output = berth(
        "pull", "registry.invalid/team/cache:v1", tmp_path / "folder", "--insecure", serving.host,
        "--mirror", f"registry.invalid={serving.host}", "--credentials", tmp_path / "credentials",
    )  # fmt: skip
    assert (code, output) == (0, f"registry.invalid/team/cache@{IMAGE.descriptor.digest}\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pull", "cache:v1", "{}"], "names no registry"),
        (["pull", "{host}/team/cache:v9", "{}", "--insecure", "{host}"], "does not have it"),
        (["pull", "{host}/team/cache:v1", "{}", "--insecure", "http://x"], "insecure: "),
        (["pull", "{host}/team/cache:v1", "{}", "--mirror", "x"], "must be REGISTRY=MIRROR"),
        (["pull", "{host}/team/cache:v1", "{}", "--authority", "{file}"], "authorities: must be certificates"),
        (["pull", "{host}/team/cache:v1", "{}", "--credentials", "{file}"], "the credentials must be JSON"),
        (
            ["pull", "{host}/team/cache:v1", "{}", "--credentials", "/no/such/file"],
            "error: No such file or directory: /no/such/file",
        ),
        (["pull", "127.0.0.1:9/team/cache:v1", "{}"], "Usually this passes; try again later."),
        (["push", "{}", "{host}/team/cache:v1"], "no OCI image layout"),
    ],
)
def test_mistakes_are_messages(serving: hostile.Registry, tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "file").write_text("nonsense")
    known = {"host": serving.host, "file": tmp_path / "file"}
    code, output = berth(*(each.format(tmp_path / "folder", **known) for each in arguments))
    assert code == 1 and told in " ".join(output.split()), output
    assert os.listdir(tmp_path) == ["file"], "nothing half-made stays"


def test_a_layout_survives_a_pull_that_fails(serving: hostile.Registry, tmp_path: Path) -> None:
    reference = f"{serving.host}/team/cache"
    berth("pull", f"{reference}:v1", tmp_path / "folder", "--insecure", serving.host)
    before = (tmp_path / "folder" / "index.json").read_bytes()
    other = Image(b"{}", (b"other",))
    serving.has(other, "v2")
    del serving.blobs[descriptor(other.layers[0]).digest]
    code, _ = berth("pull", f"{reference}:v2", tmp_path / "folder", "--insecure", serving.host)
    assert code == 1 and (tmp_path / "folder" / "index.json").read_bytes() == before
    shutil.rmtree(tmp_path / "folder")
