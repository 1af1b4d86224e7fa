"""Writes deploy/crds/*.yaml from the models: `python -m crds.generate [--check]`, for `make crds` and CI.

A CRD's schema must be structural, so pydantic's JSON schema is inlined and stripped of what Kubernetes forbids there;
x-kubernetes-* keys, formats and bounds come from the models as they stand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from crds.definitions import DEFINITIONS, Definition
from crds.gpuworkload import VERSION

Schema = dict[str, Any]

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "crds"
HEADER = "# Generated from {module} by `python -m crds.generate`; edit the models, not this file.\n"

_CARRIED = (
    "type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties", "required",
)  # fmt: skip


def custom_resource_definition(definition: Definition) -> Schema:
    """The whole CustomResourceDefinition."""
    version: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        **({"subresources": {"status": {}}} if definition.status else {}),
        "additionalPrinterColumns": definition.columns,
    }
    if definition.selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in definition.selectable]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{definition.plural}.{definition.group}"},
        "spec": {
            "group": definition.group,
            "scope": definition.scope,
            "names": {
                "kind": definition.kind,
                "listKind": f"{definition.kind}List",
                "plural": definition.plural,
                "singular": definition.kind.lower(),
                "shortNames": [definition.short_name],
                "categories": ["berth"],
            },
            "versions": [{**version, "schema": {"openAPIV3Schema": _root(definition)}}],
        },
    }


def structural(model: type[BaseModel]) -> Schema:
    """A model as a structural schema: no $ref, no title, no null, no closed objects (Kubernetes prunes instead)."""
    whole = model.model_json_schema(by_alias=True)
    return _node(whole, whole.get("$defs", {}))


def render(definition: Definition) -> str:
    """The YAML as it is checked in."""
    import yaml  # only here: the models need pydantic alone

    whole = custom_resource_definition(definition)
    body: str = yaml.safe_dump(whole, sort_keys=False, width=110, allow_unicode=True)
    return HEADER.format(module=definition.module) + body


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with --check tell by the exit status whether they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m crds.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check, stale = parser.parse_args(arguments).check, False
    for definition in DEFINITIONS:
        target, text = TARGET / f"{definition.plural}.yaml", render(definition)
        if not check:
            TARGET.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            print(target)
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            print(f"{target} is out of date: run `python -m crds.generate`", file=sys.stderr)
            stale = True
    return 1 if stale else 0


def _root(definition: Definition) -> Schema:
    properties: Schema = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": structural(definition.spec),
    }
    if definition.status:
        # berth alone writes it. Who owns each field of it would be reckoned and stored with every write otherwise,
        # which is a fifth of what a write costs the API server.
        properties["status"] = {**structural(definition.status), "x-kubernetes-map-type": "atomic"}
    root: Schema = {
        "type": "object",
        "description": definition.description,
        "required": ["spec"],
        "properties": properties,
    }
    return root | ({"x-kubernetes-validations": definition.rules} if definition.rules else {})


def _node(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Schema:
    if "$ref" in schema:
        target = defs[str(schema["$ref"]).rsplit("/", 1)[-1]]
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    if schema.get("x-kubernetes-int-or-string"):
        # the union itself is said by the marker; a bound of its string side is the only one that may stay
        schema = {key: value for key, value in schema.items() if key not in ("anyOf", "type", "enum")}
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    if choices:
        if len(choices) > 1:
            raise ValueError(f"a structural schema has no room for the union {schema}")
        schema = {**choices[0], **{key: value for key, value in schema.items() if key != "anyOf"}}
        return _node(schema, defs)
    out: Schema = {}
    if "description" in schema:
        out["description"] = " ".join(str(schema["description"]).split())
    out |= {key: schema[key] for key in _CARRIED if key in schema}
    if "const" in schema:
        out["enum"] = [schema["const"]]
    if schema.get("default") not in (None, "", False, []) or schema.get("default") == {}:
        out["default"] = schema["default"]
    if "properties" in schema:
        out["properties"] = {name: _node(item, defs) for name, item in schema["properties"].items()}
    if "items" in schema:
        out["items"] = _node(schema["items"], defs)
    if isinstance(schema.get("additionalProperties"), dict) and schema["additionalProperties"]:
        out["additionalProperties"] = _node(schema["additionalProperties"], defs)
    out |= {key: value for key, value in schema.items() if key.startswith("x-kubernetes-")}
    return out


if __name__ == "__main__":
    sys.exit(main())
