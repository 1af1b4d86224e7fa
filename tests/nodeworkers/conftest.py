"""What Prometheus reads of a node's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nodeworkers import metrics
from tests.scraping import Read, scraping


@pytest.fixture
def scraped() -> Iterator[Read]:
    with scraping(metrics) as read:
        yield read
