"""What the fake API server knows of objects: where a URL points, merge patch, selectors, paths of fields.

Pure functions, for fake_api.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Object = dict[str, Any]

_PATH = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_WITHOUT_STATUS = {"configmaps", "secrets", "events", "leases", "serviceaccounts", "namespaces"}


@dataclass(frozen=True)
class Target:
    """What a request's path names. (The subresources of a namespace are not told from objects in it.)"""

    plural: str
    namespace: str | None
    name: str | None
    sub: str | None
    custom: bool  # a custom resource, by its group

    @classmethod
    def of(cls, path: str) -> Target:
        match = _PATH.match(path)
        assert match, f"the fake API server does not understand {path}"
        parts = {k: unquote(v) if v is not None else None for k, v in match.groupdict().items()}
        plural, group = parts["plural"], parts["group"] or ""
        assert plural is not None
        custom = "." in group and not group.endswith(".k8s.io")
        return cls(plural, parts["namespace"], parts["name"], parts["sub"], custom)

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace or "", self.name or ""

    @property
    def has_status(self) -> bool:
        return self.plural not in _WITHOUT_STATUS

    def restrict(self, old: Object, new: Object) -> Object:
        """The write this endpoint may do: /status changes only the status, the main resource everything but it."""
        if not self.has_status:
            return new
        keep, take = (old, new) if self.sub == "status" else (new, old)
        result = {k: v for k, v in keep.items() if k != "status"}
        if "status" in take:
            result["status"] = take["status"]
        return copy.deepcopy(result)


def merge(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strip(obj: Object) -> Object:
    return {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": obj["metadata"]}


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def at(obj: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        obj = obj.get(key) if isinstance(obj, dict) else None
    return obj


def drop(obj: Any, path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        obj = obj.get(key)
        if not isinstance(obj, dict):
            return
    obj.pop(path[-1], None)


def selection(namespace: str | None, labels: str, fields: str) -> Callable[[Object], bool]:
    """The predicate of a namespace, a label selector (`a=b`, `a!=b`, `a`, `!a`, `a in (b,c)`) and a field selector."""
    tests: list[Callable[[Object], bool]] = []
    if namespace:
        tests.append(lambda obj: obj["metadata"].get("namespace") == namespace)
    tests += [_label(term.strip()) for term in re.split(r",(?![^(]*\))", labels) if term]
    for term in fields.split(",") if fields else []:
        path, operator, value = re.split(r"(!=|==|=)", term, maxsplit=1)
        tests.append(_field(tuple(path.split(".")), operator, value))
    return lambda obj: all(test(obj) for test in tests)


def _field(path: tuple[str, ...], operator: str, value: str) -> Callable[[Object], bool]:
    return lambda obj: ((at(obj, path) or "") == value) is (operator != "!=")


def _label(term: str) -> Callable[[Object], bool]:
    def labels(obj: Object) -> Object:
        found: Object = obj["metadata"].get("labels") or {}
        return found

    if match := re.fullmatch(r"(\S+) (in|notin) \(([^)]*)\)", term):
        key, wanted, values = match[1], match[2] == "in", {value.strip() for value in match[3].split(",")}
        return lambda obj: (labels(obj).get(key) in values) is wanted
    if match := re.fullmatch(r"([^!=]+)(!=|==|=)(.*)", term):
        key, equal, value = match[1], match[2] != "!=", match[3]
        return lambda obj: (labels(obj).get(key) == value) is equal
    if term.startswith("!"):
        return lambda obj: term[1:] not in labels(obj)
    return lambda obj: term in labels(obj)
