"""A Kubernetes API server in this process, for tests of everything that talks to one: real HTTP, a pretended store.

It keeps what clients rely on: resourceVersions, paging, watches with selectors and bookmarks, compaction and 410 (as a
response or as an ERROR event), preconditions, merge patch, a simple server-side apply, finalizers, the status
subresource and generations. `fail(...)` makes chosen requests go wrong.

    async with FakeApi() as api, await api.client() as client: ...

Not kept: admission, schemas, defaulting, field ownership of list elements.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml
from aiohttp import web

from kube.client import KubeClient
from kube.resources import Resource
from tests.kube.fake_objects import Object, Target, at, drop, leaves, merge, selection, strip

Key = tuple[str, str]  # namespace ("" for none), name

NOW = "2026-11-21T10:00:00Z"


class ApiFailure(Exception):
    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details,
            "code": code,
        }


@dataclass
class Fault:
    """What happens to the next `count` requests that match, after `skip` of them were let through.

    do: "status" (answers `status`), "hang" (says nothing until the client leaves), "reset" (closes the connection),
    "garbage" (answers 200 with something that is not JSON), "lost" (does what was asked, then closes the connection).
    """

    do: str = "status"
    status: int = 500
    reason: str = "InternalError"
    message: str = ""
    method: str = ""
    contains: str = ""
    watch: bool | None = None
    count: int = 1
    skip: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    def matches(self, request: web.Request) -> bool:
        if self.method and request.method != self.method:
            return False
        if self.watch is not None and ("watch" in request.query) != self.watch:
            return False
        return self.contains in request.path_qs


@dataclass
class Entry:
    """One write: `new` is the object after it, or, when `deleted`, as it was last with the deletion's version."""

    version: int
    plural: str
    old: Object | None
    new: Object
    deleted: bool = False


class _Watcher:
    """An open watch. Its queue holds writes, raw bytes to send, b"" to end it and None to cut the connection."""

    def __init__(self, plural: str, queue: list[Entry | bytes | None], bookmarks: bool) -> None:
        self.plural = plural
        self.bookmarks = bookmarks
        self.queue = queue
        self.wake = asyncio.Event()

    def push(self, item: Entry | bytes | None) -> None:
        self.queue.append(item)
        self.wake.set()


