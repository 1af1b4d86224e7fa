"""Writes deploy/crds/gpuworkloads.yaml from the models: `python -m crds.generate [--check]`, for `make crds` and CI.

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

from crds.gpuworkload import GROUP, KIND, MUTABLE, PLURAL, VERSION, GPUWorkloadSpec, GPUWorkloadStatus

Schema = dict[str, Any]

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "crds" / f"{PLURAL}.yaml"
HEADER = "# Generated from crds/gpuworkload.py by `python -m crds.generate`; edit the models, not this file.\n"

_CARRIED = (
    "type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties", "required",
)  # fmt: skip


def custom_resource_definition() -> Schema:
    """The whole CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["gpuw"],
                "categories": ["berth"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(),
                    "selectableFields": [{"jsonPath": ".status.phase"}, {"jsonPath": ".status.assignedNode"}],
                    "schema": {"openAPIV3Schema": _root()},
                }
            ],
        },
    }


def structural(model: type[BaseModel]) -> Schema:
    """A model as a structural schema: no $ref, no title, no null, no closed objects (Kubernetes prunes instead)."""
    whole = model.model_json_schema(by_alias=True)
    return _node(whole, whole.get("$defs", {}))


def render() -> str:
    """The YAML as it is checked in."""
    import yaml  # only here: the models need pydantic alone

    body: str = yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=110, allow_unicode=True)
    return HEADER + body


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or with --check tell by the exit status whether it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m crds.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is out of date")
    text = render()
    if parser.parse_args(arguments).check:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
            print(f"{TARGET} is out of date: run `python -m crds.generate`", file=sys.stderr)
            return 1
        return 0
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    print(TARGET)
    return 0


def _root() -> Schema:
    return {
        "type": "object",
        "description": "A model on a number of GPUs of one node: placed, run as a Job and retried by berth.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(GPUWorkloadSpec),
            "status": structural(GPUWorkloadStatus),
        },
        "x-kubernetes-validations": _immutability(),
    }


def _immutability() -> list[Schema]:
    """What is fixed once a Job was created. One rule, which the API server evaluates at every write of the object, most
    of them of the status: comparing the whole spec first settles those for next to nothing, where a rule for each field
    took an eighth of the write.
    """
    required = {field.alias for field in GPUWorkloadSpec.model_fields.values() if field.is_required()}
    names = [field.alias or name for name, field in GPUWorkloadSpec.model_fields.items()]
    fixed = [name for name in names if name not in MUTABLE]

    def same(name: str) -> str:
        new, old = f"self.spec.{name}", f"oldSelf.spec.{name}"
        equal = f"{new} == {old}"
        return equal if name in required else f"has({new}) == has({old}) && (!has({new}) || {equal})"

    changed = "".join(f"!({same(name)}) ? '{name}' : " for name in fixed[:-1]) + f"'{fixed[-1]}'"
    advice = (
        f"cannot change once a Job was created (only {', '.join(MUTABLE)} can): delete the workload and create it anew"
    )
    return [
        {
            "rule": "!has(oldSelf.status) || !has(oldSelf.status.jobName) || self.spec == oldSelf.spec || ("
            + " && ".join(same(name) for name in fixed)
            + ")",
            "fieldPath": ".spec",
            "messageExpression": f"'spec.' + ({changed}) + ' {advice}'",
            "message": f"the spec {advice}",
        }
    ]


def _columns() -> list[Schema]:
    def column(name: str, path: str, kind: str = "string", **more: Any) -> Schema:
        return {"name": name, "type": kind, "jsonPath": path, **more}

    return [
        column("Model", ".spec.modelName"),
        column("GPUs", ".spec.gpuCount", "integer"),
        column("Strategy", ".status.strategy"),
        column("Phase", ".status.phase"),
        column("Node", ".status.assignedNode"),
        column("Retries", ".status.retryCount", "integer"),
        column("Age", ".metadata.creationTimestamp", "date"),
        column("Priority", ".spec.priority", priority=1),
        column("Message", ".status.message", priority=1),
    ]


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
