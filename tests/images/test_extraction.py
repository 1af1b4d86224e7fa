"""Extraction: what is written lies inside and is plain, whatever the layer says; what is refused is told; what hangs or
dies ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from images import extraction
from images.build import Said, build, read
from images.extraction import EXTRACTOR_UID, Bounds, Extracted, extract
from images.extraction_child import Extraction, inspected
from images.folder import Folder
from images.layout import read_manifest
from images.refused import Refused
from images.triton import folder_name
from planning.caches import limits
from planning.caches.compatibility import Target
from planning.caches.labels import Kind
from tests.images import caches
from tests.images.archives import END, layer, long_name, member, pax, short

ROOT = b"io.triton.cache/"
HASH = "ab" * 32
KEY = folder_name(HASH).encode()
METADATA = json.dumps({"hash": HASH, "target": caches.CUDA}).encode()
KERNEL = member(ROOT + KEY + b"/add.json", METADATA)


def packed(folder: Path, out: Path) -> Path:
    """The layer of an image that berth built."""
    built = build(read(folder, Said()), out, tag=None, index=False)
    there = Folder(out)
    manifest = read_manifest(there.read(built.top.digest, limits.MANIFEST_BYTES, "manifest"))
    return there.blob(manifest.layers[0].digest)


def extracted(tmp_path: Path, *layers: bytes, kind: Kind = "triton", **bounds: Any) -> tuple[Extracted, Path]:
    files = []
    for number, body in enumerate(layers):
        files.append(tmp_path / f"layer-{number}")
        files[-1].write_bytes(body)
    into = Path(tempfile.mkdtemp(dir=tmp_path))
    return asyncio.run(extract(files, kind, into, Bounds(**bounds))), into


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """As the child works; whatever it left open below is closed."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for opened in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{opened}").startswith(str(folder)):
                os.close(int(opened))


def refused(tmp_path: Path, *layers: bytes, kind: Kind = "triton", **bounds: Any) -> Refused:
    """What the child refuses, without a process of its own for each of so many."""
    into = Path(tempfile.mkdtemp(dir=tmp_path))
    with working_in(into):
        try:
            work = Extraction(kind, asdict(Bounds(**bounds)))
            for body in layers:
                work.layer(io.BytesIO(body))
            inspected(kind, work.written)
        except Refused as found:
            return found
    raise AssertionError("it was not refused")


