"""One blob into one file: counted and hashed while it comes, taken up where a connection broke, believed at the end.

For the registry client. What is there of it lies beside the file as `.part` and serves the next attempt, also another
process's; the file itself appears when its digest is right.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from images.client import Client, together
from images.descriptor import Descriptor
from images.endpoints import Endpoint, endpoints
from images.errors import RegistryError
from images.reference import Reference

_CHUNK = 1024 * 1024  # bytes that are hashed and written at once, in a thread
_FUTILE = 3  # attempts in a row that bring nothing
_ATTEMPTS = 16  # connections for one blob at one endpoint, however much each brings
_GRACE = 60.0  # seconds that any blob may take
_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/(?:[0-9]{1,19}|\*)")

Progress = Callable[[int], None]
"""Told how many bytes are there now; less than before where an attempt began anew."""


class _Part:
    """The bytes that came so far, and their hash. Its methods block."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.count = 0
        self._hash = hashlib.sha256()
        self._file = file

    @classmethod
    def open(cls, path: Path, size: int) -> _Part | None:
        """Takes up what an earlier process left, if it is not too much. None: another process is at it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        part = cls(path, os.fdopen(descriptor, "r+b", buffering=0))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(descriptor).st_ino == path.stat().st_ino  # else whoever held it just finished
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            part.close()
            return None
        while chunk := part._file.read(_CHUNK):
            part._hash.update(chunk)
            part.count += len(chunk)
            if part.count > size:
                part.restart()
                break
        return part

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
        self.count = 0

    def take(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._hash.update(data)
        self.count += len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def keep(self, into: Path) -> None:
        """Makes it the file, for good."""
        os.fsync(self._file.fileno())
        os.replace(self.path, into)
        folder = os.open(into.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        self._file.close()


async def download(
    client: Client, reference: Reference, blob: Descriptor, into: Path, progress: Progress | None = None
) -> None:
    """Fetches a blob from the first who has it. Raises RegistryError, and OSError where the disk does not take it."""
    what = f"{reference.registry}/{reference.repository}@{blob.digest}"
    failures: list[tuple[Endpoint, RegistryError]] = []
    part = await _opened(into.with_name(f"{into.name}.part"), blob.size)
    if part is None:
        raise RegistryError("away", what, f"another process fetches it into {into} just now", retry_after=1.0)
    try:
        for endpoint in endpoints(client.settings, reference):
            try:
                await _from(client, endpoint, blob, part, what, progress)
            except RegistryError as error:
                failures.append((endpoint, error))
                continue
            await asyncio.to_thread(part.keep, into)
            return
        raise together(failures, what)
    finally:
        part.close()


async def _opened(path: Path, size: int) -> _Part | None:
    """`_Part.open` in a thread. Whoever is cancelled meanwhile waits for it and leaves neither file nor lock open."""
    opening = asyncio.create_task(asyncio.to_thread(_Part.open, path, size))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_closed)
        await asyncio.wait([opening])
        raise


def _closed(opening: asyncio.Task[_Part | None]) -> None:
    part = None if opening.cancelled() or opening.exception() is not None else opening.result()
    if part is not None:
        part.close()


async def _from(
    client: Client, endpoint: Endpoint, blob: Descriptor, part: _Part, what: str, progress: Progress | None
) -> None:
    """All of it from one endpoint, or from where the last one left off."""
    foreign = part.count > 0  # the beginning is somebody else's, and may be wrong
    futile = 0
    patience = client.settings.timeouts.patience
    deadline = time.monotonic() + _GRACE + blob.size / client.settings.timeouts.slowest
    for _ in range(_ATTEMPTS):
        before = part.count
        try:
            if part.count < blob.size:
                await _stream(client, endpoint, blob, part, what, progress, deadline - time.monotonic())
        except RegistryError as error:
            wait = error.retry_after
            if part.count > before:
                futile, wait = 0, wait or 0.0  # also one that fell silent is taken up again
                patience = client.settings.timeouts.patience
            else:
                futile += 1
            left = min(patience, deadline - time.monotonic())
            if error.kind != "away" or wait is None or futile >= _FUTILE or wait > left:
                raise
            patience -= wait
            await asyncio.sleep(wait)
            continue
        if part.digest == blob.digest:
            return
        await asyncio.to_thread(part.restart)
        if not foreign:
            raise RegistryError("lied", what, f"what {endpoint.name} sent has another digest")
        foreign = False  # once more, and all of it from here
    raise RegistryError("away", what, f"{endpoint.name} cut the connection {_ATTEMPTS} times")


async def _stream(
    client: Client,
    endpoint: Endpoint,
    blob: Descriptor,
    part: _Part,
    what: str,
    progress: Progress | None,
    total: float,
) -> None:
    """One connection's worth."""
    start = part.count
    headers = {"Range": f"bytes={start}-{blob.size - 1}"} if start else {}
    url = endpoint.path(f"blobs/{blob.digest}")
    async with client.answer(endpoint, "GET", url, what, headers=headers, total=total, also=(416,)) as response:
        if start and (response.status != 206 or _begins(response.headers.get("Content-Range", "")) != start):
            # it takes no ranges, or another one: from the beginning, which a whole answer is already
            await asyncio.to_thread(part.restart)
            if response.status != 200:
                raise RegistryError("away", what, f"{endpoint.name} sends another part than asked for", retry_after=0.0)
        left = blob.size - part.count
        promised = response.content_length
        if promised is not None and promised != left:
            raise RegistryError(
                "lied", what, f"{endpoint.name} has {promised} bytes of it, where the manifest promises {left}"
            )
        pending = bytearray()
        try:
            while chunk := await response.content.readany():
                left -= len(chunk)
                if left < 0:
                    raise RegistryError(
                        "lied",
                        what,
                        f"{endpoint.name} sends more than the {blob.size} bytes that the manifest promises",
                    )
                pending += chunk
                if len(pending) >= _CHUNK:
                    full, pending = pending, bytearray()
                    await asyncio.to_thread(part.take, full)
                    if progress is not None:
                        progress(part.count)
        finally:
            if pending:  # what came counts, however it ended
                await asyncio.to_thread(part.take, pending)
                if progress is not None:
                    progress(part.count)
        if left:
            raise RegistryError("away", what, f"{endpoint.name} ended the answer early", retry_after=0.0)


def _begins(content_range: str) -> int | None:
    match = _RANGE.fullmatch(content_range.strip())
    return int(match[1]) if match else None
