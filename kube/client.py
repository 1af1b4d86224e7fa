"""The Kubernetes API as berth uses it: JSON in, JSON out, one method for each verb, and watches as async iterators.

For every room that talks to the API server. Nothing is retried here but what callers know nothing of (refused
credentials, an expired page of a list, a version that was pinned here): they are activities and reflectors, which have
a retry policy of their own. Objects are the server's JSON as dicts.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlencode

import aiohttp
import orjson
from multidict import CIMultiDict
from yarl import URL

from kube.connection import Connection
from kube.errors import (
    Conflict,
    Gone,
    Invalid,
    KubeError,
    TooLarge,
    Unauthorized,
    bad_response,
    error_from_response,
)
from kube.resources import SERVICEACCOUNTS, Resource
from kube.wire import describe, event, lines, object_of, read, selectors, unavailable

_PIN_ATTEMPTS = 8
_QUIET = 120.0  # seconds without a byte after which a watch is given up; bookmarks come about every 60
_LARGE = 512 * 1024  # bytes
_PAGE_BYTES = 8 * 1024 * 1024  # of JSON, which takes four to six times as much when it is parsed
_JSON = "application/json"
_PARTIAL = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_PARTIAL_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"  # JSON is YAML
_TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)

Propagation = Literal["Background", "Foreground", "Orphan"]
Objects = list[dict[str, Any]]


class KubeClient:
    """A connection pool to one API server. Use `await KubeClient.connect(...)`, and close it (or `async with`)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._session = connection.session

    @classmethod
    async def connect(
        cls,
        kubeconfig: Path | None = None,
        context: str | None = None,
        user_agent: str = "berth",
        *,
        timeout: float = 30.0,
    ) -> KubeClient:
        """Opens with the kubeconfig given, else KUBECONFIG, else in-cluster, else ~/.kube/config.

        `timeout`: seconds for each request but watches. BadConfig is raised here; an unreachable server is not noticed
        before the first request.
        """
        return cls(await Connection.open(kubeconfig, context, user_agent=user_agent, timeout=timeout))

    @property
    def host(self) -> str:
        return self._connection.host

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> dict[str, Any]:
        return await self._call("GET", resource, namespace, name)

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        page_size: int = 500,
        metadata_only: bool = False,
    ) -> tuple[Objects, int]:
        """All objects, and the list's resourceVersion: the state at one moment, up to date when the call began.

        Fetched in pages; when the server forgets the page to continue from (410), the listing begins anew. It keeps
        one for minutes, so Gone is raised when that happens three times.
        """
        for last in (False, False, True):
            items: Objects = []
            resource_version = 0
            try:
                async for page, version in self.list_pages(
                    resource,
                    namespace,
                    label_selector=label_selector,
                    field_selector=field_selector,
                    page_size=page_size,
                    metadata_only=metadata_only,
                ):
                    items += page
                    resource_version = version
                return items, resource_version
            except Gone:
                if last:
                    raise
        raise AssertionError("unreachable")

    async def list_pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        page_size: int = 500,
        metadata_only: bool = False,
    ) -> AsyncGenerator[tuple[Objects, int], None]:
        """As `list`, a page at a time, so that nobody need hold all raw objects; Gone is raised between pages.

        A page has `page_size` objects at most, and fewer where they are large: an answer of more than `_PAGE_BYTES` is
        left unread, and asked for again with a smaller limit. That bounds what a page costs, whoever made the objects.
        """
        query = selectors(label_selector, field_selector)
        accept = _PARTIAL_LIST if metadata_only else _JSON
        request = describe("GET", resource, namespace, None)
        limit = page_size
        while True:
            query["limit"] = str(limit)
            at_most = _PAGE_BYTES if limit > 1 else None
            try:
                answer = await self._answer(
                    "GET", resource, namespace, None, query=query, accept=accept, at_most=at_most
                )
            except TooLarge:
                if at_most is None:
                    raise
                limit = max(limit // 10, 1)
                continue
            if 2 * len(answer) < _PAGE_BYTES:
                limit = min(2 * limit, page_size)
            page = object_of(answer, request)
            del answer  # while the caller looks at the objects
            items, metadata = page.get("items") or [], page.get("metadata") or {}
            if not isinstance(items, list) or not str(metadata.get("resourceVersion", "")).isdecimal():
                raise bad_response("no list of objects came back", request=describe("LIST", resource, namespace, None))
            if not metadata_only:
                for item in items:  # built-in kinds come without, custom resources and watch events with
                    item.setdefault("apiVersion", resource.api_version)
                    item.setdefault("kind", resource.kind)
            yield items, int(metadata["resourceVersion"])
            del page, items  # before the next one comes
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def create(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Creates an object; the namespace may also be the body's, and apiVersion and kind may be left out of it.
        AlreadyExists when the name is taken.
        """
        if namespace is None and resource.namespaced:
            namespace = (body.get("metadata") or {}).get("namespace")
            if namespace is None:
                raise ValueError(f"creating a {resource.kind} needs a namespace")
        query = {"dryRun": "All"} if dry_run else None
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return await self._call("POST", resource, namespace, None, query=query, body=full)

    async def token(
        self, account: str, namespace: str, *, bound_to: Mapping[str, str] | None = None, seconds: int = 3600
    ) -> str:
        """A token of a service account. With `bound_to` (apiVersion, kind, name, uid of a Pod, Node or Secret) it is
        good for as long as that object is there, and the token of a Node or Pod names the node.
        """
        spec: dict[str, Any] = {"expirationSeconds": seconds}
        if bound_to is not None:
            spec["boundObjectRef"] = dict(bound_to)
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        made = await self._call("POST", SERVICEACCOUNTS, namespace, account, subresource="token", body=body)
        return str(made["status"]["token"])

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: int | None = None,
        propagation: Propagation = "Background",
    ) -> None:
        """Deletes an object, or begins to when it has finalizers. NotFound is raised; with `uid`, Conflict when the
        name belongs to another object by now; with `resource_version`, Conflict when it changed since."""
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        known = {"uid": uid, "resourceVersion": None if resource_version is None else str(resource_version)}
        preconditions = {name: value for name, value in known.items() if value is not None}
        if preconditions:
            options["preconditions"] = preconditions
        await self._call("DELETE", resource, namespace, name, body=options)

    async def merge_patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        body: Mapping[str, Any],
        *,
        subresource: str | None = None,
    ) -> dict[str, Any]:
        """JSON merge patch (RFC 7386): null deletes, lists are replaced.

        `metadata.resourceVersion` and `metadata.uid` in the body are preconditions: Conflict when they differ. For a
        custom resource's subresource the uid alone costs a second request (see `_patch`), a resourceVersion does not.
        """
        return await self._patch(resource, name, namespace, body, _MERGE, subresource, {})

    async def apply(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        body: Mapping[str, Any],
        *,
        field_manager: str,
        subresource: str | None = None,
    ) -> dict[str, Any]:
        """Server-side apply: makes the object have these fields, creating it if need be, whoever owns them now. For a
        `subresource` (status) it must be there: NotFound otherwise.

        Fields this manager applied before and no longer names are removed. apiVersion, kind and name may be left out
        of the body.
        """
        metadata = {**(body.get("metadata") or {}), "name": name}
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body, "metadata": metadata}
        query = {"fieldManager": field_manager, "force": "true"}
        return await self._patch(resource, name, namespace, full, _APPLY, subresource, query)

    async def _patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        body: Mapping[str, Any],
        content_type: str,
        subresource: str | None,
        query: Mapping[str, str],
    ) -> dict[str, Any]:
        """Patches, keeping the promise about preconditions.

        The API server checks `metadata.uid` but for subresources of custom resources, where it ignores it (seen with
        1.36.3), so that the status would go to another object of the same name. There we look first, and pin the
        resourceVersion of what we saw.
        """
        metadata = body.get("metadata") or {}
        uid = metadata.get("uid")
        request = describe("PATCH", resource, namespace, name, subresource)
        # the group of a custom resource has a dot: the API server insists
        look = subresource is not None and uid and not metadata.get("resourceVersion") and "." in resource.group
        for attempt in range(_PIN_ATTEMPTS):
            if look:
                now = (await self._call("GET", resource, namespace, name, accept=_PARTIAL)).get("metadata") or {}
                if now.get("uid") != uid:
                    raise Conflict(f"the uid is {now.get('uid')}, not {uid}", reason="Conflict", request=request)
                body = {**body, "metadata": {**metadata, "resourceVersion": now["resourceVersion"]}}
            try:
                return await self._call(
                    "PATCH",
                    resource,
                    namespace,
                    name,
                    subresource=subresource,
                    query=query,
                    body=body,
                    content_type=content_type,
                )
            except Invalid as exc:
                raise _replaced(exc) from exc
            except Conflict:  # one of our own pin is not the caller's
                if not look or attempt == _PIN_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: int | str,
        label_selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
        timeout_seconds: int = 270,
        opened: Callable[[], None] | None = None,
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Events after `resource_version`, as (ADDED | MODIFIED | DELETED | BOOKMARK, object), until the server ends
        the watch after about `timeout_seconds`; then the iterator ends. `opened` is called when the server has accepted
        the watch, which is long before a quiet collection has an event.

        Gone: list again. TooLarge, or Unavailable with the reason BadResponse: an event cannot be read, and asking
        again from the same version would bring it again, so list again. Other Unavailable: the connection was lost,
        go on from the last version seen. Close the iterator (`contextlib.aclosing`) when leaving early.
        """
        request = describe("WATCH", resource, namespace, None)
        query = {
            **selectors(label_selector, field_selector),
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(resource_version),
            "timeoutSeconds": str(timeout_seconds),
        }
        url = self._url(resource.path(namespace), query)
        sent = time.monotonic()
        headers = await self._headers(request, _PARTIAL if metadata_only else _JSON)
        timeout = aiohttp.ClientTimeout(
            total=timeout_seconds + 30.0, sock_connect=10.0, sock_read=min(_QUIET, timeout_seconds + 15.0)
        )
        try:
            response = await self._session.request(
                "GET", url, headers=headers, timeout=timeout, **self._connection.options
            )
            try:
                if response.status != 200:
                    body = await response.read()
                    if response.status == 401:
                        await self._connection.reload(sent)
                    raise error_from_response(
                        response.status, body, request=request, retry_after=response.headers.get("Retry-After")
                    )
                if opened is not None:
                    opened()
                async for line in lines(response.content, request):
                    yield event(line, request)
            finally:
                response.close()
        except _TRANSPORT_ERRORS as exc:
            raise unavailable(exc, request, self.host) from exc

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _url(self, path: str, query: Mapping[str, str] | None) -> URL:
        return URL(f"{self.host}{path}?{urlencode(query)}" if query else f"{self.host}{path}", encoded=True)

    async def _headers(self, request: str, accept: str, content_type: str = "") -> CIMultiDict[str]:
        headers = CIMultiDict(Accept=accept)
        try:
            authorization = await self._connection.authorization()
        except Exception as exc:  # the token file is gone or empty, an exec plugin failed
            raise Unauthorized(str(exc), reason="BadCredentials", request=request) from exc
        if authorization:
            headers["Authorization"] = authorization
        if content_type:
            headers["Content-Type"] = content_type
        return headers

    async def _call(
        self,
        method: str,
        resource: Resource,
        namespace: str | None,
        name: str | None,
        *,
        subresource: str | None = None,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> dict[str, Any]:
        answer = await self._answer(
            method,
            resource,
            namespace,
            name,
            subresource=subresource,
            query=query,
            body=body,
            content_type=content_type,
            accept=accept,
        )
        return object_of(answer, describe(method, resource, namespace, name, subresource))

    async def _answer(
        self,
        method: str,
        resource: Resource,
        namespace: str | None,
        name: str | None,
        *,
        subresource: str | None = None,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        at_most: int | None = None,
    ) -> bytes:
        """The bytes of a good answer. TooLarge when they are more than `at_most`: then the rest is not read."""
        url = self._url(resource.path(namespace, name, subresource), query)
        request = describe(method, resource, namespace, name, subresource)
        try:
            data = None if body is None else orjson.dumps(body)
        except TypeError as wrong:  # nested too deep, or a number of more than 64 bits
            said = f"the object cannot be written as JSON: {wrong}"
            raise Invalid(said, reason="Invalid", request=request) from wrong
        refused = False
        while True:
            sent = time.monotonic()
            headers = await self._headers(request, accept, content_type if data is not None else "")
            try:
                async with self._session.request(
                    method, url, data=_payload(data), headers=headers, **self._connection.options
                ) as response:
                    status, answer = response.status, await read(response.content, at_most, request)
                    retry_after = response.headers.get("Retry-After")
            except _TRANSPORT_ERRORS as exc:
                raise unavailable(exc, request, self.host) from exc
            if status == 401 and not refused:
                refused = True
                if await self._connection.reload(sent):
                    continue
            if not 200 <= status < 300:
                raise error_from_response(status, answer, request=request, retry_after=retry_after)
            return answer


def _payload(data: bytes | None) -> aiohttp.Payload | None:
    """The body as aiohttp's own type, which it need not look up; a large one as a file, which it sends in pieces."""
    if data is None:
        return None
    return aiohttp.BytesIOPayload(io.BytesIO(data)) if len(data) > _LARGE else aiohttp.BytesPayload(data)


def _replaced(error: KubeError) -> KubeError:
    """A patch whose metadata.uid differs is refused as if the patch wanted to change it (422, field is immutable); what
    it means is that the name belongs to another object by now."""
    causes = error.details.get("causes") or []
    if not any(isinstance(c, dict) and c.get("field") == "metadata.uid" for c in causes):
        return error
    return Conflict(
        error.message, status=error.status, reason=error.reason, details=error.details, request=error.request
    )
