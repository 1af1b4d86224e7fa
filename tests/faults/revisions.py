"""Every revision that etcd ever had, in order: what really happened, whatever anybody remembers.

Reads etcd's own watch API (JSON gateway) from the first revision on, so it depends on no code of berth. Needs a stack
with `keep_history` (nothing compacted, objects stored as JSON).
"""

from __future__ import annotations

import base64
import json
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planning.naming import ATTEMPT_LABEL, WORKLOAD_UID_LABEL
from stack import Endpoints

PREFIXES = {
    "workload": "/registry/gpu.warp.dev/gpuworkloads/",
    "job": "/registry/jobs/",
    "pod": "/registry/pods/",
    "node": "/registry/minions/",
}


@dataclass(frozen=True)
class Revision:
    """One object at one revision; `value` is None when it was deleted."""

    number: int
    kind: str
    key: str
    value: dict[str, Any] | None


def history(endpoints: Endpoints) -> list[Revision]:
    """All revisions of workloads, Jobs, pods and nodes, oldest first."""
    context = ssl.create_default_context(cafile=str(endpoints.etcd_ca))
    context.load_cert_chain(str(endpoints.etcd_cert), str(endpoints.etcd_key))
    newest = _newest(endpoints, context)
    found = [r for kind, prefix in PREFIXES.items() for r in _watched(endpoints, context, kind, prefix, newest)]
    return sorted(found, key=lambda r: (r.number, r.key))


def _call(endpoints: Endpoints, context: ssl.SSLContext, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{endpoints.etcd_endpoint}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, context=context, timeout=60)


def _newest(endpoints: Endpoints, context: ssl.SSLContext) -> int:
    with _call(endpoints, context, "/v3/kv/range", {"key": _b64("/"), "limit": "1"}) as answer:
        return int(json.load(answer)["header"]["revision"])


def _watched(endpoints: Endpoints, context: ssl.SSLContext, kind: str, prefix: str, newest: int) -> Iterator[Revision]:
    create = {
        "create_request": {
            "key": _b64(prefix),
            "range_end": _b64(prefix[:-1] + chr(ord(prefix[-1]) + 1)),
            "start_revision": "1",
            # An empty answer now and then tells how far the watch has come when the prefix itself is quiet.
            "progress_notify": True,
        }
    }
    wanted = _last_change(endpoints, context, prefix)
    if wanted is None:
        return
    with _call(endpoints, context, "/v3/watch", create) as stream:
        for line in stream:
            result = json.loads(line)["result"]
            if result.get("compact_revision"):
                raise AssertionError(f"history before revision {result['compact_revision']} was compacted away")
            last = 0
            for event in result.get("events", ()):
                last = int(event["kv"]["mod_revision"])
                key = base64.b64decode(event["kv"]["key"]).decode()
                deleted = event.get("type") == "DELETE"
                value = None if deleted else json.loads(base64.b64decode(event["kv"]["value"]))
                yield Revision(last, kind, key, value)
            if last >= wanted or int(result["header"]["revision"]) > newest + 1_000_000:
                return


def _last_change(endpoints: Endpoints, context: ssl.SSLContext, prefix: str) -> int | None:
    """A marker written now under the prefix: a watch has seen everything once it sees the marker."""
    key = prefix + "zz-end-of-history"
    with _call(endpoints, context, "/v3/kv/put", {"key": _b64(key), "value": _b64("null")}) as answer:
        revision = int(json.load(answer)["header"]["revision"])
    with _call(endpoints, context, "/v3/kv/deleterange", {"key": _b64(key)}):
        return revision


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def runs_of(revisions: list[Revision]) -> dict[str, list[int]]:
    """The attempt of each pod that ran, by its workload's UID. (A Job may never tell of one that ran for a second.)"""
    ran: dict[str, dict[str, int]] = {}
    for revision in revisions:
        if revision.kind == "pod" and revision.value is not None and revision.value["status"]["phase"] == "Running":
            meta = revision.value["metadata"]
            mine = ran.setdefault(meta["labels"][WORKLOAD_UID_LABEL], {})
            mine[meta["uid"]] = int(meta["labels"][ATTEMPT_LABEL])
    return {workload: sorted(pods.values()) for workload, pods in ran.items()}
