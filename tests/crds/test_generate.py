"""The checked-in CRD is what the models say, structural, and bounded everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from crds import generate
from crds.definitions import DEFINITIONS, Definition
from crds.gpuworkload import GPUWorkloadSpec


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, item in schema.get("properties", {}).items():
        yield from nodes(item, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


EVERY = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda each: each.plural)


def version(definition: Definition = DEFINITIONS[0]) -> dict[str, Any]:
    found: dict[str, Any] = generate.custom_resource_definition(definition)["spec"]["versions"][0]
    return found


def test_the_checked_in_crd_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_drift_is_noticed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generate, "TARGET", tmp_path / "crds")
    assert generate.main(["--check"]) == 1 and "python -m crds.generate" in capsys.readouterr().err
    assert generate.main([]) == 0 and generate.main(["--check"]) == 0
    written = generate.TARGET / "gpuworkloads.yaml"
    written.write_text(written.read_text() + "# edited\n")
    assert generate.main(["--check"]) == 1


@EVERY
def test_the_schema_is_structural(definition: Definition) -> None:
    for path, node in nodes(version(definition)["schema"]["openAPIV3Schema"]):
        assert not {"$ref", "$defs", "title", "const", "anyOf", "allOf", "oneOf", "not"} & set(node), path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert node.get("additionalProperties") is not False, path


@EVERY
def test_everything_in_spec_and_status_is_bounded(definition: Definition) -> None:
    for path, node in nodes(version(definition)["schema"]["openAPIV3Schema"]):
        if not path.startswith((".spec", ".status")):
            continue
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_field_but_four_is_fixed_after_the_first_job() -> None:
    (rule,) = version()["schema"]["openAPIV3Schema"]["x-kubernetes-validations"]
    fields = {str(field.alias) for field in GPUWorkloadSpec.model_fields.values()}
    compared = {name for name in fields if f"self.spec.{name} == oldSelf.spec.{name}" in rule["rule"]}
    named = {name for name in fields if f"'{name}'" in rule["messageExpression"]}
    assert fields - compared == fields - named == {"suspend", "priority", "preemptible", "activeDeadlineSeconds"}


@pytest.mark.parametrize(
    ("plural", "columns"),
    [
        ("gpuworkloads", ["Model", "GPUs", "Strategy", "Phase", "Node", "Retries", "Age"]),
        ("gpuquotas", ["Cohort", "GPUs", "Used", "Borrowed", "Waiting", "Share", "Valid", "Age"]),
        ("gpureservations", ["Start", "End", "GPUs", "Reserved", "Used", "Lent", "Waiting", "Phase", "Age"]),
        ("kernelcachepolicies", ["Images", "Namespaces", "May skip", "Age"]),
        ("gpuseatprofiles", ["Groups", "Seats", "Serving", "Refused", "Ready", "Reason", "Age"]),
        ("gpumodelprofiles", ["Model", "Runs", "P50", "P90", "Active GPUs", "Peak memory", "Age"]),
    ],
)
def test_columns(plural: str, columns: list[str]) -> None:
    (kind,) = [each for each in DEFINITIONS if each.plural == plural]
    assert [
        column["name"] for column in version(kind)["additionalPrinterColumns"] if not column.get("priority")
    ] == columns


@EVERY
def test_there_is_a_status_only_where_somebody_writes_it(definition: Definition) -> None:
    found, properties = version(definition), version(definition)["schema"]["openAPIV3Schema"]["properties"]
    reported = definition.plural != "kernelcachepolicies"
    assert ("subresources" in found, "status" in properties) == (reported, reported)
    shown = [column["jsonPath"] for column in found["additionalPrinterColumns"]]
    assert reported or not [path for path in shown if path.startswith(".status")]
