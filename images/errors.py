"""What can go wrong between berth and a registry, as one exception whose text a person can act on.

For every caller of the client: `kind` says how to react, `str()` says what failed, why, and what to do. Nothing of what
a registry wrote itself is in that text but numbers and the codes of the specification, so that no answer can put a
secret or a screenful into a status.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["away", "unauthorized", "not_found", "lied", "too_large", "malformed"]

_ADVICE: dict[Kind, str] = {
    "away": "Usually this passes; try again later.",
    "unauthorized": "Check the pull secret: does it name this registry, and may its user do this?",
    "not_found": "Check the reference; some registries also say this of what one may not see.",
    "lied": "Do not trust this registry or mirror before somebody has looked at it.",
    "too_large": "berth reads no such thing from any registry.",
    "malformed": "Push the image again with a tool that keeps to the OCI specifications.",
}


_REASONS: dict[Kind, str] = {
    "away": "RegistryAway",
    "unauthorized": "RegistryRefused",
    "not_found": "ImageNotFound",
    "lied": "RegistryLied",
    "too_large": "TooLarge",
    "malformed": "Malformed",
}


class RegistryError(Exception):
    """A registry did not give what was asked for.

    `kind`: away (may pass by itself), unauthorized, not_found, lied (what came is not what was promised), too_large,
    malformed. `reason` is the same in a word for conditions. `retry_after`: seconds after which to ask again, if the
    registry said so or it would help, else None.
    """

    def __init__(
        self, kind: Kind, what: str, why: str, advice: str | None = None, *, retry_after: float | None = None
    ) -> None:
        self.kind: Kind = kind
        self.what = what
        self.why = why
        self.retry_after = retry_after
        self.reason = _REASONS[kind]
        super().__init__(f"{what}: {why}. {_ADVICE[kind] if advice is None else advice}")
