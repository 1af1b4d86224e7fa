"""What `verify` asks of its child and what that answers, as bytes. For both sides, and apart from the child's own work:
whoever only asks, for weeks, does not hold the cryptography in its memory that checks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crds.kernelcachepolicy import Signer
from images.signatures.envelopes import Candidate
from planning.caches.trust import RootKey, Signature


@dataclass(frozen=True)
class Check:
    """One signer of one policy."""

    policy: str
    signer: Signer


def pack(
    digest: str, checks: Sequence[Check], roots: Mapping[RootKey, bytes], candidates: Sequence[Candidate], now: float
) -> bytes:
    """The request."""
    return json.dumps(
        {
            "digest": digest,
            "now": now,
            "checks": [[check.policy, check.signer.model_dump(by_alias=True, exclude_none=True)] for check in checks],
            "roots": [[*key, base64.b64encode(raw).decode()] for key, raw in roots.items()],
            "candidates": [
                {
                    "place": each.place,
                    "form": each.form,
                    "content": base64.b64encode(each.content).decode(),
                    "annotations": dict(each.annotations),
                    "problem": each.problem,
                }
                for each in candidates
            ],
        }
    ).encode()


def unpack(answer: bytes) -> list[Signature | None]:
    """What was found of each candidate, in their order; None where it is no signature.

    There are fewer where the child was ended.
    """
    found: list[Signature | None] = []
    for line in answer.splitlines():
        if (each := json.loads(line)) is None:
            found.append(None)
        else:
            satisfied = frozenset((policy, name) for policy, name in each["satisfies"])
            found.append(Signature(each["place"], each["signer"], satisfied, each["problem"]))
    return found
