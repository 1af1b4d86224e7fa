"""Why a cache or an image was refused, in a word for programs and a sentence for people."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "Unsupported",  # well made, but nothing that berth mounts
    "Malformed",  # broken, or made by a broken tool
    "Unsafe",  # made to write where it must not
    "TooLarge",  # beyond a limit of planning.caches.limits
    "Inconsistent",  # its parts contradict each other
    "NoSpace",  # the disk is full
    "TimedOut",
    "Crashed",  # the child that read it died
]


class Refused(Exception):
    """Nothing of it is used; `str()` is the sentence, which names the object and the place in it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def shown(text: str | bytes, most: int = 120) -> str:
    """A name from an image as it may stand in a sentence: quoted, cut, nothing that moves a cursor."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= most else f"{text[: most - 1]}…")
