"""What can go wrong between berth and the API server, as exceptions whose text a person can act on.

For every caller of the client: the class says how to react (retry, read again, give up), `str()` says which request on
which object failed, what the server answered and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson


class KubeError(Exception):
    """A request failed.

    `status` is the HTTP status (0: none came), `reason` the machine-readable reason of the API server's Status (or
    berth's own: ConnectionFailed, Timeout, BadResponse, BadConfig), `message` what the server said, `details` the
    Status' details, `retry_after` seconds the server asked to wait, or None.
    """

    what: ClassVar[str] = "failed"
    advice: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
        request: str = "",
        advice: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        self.details: dict[str, Any] = dict(details or {})
        self.request = request
        self.retry_after = retry_after
        code = " ".join(part for part in (str(status) if status else "", reason) if part)
        text = f"{request or 'Kubernetes request'}: {self.what}" + (f" ({code})" if code else "")
        if message:
            text = f"{text}: {message.rstrip('. ')}"
        hint = self.advice if advice is None else advice
        super().__init__(f"{text}. {hint}" if hint else text)


class NotFound(KubeError):
    what = "not found"
    advice = "It was deleted, or never was in this namespace."


class AlreadyExists(KubeError):
    what = "already exists"
    advice = "Another object has this name: read it, or choose another name."


class Conflict(KubeError):
    what = "conflict"
    advice = "Somebody changed or replaced the object since it was read: read it again and decide anew."


class Gone(KubeError):
    what = "too old"
    advice = "The server no longer keeps this resourceVersion or page: list again."


class Invalid(KubeError):
    what = "refused as invalid"
    advice = "Correct the fields named here; trying again without a change cannot help."


class Forbidden(KubeError):
    what = "forbidden"
    advice = "A quota, an admission policy or a webhook refuses it."


class AccessDenied(Forbidden):
    """The authorizer's 403, where admission's are about the object. Not for ever: an API server that has just begun
    knows nobody's rights for a moment.
    """

    advice = "berth's account lacks this right: see `kubectl auth can-i`."


class Unauthorized(KubeError):
    what = "credentials refused"
    advice = "Check the kubeconfig's user, or the service account's token."


class TooLarge(KubeError):
    what = "too large"
    advice = "Make the object smaller."


class Unavailable(KubeError):
    """The server could not be reached, did not answer in time, is overloaded, or failed inside: may pass by itself.

    A write that ended so may or may not have happened.
    """

    what = "API server unavailable"
    advice = "Usually this passes: try again."


class BadConfig(KubeError):
    """No usable kubeconfig or service account: raised by `KubeClient.connect` only."""

    what = "no usable configuration"
    advice = "Give --kubeconfig or set KUBECONFIG."


_BY_STATUS: Mapping[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    408: Unavailable,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    422: Invalid,
    429: Unavailable,
}
# How the API server words what its authorizer refuses (apiserver/pkg/endpoints/handlers/responsewriters/errors.go).
_DENIED = re.compile(r'\bUser ".*" cannot [a-z]+ (resource|path) "')
_BY_REASON: Mapping[str, type[KubeError]] = {"AlreadyExists": AlreadyExists, "Expired": Gone, "Gone": Gone}


def error_from_status(status: Mapping[str, Any], *, request: str, retry_after: float | None = None) -> KubeError:
    """The exception for a `Status` object, be it a response's body or the object of a watch's ERROR event."""
    code = status.get("code")
    code = code if isinstance(code, int) else 0
    reason = str(status.get("reason") or "")
    details = status.get("details")
    details = details if isinstance(details, dict) else {}
    message = str(status.get("message") or "")
    kind = _BY_REASON.get(reason) or _BY_STATUS.get(code) or (Unavailable if code >= 500 else KubeError)
    if kind is Forbidden and _DENIED.search(message):
        kind = AccessDenied
    seconds = details.get("retryAfterSeconds")
    if retry_after is None and isinstance(seconds, int) and seconds > 0:
        retry_after = float(seconds)
    advice = None
    if kind is NotFound and not details.get("name"):
        advice = "The server does not serve this kind: is its CustomResourceDefinition installed?"
    return kind(
        message,
        status=code,
        reason=reason,
        details=details,
        request=request,
        retry_after=retry_after,
        advice=advice,
    )


def error_from_response(http_status: int, body: bytes, *, request: str, retry_after: str | None = None) -> KubeError:
    """The exception for an HTTP response outside 2xx; its body need not be a Status (a proxy may have written it)."""
    try:
        status = orjson.loads(body)
    except orjson.JSONDecodeError:
        status = None
    if not isinstance(status, dict) or status.get("kind") != "Status":
        status = {"message": body[:300].decode("utf-8", "replace").strip()}
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    return error_from_status({**status, "code": http_status}, request=request, retry_after=seconds)


def bad_response(message: str, *, request: str, status: int = 200) -> Unavailable:
    """A complete answer that is not what the API promises: garbage, or not an object."""
    return Unavailable(message, status=status, reason="BadResponse", request=request)
