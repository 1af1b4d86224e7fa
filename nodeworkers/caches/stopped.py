"""Why an order could not be carried out, as the outcome that its workflow acts on: what may pass is tried again, what
is the image's fault stays so. For every step of `preparing.py`.

Only what is somebody else's fault comes here: a defect of berth's own raises, and Temporal shows it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from images.endpoints import BadSettings
from images.errors import RegistryError
from images.reference import BadReference
from images.refused import Refused
from kube.errors import AccessDenied, KubeError, Unauthorized, Unavailable
from nodeworkers.ledger import LedgerError
from planning.caches.grants import NoPullSecret
from planning.caches.orders import Outcome
from planning.settings import settings_refused

SOON = 10.0  # seconds: it may pass by itself
LATER = 60.0  # somebody has to do something
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


class Stopped(Exception):
    """An order is not carried out (yet). `within`: seconds after which a `retrying` one is tried again."""

    def __init__(self, outcome: Outcome, reason: str, message: str, within: float = 0.0) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome
        self.reason = reason
        self.message = message
        self.within = within


def later(reason: str, message: str, within: float = LATER) -> Stopped:
    """One that is tried again."""
    return Stopped("retrying", reason, message, within)


@contextmanager
def stopping() -> Iterator[None]:
    """Whatever others did wrong within comes out as Stopped."""
    try:
        yield
    except RegistryError as error:
        raise _by_registry(error) from None
    except Refused as refused:
        raise _by_image(refused) from None
    except KubeError as error:
        raise by_api(error) from None
    except BadReference as wrong:
        raise Stopped("failed", "InvalidSpec", f"spec.ociImage.image: {wrong}") from None
    except BadSettings as wrong:
        raise later("SettingsRefused", settings_refused(wrong)) from None
    except NoPullSecret as missing:
        raise later(missing.reason, str(missing)) from None
    except LedgerError as error:
        raise later("LedgerFailed", str(error)) from None
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise later("DiskFailed", f"The node's disk does not take the cache: {error.strerror}{where}.") from None


def by_api(error: KubeError) -> Stopped:
    """What the API server did wrong, or refused."""
    if isinstance(error, AccessDenied | Unauthorized):
        return later("NotAllowed", str(error))
    if isinstance(error, Unavailable):
        return later("APIServerAway", str(error), error.retry_after or SOON)
    return later("APIServerRefused", str(error))


def _by_registry(error: RegistryError) -> Stopped:
    if error.kind == "away":
        return later(error.reason, str(error), error.retry_after or SOON)
    if error.kind == "unauthorized":
        return later(error.reason, str(error), error.retry_after or LATER)
    return Stopped("failed", error.reason, str(error))


def _by_image(refused: Refused) -> Stopped:
    if refused.reason in ("NoSpace", "TimedOut", "Crashed"):  # of the node, or it may go well another time
        return later(refused.reason, str(refused))
    return Stopped("failed", refused.reason, str(refused))
