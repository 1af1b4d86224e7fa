"""Which failed requests are worth another try of the whole activity, and how a refusal is told that is final.

For the activity that carries out a round: of all that it does, what fails should not hold up the rest.
"""

from __future__ import annotations

from temporalio import activity

from kube.errors import AccessDenied, Conflict, KubeError, Unauthorized, Unavailable

# Worth another try of the whole activity. Conflict: on creation, a quota that others are changing too. AccessDenied: an
# API server that has just begun, or somebody took berth's rights; neither is the fault of a workload.
TRANSIENT = (Unavailable, Unauthorized, AccessDenied, Conflict)
# Tries after which an entry that still fails is given up on, so that the others are not held up by it.
ATTEMPTS = 5


def may_pass(failed: KubeError) -> bool:
    """Whether the whole is worth another try: nobody is held up by an entry that fails as all others would, for to give
    up would only cost rounds; nor yet by one that has not failed often.
    """
    often = activity.info().attempt >= ATTEMPTS
    return isinstance(failed, TRANSIENT) and (failed.reason == "ConnectionFailed" or not often)


def cut(refused: Exception) -> str:
    """A refusal's text, short enough for statuses and histories: a webhook may say a lot."""
    text = str(refused)
    return text if len(text) <= 1024 else text[:1023] + "…"
