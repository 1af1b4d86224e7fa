"""A fake kubelet with a short folder, and the reference plugin beside it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fake_kubelet.kubelet import FakeKubelet


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fk-") as made:  # short, for a socket's name has at most 107 bytes
        yield Path(made)


@pytest.fixture
async def kubelet(folder: Path) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(folder, seed=1) as running:
        yield running