def test_what_was_packed_comes_out(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    caches.kernel(folder, "a")
    caches.kernel(folder, "b", target=caches.HIP)
    caches.helper(folder)
    into = tmp_path / "into"
    into.mkdir()
    found = asyncio.run(extract([packed(folder, tmp_path / "image")], "triton", into))
    assert {path.relative_to(into): path.read_bytes() for path in into.rglob("*") if path.is_file()} == {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    assert found.kernels == 2 and found.groups == 2 and found.files == 9
    assert found.targets == (Target("cuda", "90", 32), Target("hip", "gfx942", 64))
    assert (found.triton_version, found.capture_path, found.warnings) == ("3.9.0", caches.AT, ())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up being root")
def test_the_child_is_nobody_and_any_pod_may_read_and_compile_above_it(tmp_path: Path) -> None:
    odd = member(ROOT + KEY + b"/add.so", b"x", mode=0o7777)
    hidden = member(ROOT + KEY + b"/hidden/", type_=b"5", mode=0)
    old = os.umask(0o077)
    try:
        _, into = extracted(tmp_path, layer(KERNEL, odd, hidden, member(ROOT + KEY + b"/hidden/x", mode=0)))
    finally:
        os.umask(old)
    for path in (into, *into.rglob("*")):
        info = path.stat()
        assert info.st_uid == info.st_gid == EXTRACTOR_UID
        assert stat.S_IMODE(info.st_mode) == (0o777 if path.is_dir() else 0o666), path


def test_the_child_keeps_nothing_that_it_does_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from outside while it waits for its layer: no privileges, no new ones, another root, bounded."""
    pipe = tmp_path / "layer"
    os.mkfifo(pipe)
    into = tmp_path / "into"
    into.mkdir()
    pids: list[int] = []
    monkeypatch.setattr(extraction, "_conversation", conversation := Spy(extraction._conversation, pids))

    async def look() -> None:
        keeper = os.open(pipe, os.O_RDWR)  # a layer that never comes
        work = asyncio.create_task(extract([pipe], "triton", into))
        try:
            status = await waiting(conversation)
            assert status["NoNewPrivs"] == "1" and status["Threads"] == "1"
            if os.geteuid() == 0:
                assert status["Uid"].split() == status["Gid"].split() == [str(EXTRACTOR_UID)] * 4
                assert status["Groups"] == "" and status["CapEff"] == status["CapPrm"] == "0" * 16
                assert os.readlink(f"/proc/{pids[0]}/root") == str(into)
                assert os.readlink(f"/proc/{pids[0]}/ns/net") != os.readlink("/proc/self/ns/net")
            bounded = told(pids[0], "limits")
            assert f"Max address space         {limits.GIB}" in bounded and "Max processes             0" in bounded
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            os.close(keeper)

    asyncio.run(look())
    assert not Path(f"/proc/{pids[0]}").exists(), "cancelling ends the child"


class Spy:
    """Notes the child that is talked to."""

    def __init__(self, below: Any, pids: list[int]) -> None:
        self.below, self.pids = below, pids

    async def __call__(self, child: asyncio.subprocess.Process, request: bytes) -> Any:
        self.pids.append(child.pid)
        return await self.below(child, request)


def told(pid: int, what: str) -> str:
    """What the kernel tells of a process."""
    return Path(f"/proc/{pid}/{what}").read_text()


async def waiting(spy: Spy) -> dict[str, str]:
    """The status of the child once it has given up what it does not need, or given up waiting."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        if spy.pids:
            lines = told(spy.pids[0], "status").splitlines()
            status = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
            if status.get("NoNewPrivs") == "1":
                return status
    raise AssertionError("the child never gave anything up")


CLIMBS = [b"../evil", b"/evil", b"a/../../evil", b"..", b"a//../b", b"./../evil", b"a/./b"]


@pytest.mark.parametrize("name", [*(ROOT + each for each in CLIMBS), b"/etc/evil", b"../evil", b"x/../../evil"])
def test_a_name_that_climbs_refuses_the_image(tmp_path: Path, name: bytes) -> None:
    """Other tools join such names with the folder; even where they would not land in the cache they are an attack."""
    for body in (
        layer(KERNEL, member(name, b"x")),
        layer(KERNEL, pax({b"path": name}) + member(b"x", b"x")),
        layer(KERNEL, long_name(name) + member(b"x", b"x")),
        layer(KERNEL, member(name + b"/", type_=b"5")),
        layer(KERNEL, member(name, type_=b"2", link=b"/")),
    ):
        found = refused(tmp_path, body)
        assert found.reason == "Unsafe", found
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("type_", "what"), [(b"1", "link"), (b"2", "link"), (b"3", "device"), (b"4", "device"), (b"6", "device")]
)
def test_links_and_devices_refuse_the_image(tmp_path: Path, type_: bytes, what: str) -> None:
    found = refused(tmp_path, layer(KERNEL, member(ROOT + b"x", type_=type_, link=b"/etc/passwd")))
    assert found.reason == "Unsafe" and f"is a {what}" in str(found) and "io.triton.cache/x" in str(found)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """The classic: a link to somewhere, then a file below it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    through = [member(ROOT + b"d", type_=b"2", link=os.fsencode(outside)), member(ROOT + b"d/evil", b"x")]
    assert refused(tmp_path, layer(KERNEL, *through)).reason == "Unsafe"
    assert refused(tmp_path, layer(*reversed(through), KERNEL)).reason == "Unsafe"
    assert not list(outside.iterdir())


def test_what_lies_elsewhere_in_the_image_is_not_written(tmp_path: Path) -> None:
    others = [
        member(b"etc/passwd", b"x"),
        member(b"bin", type_=b"2", link=b"usr/bin"),
        member(b"io.triton.manifest/manifest.json", b"{}"),
        member(b"io.vllm.cache/x", b"x"),
    ]
    found, into = extracted(tmp_path, layer(*others, member(b"./" + ROOT, type_=b"5"), KERNEL))
    assert [path.name for path in into.rglob("*") if path.is_file()] == ["add.json"] and found.files == 1


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        (b"", "Malformed", "truncated"),
        (gzip.compress(b""), "Malformed", "truncated"),
        (b"no gzip at all", "Malformed", "no whole gzip file"),
        (layer(KERNEL)[:-20], "Malformed", "no whole gzip file|truncated"),
        (layer(KERNEL)[:-8] + b"\0" * 8, "Malformed", "no whole gzip file"),
        (layer(KERNEL) + b"garbage", "Malformed", "no whole gzip file"),
        (layer(KERNEL, end=b""), "Malformed", "truncated"),
        (layer(KERNEL) + gzip.compress(KERNEL), "Malformed", "behind the end"),
        (layer(), "Unsupported", "no compiled kernel"),
        (layer(member(ROOT + b"readme", b"x")), "Unsupported", "no compiled kernel"),
        (layer(KERNEL, KERNEL), "Malformed", "is there twice"),
        (layer(KERNEL, member(ROOT + KEY + b"/add.json/x", b"")), "Malformed", "a file and a folder at once"),
        (layer(KERNEL, member(ROOT + KEY, b"x")), "Malformed", "is there twice"),
        (layer(KERNEL, member(ROOT.rstrip(b"/"), b"x")), "Malformed", "is no folder"),
        (layer(KERNEL, member(ROOT + b"x", type_=b"S")), "Unsupported", "sparse"),
        (layer(KERNEL, member(ROOT + b".wh.add.json")), "Unsupported", "takes away"),
        (layer(KERNEL, member(ROOT + b"\xff\xfe")), "Unsafe", "is not UTF-8"),
        (layer(KERNEL, member(ROOT + b"a\nb")), "Unsafe", "control characters"),
        (layer(KERNEL, pax({b"path": ROOT + b"a\0b"}) + member(b"x")), "Unsafe", "control characters"),
        (layer(KERNEL, pax({b"path": ROOT + b"d/" * 20 + b"x"}) + member(b"x")), "Unsafe", "folders deep"),
        (layer(KERNEL, pax({b"path": ROOT + b"x" * 300}) + member(b"x")), "Unsafe", "more than 255 bytes"),
        (layer(KERNEL, pax({b"path": ROOT + b"x/" * 600}) + member(b"x")), "Unsafe", "longer than"),
        (layer(pax({b"a": b"x" * 70_000}) + KERNEL), "TooLarge", "extended header"),
        (layer(member(ROOT + b"A" * 52 + b"/add.json", METADATA)), "Inconsistent", "moved or forged"),
        (layer(member(ROOT + b"add.json", METADATA)), "Inconsistent", "moved or forged"),
        (layer(KERNEL, member(ROOT + KEY + b"/__grp__add.json", b"{")), "Inconsistent", "is no JSON"),
        (layer(KERNEL, member(ROOT + KEY + b"/__grp__add.json", b"[" * 9999)), "Inconsistent", "is no JSON"),
        (layer(KERNEL, member(ROOT + KEY + b"/__grp__add.json", b"{}")), "Inconsistent", "no child_paths"),
        (
            layer(KERNEL, member(ROOT + KEY + b"/__grp__add.json", b'{"child_paths":{"../x":"/x"}}')),
            "Inconsistent",
            "outside its folder",
        ),
        (layer(member(ROOT + KEY + b"/add.json", b" " * limits.JSON_BYTES + METADATA)), "Inconsistent", "JSON of more"),
    ], ids=short
)  # fmt: skip
def test_a_reason_for_each_refusal(tmp_path: Path, body: bytes, reason: str, words: str) -> None:
    found = refused(tmp_path, body)
    assert found.reason == reason, found
    assert re.search(words, str(found)), found


def test_several_members_of_gzip_are_one_archive(tmp_path: Path) -> None:
    archive = KERNEL + END
    body = b"".join(gzip.compress(archive[at : at + 100]) for at in range(0, len(archive), 100)) + bytes(64)
    assert extracted(tmp_path, body)[0].kernels == 1


def test_what_the_child_refuses_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"'io.triton.cache/\.\./evil' has an empty part") as caught:
        extracted(tmp_path, layer(KERNEL, member(ROOT + b"../evil", b"x")))
    assert caught.value.reason == "Unsafe"


def test_layers_come_one_on_another(tmp_path: Path) -> None:
    other = member(ROOT + KEY + b"/add.cubin", b"x")
    found, _ = extracted(tmp_path, layer(KERNEL), layer(other))
    assert found.files == 2
    assert refused(tmp_path, layer(KERNEL), layer(KERNEL)).reason == "Malformed", "a second layer replaces nothing"


BOMB = layer(member(ROOT + b"zeros", bytes(40 * limits.MIB)), KERNEL)


@pytest.mark.parametrize(
    ("body", "bounds", "words"),
    [
        (BOMB, {}, "it is a bomb"),
        (BOMB, {"ratio": 10**6, "file_bytes": limits.MIB}, "a file of 41,943,040 bytes"),
        (BOMB, {"ratio": 10**6, "extracted_bytes": limits.MIB}, "more than 1,048,576 bytes of files"),
        (BOMB, {"ratio": 10**6, "archive_bytes": limits.MIB}, "archive has more than"),
        (layer(KERNEL, *(member(ROOT + b"%d" % each) for each in range(50))), {"entries": 50}, "more than 50 files"),
        (layer(KERNEL, member(ROOT + b"a/b/c/d/e/f", b"")), {"entries": 5}, "more than 5 files"),
        (layer(KERNEL, *([member(ROOT + b"d/", type_=b"5")] * 50)), {"entries": 50}, "more than 50 files"),
        (layer(KERNEL, *([member(b"elsewhere")] * 50)), {"entries": 50}, "more than 50 files"),
    ],
    ids=short,
)
def test_what_is_too_large_is_refused(tmp_path: Path, body: bytes, bounds: dict[str, Any], words: str) -> None:
    found = refused(tmp_path, body, **bounds)
    assert found.reason == "TooLarge" and words in str(found)


def test_a_layer_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    pipe, into = tmp_path / "layer", tmp_path / "into"
    os.mkfifo(pipe)
    into.mkdir()
    keeper = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(Refused, match="longer than 1 s"):
            asyncio.run(extract([pipe], "triton", into, Bounds(seconds=1)))
    finally:
        os.close(keeper)


def test_a_child_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def killed(child: asyncio.subprocess.Process, request: bytes) -> Any:
        child.send_signal(signal.SIGKILL)
        return await original(child, request)

    original = extraction._conversation
    monkeypatch.setattr(extraction, "_conversation", killed)
    with pytest.raises(Refused, match="ended by signal 9") as caught:
        extracted(tmp_path, layer(KERNEL))
    assert caught.value.reason == "Crashed"


WAITS = """
import asyncio, sys
from pathlib import Path
from images.extraction import extract

asyncio.run(extract([Path(sys.argv[1])], "triton", Path(sys.argv[2])))
"""


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    """It would otherwise go on writing into a folder that the next start sweeps."""
    pipe, into = tmp_path / "layer", tmp_path / "into"
    os.mkfifo(pipe)
    into.mkdir()
    keeper = os.open(pipe, os.O_RDWR)  # a layer that never comes
    parent = subprocess.Popen([sys.executable, "-c", WAITS, str(pipe), str(into)])
    child = 0
    try:
        eventually(lambda: working(into) and "NoNewPrivs:\t1" in told(working(into), "status"))
        child = working(into)
        parent.kill()
        parent.wait()
        eventually(lambda: not working(into))
        child = 0
    finally:
        parent.kill()
        parent.wait()
        os.close(keeper)
        if child:
            os.kill(child, signal.SIGKILL)


def working(folder: Path) -> int:
    """The process that works in a folder; 0: none."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                return int(entry.name)
    return 0


def eventually(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"{}", b"[]", b"null", b"[" * 99999, b'{"refused":["Nonsense","x"]}', b'{"refused":[]}', b'{"refused":5}',
        b'{"extracted":{"files":-1}}', b'{"extracted":[]}', b"\xff",
    ], ids=short
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_not_believed(answer: bytes) -> None:
    with pytest.raises(Refused) as caught:
        extraction._believed(answer, 0, b"Traceback\nValueError: why")
    assert caught.value.reason == "Crashed" and "ValueError: why" in str(caught.value)


@pytest.mark.parametrize("kind", ["vllm", "triton"])
def test_layouts_of_vllm(tmp_path: Path, kind: Kind) -> None:
    folder = tmp_path / "vllm"
    caches.vllm_legacy(folder)
    caches.vllm_binary(folder)
    body = packed(folder, tmp_path / "image").read_bytes()
    if kind == "triton":
        assert "no compiled kernel" in str(refused(tmp_path, body, kind="triton"))
        return
    found, into = extracted(tmp_path, body, kind="vllm")
    assert found.kernels == 1 and found.capture_path == "/root/.cache/vllm"
    assert (into / "torch_compile_cache" / "0a1b2c3d4e" / "rank_0_0" / "backbone" / "cache_key_factors.json").is_file()


# --- fuzzing ---------------------------------------------------------------------------------------------------------


parts = st.sampled_from([b"..", b".", b"", b"a", b"b", KEY, b"io.triton.cache", b"\xff", b"x" * 300, b"a\0b"])
names = st.lists(parts, min_size=1, max_size=5).map(b"/".join) | st.lists(parts, min_size=1, max_size=4).map(
    lambda each: ROOT + b"/".join(each)
)
members = st.builds(
    lambda name, content, type_, how: (
        pax({b"path": name}) + member(b"p", content, type_) if how == "pax"
        else long_name(name) + member(b"l", content, type_) if how == "gnu"
        else member(name, content, type_, link=b"../../outside")
    ),
    names, st.binary(max_size=200), st.sampled_from([b"0", b"0", b"5", b"1", b"2", b"3", b"\0", b"S", b"K"]),
    st.sampled_from(["pax", "gnu", "plain"]),
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(members, max_size=8), st.integers(0, 400), st.binary(max_size=8))
def test_whatever_a_layer_says_only_plain_files_inside_are_written(made: list[bytes], at: int, noise: bytes) -> None:
    body = gzip.compress(b"".join(made) + END, 1)
    body = body[:at] + noise + body[at + len(noise) :] if noise else body
    with tempfile.TemporaryDirectory() as top:
        into = Path(top) / "into"
        into.mkdir()
        (Path(top) / "outside").write_text("untouched")
        with working_in(into), contextlib.suppress(Refused):
            Extraction("triton", asdict(Bounds())).layer(io.BytesIO(body))
        assert sorted(os.listdir(top)) == ["into", "outside"]
        assert (Path(top) / "outside").read_text() == "untouched"
        for folder, _, files in os.walk(into):
            assert not os.path.islink(folder)
            assert all(stat.S_ISREG(os.lstat(os.path.join(folder, each)).st_mode) for each in files)
