"""Extracts the layers of a cache image into a folder, contained and bounded. For nodes and for `berth cache inspect`.

The work is done by a child without privileges (images.extraction_child); here it is started, timed, ended and
listened to, and what it says is not believed beyond its shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from images import refused as refusals
from images.refused import Refused, shown
from images.tree import FOLDER_MODE
from planning.caches import limits
from planning.caches.compatibility import Target, target_of
from planning.caches.labels import Kind

# Nobody's: extracted files belong to it, and a child that is led astray is nobody else. Not 65534, which others share.
EXTRACTOR_UID = 64_990
_ANSWER = limits.MIB
_LAST_WORDS = 16 * limits.KIB


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an extraction may take; `archive_bytes` is the tar itself, whose headers and padding come on top."""

    extracted_bytes: int = limits.EXTRACTED_BYTES
    archive_bytes: int = limits.EXTRACTED_BYTES + limits.ENTRIES * 2 * limits.KIB
    file_bytes: int = limits.FILE_BYTES
    entries: int = limits.ENTRIES
    ratio: int = limits.RATIO
    ratio_free_bytes: int = limits.RATIO_FREE_BYTES
    seconds: int = limits.EXTRACTION_SECONDS
    memory_bytes: int = limits.GIB


@dataclass(frozen=True, slots=True)
class Extracted:
    """What lies in the folder now, as found there; labels are not asked."""

    files: int
    bytes: int
    kernels: int
    groups: int
    targets: tuple[Target, ...]
    triton_version: str | None
    capture_path: str | None
    warnings: tuple[str, ...]
    warned: int


async def extract(layers: Sequence[Path], kind: Kind, into: Path, bounds: Bounds | None = None) -> Extracted:
    """Extracts layers in their order into an empty folder, and returns once all of it is on the disk.

    Raises Refused with the reason; the folder then holds part of it and is to be thrown away. Cancelling ends the
    child. The thread that calls must live as long as the extraction: the child dies with it.
    """
    bounds = bounds or Bounds()
    root = os.geteuid() == 0
    with contextlib.ExitStack() as opened:
        folder = _opened(opened, into, os.O_RDONLY | os.O_DIRECTORY)
        if os.listdir(folder):
            raise ValueError(f"{into} is not empty")
        os.fchmod(folder, FOLDER_MODE)
        if root:
            os.fchown(folder, EXTRACTOR_UID, EXTRACTOR_UID)
        files = [_opened(opened, layer, os.O_RDONLY) for layer in layers]
        request = {
            "folder": folder, "layers": files, "kind": kind, "parent": os.getpid(),
            "uid": EXTRACTOR_UID if root else None, "bounds": asdict(bounds),
        }  # fmt: skip
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-m", "images.extraction_child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            pass_fds=(folder, *files), env={"LC_ALL": "C.UTF-8", "PATH": os.defpath}, start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(bounds.seconds):
            answer, words = await _conversation(child, json.dumps(request).encode())
    except TimeoutError:
        raise Refused("TimedOut", f"Extracting took longer than {bounds.seconds} s.") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return _believed(answer, await child.wait(), words)


def _opened(stack: contextlib.ExitStack, path: Path, flags: int) -> int:
    file = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, file)
    return file


async def _conversation(child: asyncio.subprocess.Process, request: bytes) -> tuple[bytes, bytes]:
    """The child's answer and its last words, bounded; it is over when the child has ended."""
    if child.stdin is None or child.stdout is None or child.stderr is None:
        raise ValueError("the child was started without pipes")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.write(request)
        await child.stdin.drain()
    child.stdin.close()
    answer, words = await asyncio.gather(_at_most(child.stdout, _ANSWER), _at_most(child.stderr, _LAST_WORDS))
    if len(answer) == _ANSWER or len(words) == _LAST_WORDS:
        child.kill()
    await child.wait()
    return answer, words


async def _at_most(stream: asyncio.StreamReader, most: int) -> bytes:
    try:
        return await stream.readexactly(most)
    except asyncio.IncompleteReadError as ended:
        return ended.partial


def _believed(answer: bytes, code: int, words: bytes) -> Extracted:
    """The child's answer; Refused with what it refused, or if it makes no sense."""
    try:
        told = json.loads(answer) if code == 0 else {}
        if "refused" in told:
            reason, message = told["refused"]
            if reason in get_args(refusals.Reason) and isinstance(message, str):
                raise Refused(reason, message[:1024])
        found: Mapping[str, object] = told["extracted"]
        return Extracted(
            files=_count(found["files"]),
            bytes=_count(found["bytes"]),
            kernels=_count(found["kernels"]),
            groups=_count(found["groups"]),
            targets=_targets(found["targets"]),
            triton_version=_text(found["triton_version"]),
            capture_path=_text(found["capture_path"]),
            warnings=_texts(found["warnings"]),
            warned=_count(found["warned"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        last = words.decode("utf-8", "replace").strip().rpartition("\n")[2]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise Refused("Crashed", f"The process that extracts {how}: {shown(last, 400)}.") from None


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("no count")
    return value


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError("no text")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError("no texts")
    return tuple(value)


def _targets(value: object) -> tuple[Target, ...]:
    found = [target_of(each) for each in value] if isinstance(value, list) else [None]
    if None in found:
        raise TypeError("no targets")
    return tuple(each for each in found if each is not None)
