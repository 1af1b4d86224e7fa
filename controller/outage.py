"""What Temporal being away looks like to those who call it, for the poker and the sweep: they wait and try again."""

from __future__ import annotations

from datetime import timedelta

from temporalio.service import RPCError

# A lazy client connects at its first call, and says so by a RuntimeError ("Failed client connect") where it cannot; an
# established connection that breaks is an RPCError.
TEMPORAL_AWAY = (RPCError, RuntimeError)
# A server that hangs would be noticed by its connection's keep-alive only after three quarters of a minute.
ANSWER = timedelta(seconds=10)


def reason(away: Exception) -> str:
    """One line for a log or a probe; never empty."""
    text = away.message if isinstance(away, RPCError) else str(away)
    return text.strip() or type(away).__name__
