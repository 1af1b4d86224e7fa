"""AdmissionReview (admission.k8s.io/v1) as bytes in and bytes out, for the webhooks' server.

The answer comes from what is given alone: no request to anybody. Whatever is no review is told what is wrong with it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from planning.admission import Installation, Review, checked, filled_in, refusal, warnings

API_VERSION = "admission.k8s.io/v1"
_UID_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; `kind` and `result` are what is counted: allowed, refused, filled_in or malformed."""

    status: int
    body: bytes
    kind: str
    result: str


@dataclass(frozen=True, slots=True)
class Question:
    """What the API server asks about: `new` is None where nothing is known of the kind, or it is a deletion; `old` is
    None for a creation.
    """

    uid: str
    group: str
    kind: str
    namespace: str
    dry_run: bool
    new: dict[str, Any] | None = None
    old: dict[str, Any] | None = None

    @property
    def is_pod(self) -> bool:
        return (self.group, self.kind) == ("", "Pod")


class Malformed(Exception):
    """What came is no AdmissionReview; says where and why."""


def validate(body: bytes, installation: Installation) -> Answer:
    """The answer to a validating webhook's call."""

    def judge(review: Review) -> tuple[str, dict[str, Any]]:
        wrong = refusal(review, installation)
        if wrong:
            return "refused", {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": wrong}}
        told = warnings(review, installation)
        return "allowed", {"warnings": told} if told else {}

    return _answer(body, judge)


def fill_in(body: bytes, installation: Installation) -> Answer:
    """The answer to a mutating webhook's call."""

    def judge(review: Review) -> tuple[str, dict[str, Any]]:
        patch = filled_in(review, installation) if review.old is None else []
        if not patch:
            return "allowed", {}
        encoded = base64.b64encode(orjson.dumps(patch)).decode()
        return "filled_in", {"patchType": "JSONPatch", "patch": encoded}

    return _answer(body, judge)


def _answer(body: bytes, judge: Callable[[Review], tuple[str, dict[str, Any]]]) -> Answer:
    try:
        asked = read(body)
    except Malformed as wrong:
        return malformed(wrong)
    if asked.new is None or not checked(asked.group, asked.kind):
        # Only a configuration that somebody changed asks about it, and it is none of ours.
        return answer(asked, "other", "allowed", {})
    result, response = judge(Review(asked.kind, asked.namespace, asked.new, asked.old))
    return answer(asked, asked.kind, result, response)


def answer(asked: Question, kind: str, result: str, response: dict[str, Any]) -> Answer:
    """It may be written, unless `response` says otherwise."""
    told = {"uid": asked.uid, "allowed": True, **response}
    body = {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": told}
    return Answer(200, orjson.dumps(body), kind, result)


def malformed(wrong: Malformed) -> Answer:
    """What somebody is told who sent no review."""
    return Answer(400, f"not an AdmissionReview of {API_VERSION}: {wrong}\n".encode(), "", "malformed")


def read(body: bytes) -> Question:
    """Raises Malformed."""
    try:
        whole = orjson.loads(body)
    except orjson.JSONDecodeError as wrong:
        raise Malformed(f"it is not JSON ({wrong})") from None
    if not isinstance(whole, dict):
        raise Malformed("it must be an object")
    if (whole.get("apiVersion"), whole.get("kind")) != (API_VERSION, "AdmissionReview"):
        raise Malformed("apiVersion and kind are others")
    request = _object(whole, "request", "")
    uid = _text(request, "uid")
    if not uid:
        raise Malformed("request.uid must not be empty")
    kind = _object(request, "kind", "request.")
    group, name, operation = _text(kind, "group"), _text(kind, "kind"), _text(request, "operation")
    namespace = _text(request, "namespace") if "namespace" in request else ""
    asked = Question(uid, group, name, namespace, request.get("dryRun") is True)
    if operation not in ("CREATE", "UPDATE") or not (asked.is_pod or checked(group, name)):
        return asked
    new = _object(request, "object", "request.")
    old = _object(request, "oldObject", "request.") if operation == "UPDATE" else None
    return replace(asked, new=new, old=old)


def _object(holder: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = holder.get(key)
    if not isinstance(value, dict):
        raise Malformed(f"{path}{key} must be an object")
    return value


def _text(holder: dict[str, Any], key: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str) or len(value) > _UID_LIMIT:
        raise Malformed(f"{key} must be a string of at most {_UID_LIMIT} characters")
    return value
