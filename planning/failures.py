"""Decides what a failed Job's pods tell of the failure: which container ended how, and its last words."""

from __future__ import annotations

from collections.abc import Iterable

from planning.lifecycle import FailureDetail
from planning.podspecs import mapping, mappings, text

_WORDS = 512  # characters of a termination message worth repeating in a status


def failure_detail(pods: Iterable[object]) -> FailureDetail | None:
    """The first container that failed, of the newest failed pod; else why the pod itself failed (the kubelet refused
    it, say). None when no pod tells anything.
    """
    failed = [pod for pod in map(mapping, pods) if mapping(pod.get("status")).get("phase") == "Failed"]
    for pod in sorted(failed, key=lambda p: text(mapping(p.get("metadata")).get("creationTimestamp")), reverse=True):
        status = mapping(pod.get("status"))
        for kind in ("initContainerStatuses", "containerStatuses"):
            for container in mappings(status.get(kind)):
                ended = mapping(mapping(container.get("state")).get("terminated"))
                code = ended.get("exitCode")
                if isinstance(code, int) and not isinstance(code, bool) and code != 0:
                    return FailureDetail(code, text(ended.get("reason")), _last_words(text(ended.get("message"))))
        reason, message = text(status.get("reason")), text(status.get("message"))
        if reason or message:
            return FailureDetail(None, reason, _last_words(message))
    return None


def _last_words(message: str) -> str:
    return message if len(message) <= _WORDS else "…" + message[-_WORDS:]
