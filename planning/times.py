"""Times as Kubernetes writes them, for everyone who reads or fills in a status."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(moment: float) -> str:
    """RFC 3339 in UTC, whole seconds, as Kubernetes writes times."""
    try:
        return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return "1970-01-01T00:00:00Z"


def seconds(value: object) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None if it is none."""
    if not isinstance(value, str) or len(value) > 64:
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
