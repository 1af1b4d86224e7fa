"""Which seat configuration is this node's, for its allocation core: the GPUSeatProfile that selects it, or a file.

Followed by watch or by looking at the file, and kept on disk: a node that starts without an API server, or whose file
went, has the seats that it had. What the node accepted last is kept beside it, for what comes may be worse.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from crds.gpuseatprofile import GPUSeatProfileSpec
from crds.gpuworkload import SPEC_LIMIT
from kube.client import KubeClient
from kube.reflector import Backoff, Change, Reflector
from kube.resources import GPUSEATPROFILES, NODES
from planning.devices.seat_profiles import (
    Configuration,
    SeatProfileView,
    chosen,
    document_of,
    seat_profile_view,
)

KEPT = "seats.json"
POLL = 1.0  # seconds between two looks at the file
_LIMIT = 2 * SPEC_LIMIT  # bytes of the file
_DEPTH = 16  # levels of lists and mappings in the file; a GPUSeatProfile has six
_BACKOFF = Backoff()
_log = logging.getLogger(__name__)

Signature = tuple[int, int, int] | None  # of a file: when it changed, its size, its inode; None where there is none


@dataclass(frozen=True, slots=True)
class _State:
    """What is on disk."""

    now: Configuration = field(default_factory=Configuration)
    accepted: Any = None


_STATE = TypeAdapter(_State)


class Profiles:
    """Follows the seat configuration of `node` while `run` runs.

    `folder`: where the node keeps its ledger. `file`: a GPUSeatProfile in YAML, and then the API server is not asked.
    Making one reads what was kept, a file of some KiB; it never fails for what is written there.
    """

    def __init__(
        self,
        kube: KubeClient | None,
        node: str,
        folder: Path,
        file: Path | None = None,
        *,
        poll: float = POLL,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        if kube is None and file is None:
            raise ValueError("seats are configured by a GPUSeatProfile or by a file; neither can be read here")
        self._kube = kube
        self._node = node
        self._file = file
        self._kept = folder / KEPT
        self._poll = poll
        self._backoff = backoff
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()
        self._state = _load(self._kept)
        self._version = 1
        self.last: GPUSeatProfileSpec | None = None
        """What this node accepted last, for `seats.configured`."""
        if self._state.accepted is not None:
            self.last, _ = GPUSeatProfileSpec.parse(self._state.accepted)

    @property
    def now(self) -> Configuration:
        """What is to be configured."""
        return self._state.now

    @property
    def version(self) -> int:
        """Another number whenever `now` says something else."""
        return self._version

    async def changed(self, version: int) -> int:
        """Waits until `version` is not the present one any more; the new one."""
        while self._version == version:
            await self._news.wait()
        return self._version

    async def accept(self, spec: GPUSeatProfileSpec | None) -> None:
        """Keeps what the node accepted (`SeatPlan.accepted`) for when a worse one comes."""
        if spec != self.last:
            self.last = spec
            written = None if spec is None else spec.model_dump(mode="json", by_alias=True, exclude_none=True)
            await self._keep(accepted=written)

    async def run(self) -> None:
        """Follows the source until cancelled."""
        if self._file is not None:
            await self._follow_file(self._file)
        elif self._kube is not None:
            await self._follow_profiles(self._kube)

    async def _follow_file(self, file: Path) -> None:
        read: Signature = (0, 0, 0)
        before = await asyncio.to_thread(_signature, file)
        while True:
            seen = await asyncio.to_thread(_signature, file)
            if seen == before and seen != read:  # it is as it was a moment ago: nobody is in the midst of writing it
                read = seen
                spec, problem = await asyncio.to_thread(_document, file)
                if problem:
                    problem = (
                        f"The seat configuration {file} cannot be read, and what was there before stays. {problem}."
                    )
                    await self._set(replace(self.now, problem=problem))
                else:
                    await self._set(Configuration(f"the file {file}", spec))
            before = seen
            await asyncio.sleep(self._poll)

    async def _follow_profiles(self, kube: KubeClient) -> None:
        wake = asyncio.Event()

        def changed(_: Change[Any]) -> None:
            wake.set()

        profiles: Reflector[SeatProfileView] = Reflector(
            kube, GPUSEATPROFILES, project=seat_profile_view, on_change=changed, backoff=self._backoff
        )
        nodes: Reflector[dict[str, str]] = Reflector(
            kube,
            NODES,
            project=_labels,
            field_selector=f"metadata.name={self._node}",
            metadata_only=True,
            on_change=changed,
            backoff=self._backoff,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(profiles.run())
            tasks.create_task(nodes.run())
            await profiles.synced.wait()
            while True:
                wake.clear()
                # A node whose object is not there, or not known yet, keeps what it has.
                for labels in list(nodes.items.values()):
                    await self._set(chosen(profiles.items.values(), labels))
                await wake.wait()

    async def _set(self, now: Configuration) -> None:
        if now == self._state.now:
            return
        if now.problem:
            _log.warning("%s", now.problem)
        else:
            _log.info("seats are configured by %s", now.source or "nothing")
        await self._keep(now=now)
        self._version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _keep(self, **changes: Any) -> None:
        """To disk first, so that no pod is given a seat that a restart does not know; but a disk that takes nothing
        does not stop the seats.
        """
        async with self._writing:
            state = replace(self._state, **changes)
            try:
                await asyncio.to_thread(_write, self._kept, _STATE.dump_json(state))
            except (OSError, ValueError) as error:
                _log.error(
                    "the seat configuration is not kept in %s: %s. It holds until this process ends: see to the disk.",
                    self._kept,
                    error,
                )
            self._state = state


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    return dict(node["metadata"].get("labels") or {})


def _signature(file: Path) -> Signature:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _document(file: Path) -> tuple[Any, str]:
    """The spec in the file, as JSON has it; or None and a sentence without its full stop."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_LIMIT + 1)
    except OSError as error:
        return None, f"{error.strerror or error}"
    if len(content) > _LIMIT:
        return None, f"It has more than {_LIMIT // 1024} KiB"
    try:
        text = content.decode()
        if wrong := _dangerous(text):
            return None, wrong
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
        document = json.loads(json.dumps(documents[0] if len(documents) == 1 else None, allow_nan=False))
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        return None, f"It is not YAML that could be JSON ({' '.join(str(error).split())[:200]})"
    return document_of(document)


def _dangerous(text: str) -> str:
    """What makes a short YAML take long or much memory to read, a sentence; '' where nothing does."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            return "It has YAML aliases (*name), by which a short text can become a huge one: write it out"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH:
            return f"It is nested more than {_DEPTH} levels deep"
    return ""


def _load(kept: Path) -> _State:
    """What was kept; nothing where that cannot be read, which is then set aside."""
    try:
        return _STATE.validate_json(kept.read_bytes())
    except FileNotFoundError:
        return _State()
    except (OSError, ValueError, RecursionError) as error:
        _log.error("%s cannot be read and is set aside: %.200s. Seats wait for their source.", kept, error)
        with suppress(OSError):
            kept.replace(kept.with_suffix(".damaged"))
        return _State()


def _write(kept: Path, content: bytes) -> None:
    fresh = kept.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(kept)
    folder = os.open(kept.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
