"""What a source of GPUs that no watcher sees offers to the node process, how every source tells that it failed, and the
fingerprint by which the process notices that a node's GPUs changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple
from typing import Protocol

from planning.caches.compatibility import GPU

UNKNOWN = "unknown"  # a product or driver that the vendor's tool does not name
NO_ARCH = "N/A"  # an architecture that it does not name: fits no kernels, by its form
MOST_TEXT = 128  # characters of what a driver says: these values go into statuses and histories
_ABSENT = {"", "n/a", "none", "unknown"}


class HardwareError(Exception):
    """A vendor's driver or tool failed. Its text is a sentence for people: what happened, and what to do."""


class Provider(Protocol):
    """A source of GPUs."""

    @property
    def simulated(self) -> bool:
        """Whether its GPUs are made up."""

    def gpus(self) -> tuple[GPU, ...]:
        """The node's GPUs now, () if it has none of that kind. Blocks, for as long as the driver takes. Raises
        HardwareError, with a sentence.
        """


def said(value: object) -> str:
    """What a driver says as one short line of text that can be written anywhere; '' where it says nothing."""
    if not isinstance(value, str):
        return ""
    text = "".join(each if each.isprintable() else " " for each in value[: 8 * MOST_TEXT])
    text = " ".join(text.split())[:MOST_TEXT].rstrip()
    return "" if text.lower() in _ABSENT else text


def fingerprint(gpus: Iterable[GPU]) -> str:
    """16 hex digits (of SHA-256): equal for the same GPUs with the same drivers, in whatever order they are listed."""
    import hashlib  # here, for it loads OpenSSL: 3 MB that no watcher needs

    values = json.dumps(sorted(astuple(gpu) for gpu in gpus))
    return hashlib.sha256(values.encode()).hexdigest()[:16]
