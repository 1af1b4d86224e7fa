"""Times as Kubernetes writes them, for everyone who fills in a status."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, whole seconds, as Kubernetes writes times."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return "1970-01-01T00:00:00Z"
