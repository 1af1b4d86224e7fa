"""Whose fault it is decides whether it is tried again."""

from __future__ import annotations

import errno
import os

import pytest

from images.endpoints import BadSettings
from images.errors import RegistryError
from images.reference import BadReference
from images.refused import Refused
from kube.errors import AccessDenied, Invalid, Unauthorized, Unavailable
from nodeworkers.caches.stopped import Stopped, stopping
from nodeworkers.ledger import LedgerError
from planning.caches.grants import NoPullSecret


@pytest.mark.parametrize(
    ("error", "outcome", "reason", "within"),
    [
        (RegistryError("away", "x", "y"), "retrying", "RegistryAway", 10.0),
        (RegistryError("away", "x", "y", retry_after=3.0), "retrying", "RegistryAway", 3.0),
        (RegistryError("unauthorized", "x", "y"), "retrying", "RegistryRefused", 60.0),
        (RegistryError("not_found", "x", "y"), "failed", "ImageNotFound", 0.0),
        (RegistryError("lied", "x", "y"), "failed", "RegistryLied", 0.0),
        (RegistryError("too_large", "x", "y"), "failed", "TooLarge", 0.0),
        (RegistryError("malformed", "x", "y"), "failed", "Malformed", 0.0),
        (Refused("Unsafe", "x"), "failed", "Unsafe", 0.0),
        (Refused("Unsupported", "x"), "failed", "Unsupported", 0.0),
        (Refused("NoSpace", "x"), "retrying", "NoSpace", 60.0),
        (Refused("Crashed", "x"), "retrying", "Crashed", 60.0),
        (Refused("TimedOut", "x"), "retrying", "TimedOut", 60.0),
        (Unavailable("x"), "retrying", "APIServerAway", 10.0),
        (Unavailable("x", retry_after=2.0), "retrying", "APIServerAway", 2.0),
        (AccessDenied("x"), "retrying", "NotAllowed", 60.0),
        (Unauthorized("x"), "retrying", "NotAllowed", 60.0),
        (Invalid("x"), "retrying", "APIServerRefused", 60.0),
        (BadReference("x"), "failed", "InvalidSpec", 0.0),
        (BadSettings("registries.proxy: x"), "retrying", "SettingsRefused", 60.0),
        (NoPullSecret("PullSecretMissing", "x"), "retrying", "PullSecretMissing", 60.0),
        (LedgerError("x"), "retrying", "LedgerFailed", 60.0),
        (OSError(errno.ENOSPC, "full"), "retrying", "DiskFailed", 60.0),
    ],
    ids=str,
)
def test_what_others_did(error: Exception, outcome: str, reason: str, within: float) -> None:
    with pytest.raises(Stopped) as stopped, stopping():
        raise error
    assert (stopped.value.outcome, stopped.value.reason, stopped.value.within) == (outcome, reason, within)
    assert stopped.value.message and stopped.value.__cause__ is None


@pytest.mark.parametrize(
    "error", [ValueError("x"), AssertionError(), OSError(errno.ENOENT, os.strerror(errno.ENOENT))], ids=str
)
def test_a_defect_stays_one(error: Exception) -> None:
    with pytest.raises(type(error)), stopping():
        raise error