class FakeApi:
    """`store[plural]` maps (namespace, name) to objects; change it through `put` and `remove`."""

    def __init__(self, *, token: str = "", gone_as_event: bool = False) -> None:
        self.store: dict[str, dict[Key, Object]] = {}
        self.version = 100
        self.history: list[Entry] = []
        self.compacted = 0
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.token = token
        self.gone_as_event = gone_as_event
        self.url = ""
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._page_ids = itertools.count()
        self._applied: dict[tuple[str, Key], dict[str, set[tuple[str, ...]]]] = {}
        self._watchers: set[_Watcher] = set()
        self._leaving = asyncio.Event()

    # --- for tests: running, looking, changing, breaking ---

    async def __aenter__(self) -> FakeApi:
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leaving.set()
        self.drop_watches()
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "fake",
                    "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                    "users": [{"name": "fake", "user": {"token": self.token or "any"}}],
                    "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
                }
            )
        )
        return path

    async def client(self, **options: Any) -> KubeClient:
        with tempfile.TemporaryDirectory() as folder:
            return await KubeClient.connect(self.kubeconfig(Path(folder)), **options)

    def objects(self, resource: Resource) -> dict[Key, Object]:
        return self.store.setdefault(resource.plural, {})

    def put(self, resource: Resource, name: str, namespace: str | None = None, **fields: Any) -> Object:
        """Creates or replaces an object, as if another client had; returns it as stored."""
        key = (namespace or "", name)
        old = self.objects(resource).get(key)
        metadata = {**(old or {}).get("metadata", {}), **fields.pop("metadata", {}), "name": name}
        if namespace:
            metadata["namespace"] = namespace
        obj = {"apiVersion": resource.api_version, "kind": resource.kind, **fields, "metadata": metadata}
        return self._write(resource.plural, key, obj)

    def remove(self, resource: Resource, name: str, namespace: str | None = None) -> None:
        """Deletes an object at once, whatever its finalizers."""
        self._erase(resource.plural, (namespace or "", name))

    def compact(self) -> None:
        """Forgets all history: watches and pages from before now are answered with 410."""
        self.compacted = self.version
        self.history.clear()

    def drop_watches(self) -> None:
        """Cuts the connections of all open watches."""
        self._command(None)

    def send_raw(self, data: bytes) -> None:
        """Writes bytes into all open watches: garbage, half a line, a line too long."""
        self._command(data)

    def bookmark(self, resource: Resource) -> None:
        metadata = {"resourceVersion": str(self.version)}
        obj = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        for watcher in self._watchers:
            if watcher.plural == resource.plural and watcher.bookmarks:
                watcher.push(orjson.dumps({"type": "BOOKMARK", "object": obj}) + b"\n")

    def expire_watches(self) -> None:
        """Sends the ERROR event 410 to all open watches and ends them."""
        self.compact()
        self._command(orjson.dumps({"type": "ERROR", "object": _expired().body}) + b"\n")
        self._command(b"")

    def fail(self, do: str = "status", **options: Any) -> Fault:
        fault = Fault(do=do, **options)
        self.faults.append(fault)
        return fault

    @property
    def watching(self) -> int:
        return len(self._watchers)

    # --- the store ---

    def _write(self, plural: str, key: Key, obj: Object, dry_run: bool = False) -> Object:
        objects = self.store.setdefault(plural, {})
        old = objects.get(key)
        obj = copy.deepcopy(obj)
        metadata = obj["metadata"]
        if old is None:
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", NOW)
            metadata["generation"] = 1
        else:
            for name in ("uid", "creationTimestamp"):
                metadata[name] = old["metadata"][name]
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
            if "deletionTimestamp" in old["metadata"]:
                metadata["deletionTimestamp"] = old["metadata"]["deletionTimestamp"]
            changed = {k: v for k, v in obj.items() if k not in ("metadata", "status")} != {
                k: v for k, v in old.items() if k not in ("metadata", "status")
            }
            metadata["generation"] = old["metadata"]["generation"] + changed
            if obj == old:
                return obj  # the real one writes nothing either
        if dry_run:
            return obj
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            return self._erase(plural, key)
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        objects[key] = obj
        self._record(Entry(self.version, plural, old, obj))
        return obj

    def _erase(self, plural: str, key: Key) -> Object:
        old = self.store[plural].pop(key)
        self._applied.pop((plural, key), None)
        self.version += 1
        last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
        self._record(Entry(self.version, plural, old, last, deleted=True))
        return last

    def _record(self, entry: Entry) -> None:
        self.history.append(entry)
        for watcher in self._watchers:
            if watcher.plural == entry.plural:
                watcher.push(entry)

    def _command(self, data: bytes | None) -> None:
        for watcher in self._watchers:
            watcher.push(data)

    # --- HTTP ---

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        parsed = orjson.loads(body) if body else None
        self.requests.append((request.method, request.path_qs, parsed))
        fault = self._fault(request)
        if fault is not None:
            if fault.do == "hang":
                await self._leaving.wait()
            if fault.do == "lost":
                self._answer(request, parsed)
            if fault.do in ("hang", "reset", "lost"):
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if fault.do == "garbage":
                return web.Response(body=b"<html>not JSON", content_type="application/json")
            failure = ApiFailure(fault.status, fault.reason, fault.message or f"injected {fault.status}")
            return _json(failure.body, fault.status, fault.headers)
        try:
            if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
                raise ApiFailure(401, "Unauthorized", "Unauthorized")
            if "watch" in request.query:
                return await self._watch(request)
            code, answer = self._answer(request, parsed)
            return _json(answer, code)
        except ApiFailure as failure:
            return _json(failure.body, failure.code)

    def _fault(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.count > 0 and fault.matches(request):
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.count -= 1
                return fault
        return None

    def _answer(self, request: web.Request, body: Any) -> tuple[int, Object]:
        target = Target.of(request.path)
        if target.name is None:
            if request.method == "GET":
                return 200, self._list(target, request)
            if request.method == "POST":
                return 201, self._create(target, body, "dryRun" in request.query)
        elif request.method == "GET":
            return 200, self._get(target)
        elif request.method == "DELETE":
            return 200, self._delete(target, body or {})
        elif request.method == "PATCH":
            if request.content_type == "application/apply-patch+yaml":
                return self._apply(target, body, request.query["fieldManager"])
            return 200, self._patch(target, body)
        raise ApiFailure(405, "MethodNotAllowed", f"{request.method} is not supported here")

    def _get(self, target: Target) -> Object:
        try:
            return self.store[target.plural][target.key]
        except KeyError:
            message = f'{target.plural} "{target.name}" not found'
            raise ApiFailure(404, "NotFound", message, name=target.name, kind=target.plural) from None

    def _create(self, target: Target, body: Object, dry_run: bool) -> Object:
        body = copy.deepcopy(body)
        if target.custom and not (body.get("kind") and body.get("apiVersion")):
            raise ApiFailure(400, "BadRequest", "the object provided is unrecognized: Object 'Kind' is missing")
        metadata = body.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if not metadata.get("name"):
            raise ApiFailure(422, "Invalid", "metadata.name: Required value: name or generateName is required")
        if target.namespace:
            metadata["namespace"] = target.namespace
        key = (target.namespace or "", metadata["name"])
        if key in self.store.get(target.plural, {}):
            message = f'{target.plural} "{key[1]}" already exists'
            raise ApiFailure(409, "AlreadyExists", message, name=key[1], kind=target.plural)
        for name in ("resourceVersion", "uid"):
            metadata.pop(name, None)
        if target.has_status:
            body.pop("status", None)
        return self._write(target.plural, key, body, dry_run)

    def _delete(self, target: Target, options: Object) -> Object:
        old = self._get(target)
        self._check(target, old, (options.get("preconditions") or {}))
        if not old["metadata"].get("finalizers"):
            return self._erase(target.plural, target.key)
        if "deletionTimestamp" in old["metadata"]:
            return old
        new = copy.deepcopy(old)
        new["metadata"]["deletionTimestamp"] = NOW
        return self._write(target.plural, target.key, new)

    def _check(self, target: Target, old: Object, metadata: Object, *, patching: bool = False) -> None:
        for name in ("uid", "resourceVersion"):
            wanted = metadata.get(name)
            if wanted and wanted != old["metadata"][name]:
                if patching and name == "uid":  # so does the real one
                    if target.custom and target.sub:
                        continue
                    causes = [{"reason": "FieldValueInvalid", "message": "field is immutable", "field": "metadata.uid"}]
                    raise ApiFailure(422, "Invalid", "metadata.uid: field is immutable", causes=causes)
                message = f'Operation cannot be fulfilled on {target.plural} "{target.name}": {name} differs'
                raise ApiFailure(409, "Conflict", message, name=target.name, kind=target.plural)

    def _patch(self, target: Target, body: Object) -> Object:
        old = self._get(target)
        self._check(target, old, body.get("metadata") or {}, patching=True)
        return self._write(target.plural, target.key, target.restrict(old, merge(old, body)))

    def _apply(self, target: Target, body: Object, manager: str) -> tuple[int, Object]:
        """By force: what another manager owns changes hands."""
        old = self.store.get(target.plural, {}).get(target.key) if target.sub is None else self._get(target)
        if old is not None:
            self._check(target, old, body.get("metadata") or {}, patching=True)
        base: Object = old or {"metadata": {"name": target.name}}
        if old is None and target.namespace:
            base["metadata"]["namespace"] = target.namespace
        owners = {k: set(v) for k, v in self._applied.get((target.plural, target.key), {}).items()}
        fields = set(leaves({k: v for k, v in body.items() if k not in ("apiVersion", "kind")}))
        for other, owned in owners.items():
            if other == manager:
                continue
            owned -= {path for path in fields & owned if at(base, path) != at(body, path)}
        new = copy.deepcopy(base)
        for path in owners.get(manager, set()) - fields:
            if not any(path in owned for other, owned in owners.items() if other != manager):
                drop(new, path)
        new = target.restrict(base, merge(new, body))
        new.setdefault("apiVersion", body.get("apiVersion"))
        new.setdefault("kind", body.get("kind"))
        written = self._write(target.plural, target.key, new)
        self._applied[target.plural, target.key] = {**owners, manager: fields}
        return (200 if old is not None else 201), written

    def _list(self, target: Target, request: web.Request) -> Object:
        token = request.query.get("continue")
        if token:
            version, rest = self._pages[token]  # good until it expires, for any limit
            if version < self.compacted:
                raise _expired()
        else:
            version, chosen = self.version, _selection(target, request)
            found = self.store.get(target.plural, {})
            rest = [found[key] for key in sorted(found) if chosen(found[key])]
        limit = int(request.query.get("limit", 0)) or len(rest)
        page, rest = rest[:limit], rest[limit:]
        metadata: Object = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = str(next(self._page_ids))
            self._pages[metadata["continue"]] = (version, rest)
        if _partial(request):
            return {"kind": "PartialObjectMetadataList", "metadata": metadata, "items": [strip(o) for o in page]}
        items = [{k: v for k, v in obj.items() if k not in ("apiVersion", "kind")} for obj in page]
        return {"kind": "List", "metadata": metadata, "items": items}

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        target = Target.of(request.path)
        chosen = _selection(target, request)
        since = int(request.query.get("resourceVersion", "0")) or self.version
        expired = since < self.compacted
        if expired and not self.gone_as_event:
            raise _expired()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if expired:
            await response.write(orjson.dumps({"type": "ERROR", "object": _expired().body}) + b"\n")
            return response
        partial = _partial(request)
        queue: list[Entry | bytes | None] = []
        queue += [entry for entry in self.history if entry.plural == target.plural and entry.version > since]
        watcher = _Watcher(target.plural, queue, bookmarks=request.query.get("allowWatchBookmarks") == "true")
        self._watchers.add(watcher)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "300"))):
                while True:
                    watcher.wake.clear()
                    while watcher.queue:
                        item = watcher.queue.pop(0)
                        if item == b"":
                            return response
                        if item is None:
                            assert request.transport is not None
                            request.transport.abort()
                            return response
                        data = _event(item, chosen, partial) if isinstance(item, Entry) else item
                        if data:
                            await response.write(data)
                    await watcher.wake.wait()
        except (TimeoutError, ConnectionError):
            return response
        finally:
            self._watchers.discard(watcher)


def _event(entry: Entry, chosen: Callable[[Object], bool], partial: bool) -> bytes:
    """What a watch with this selection sees of a write: nothing, or an object that comes, changes or leaves."""
    was = entry.old is not None and chosen(entry.old)
    now = not entry.deleted and chosen(entry.new)
    kind = ("MODIFIED" if was else "ADDED") if now else "DELETED" if was else ""
    obj = strip(entry.new) if partial else entry.new
    return orjson.dumps({"type": kind, "object": obj}) + b"\n" if kind else b""


def _json(body: Object, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=headers)


def _expired() -> ApiFailure:
    return ApiFailure(410, "Expired", "too old resource version")


def _partial(request: web.Request) -> bool:
    return "PartialObjectMetadata" in request.headers.get("Accept", "")


def _selection(target: Target, request: web.Request) -> Callable[[Object], bool]:
    return selection(target.namespace, request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))
