"""A node with a registry in this process, and folders of kernels."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.images import hostile
from tests.nodeworkers.caches.rig import Rig, node


@pytest.fixture
async def registry() -> AsyncIterator[hostile.Registry]:
    async with hostile.Registry() as made:
        yield made


@pytest.fixture
async def rig(tmp_path: Path, registry: hostile.Registry) -> AsyncIterator[Rig]:
    async with node(tmp_path / "node", registry.settings, registry.host) as made:
        yield made
