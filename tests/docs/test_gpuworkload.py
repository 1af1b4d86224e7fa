"""Holds docs/gpuworkload.md against the models and the planners: fields, defaults, limits, phases, reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic.fields import FieldInfo

from crds.gpuworkload import MUTABLE, ConditionType, GPUWorkloadSpec, Phase
from crds.gpuworkload_status import GPUWorkloadStatus
from planning import strategies
from tests.docs.offered import default, fields, literals, parts
from tests.docs.pages import CODE, ROOT, read, rows

REFERENCE = ROOT / "docs" / "gpuworkload.md"


def bounds(field: FieldInfo) -> Iterator[int]:
    """The numeric limits of a field itself, as far as pydantic's metadata tells them."""
    metadata = list(field.metadata)
    for part in parts(field.annotation):
        metadata += [
            item for extra in getattr(part, "__metadata__", ()) for item in getattr(extra, "metadata", [extra])
        ]
    for item in metadata:
        for key in ("ge", "le", "max_length"):
            value = getattr(item, key, None)
            if isinstance(value, int) and value > 0:
                yield value


SPEC = dict(fields(GPUWorkloadSpec))


def test_the_spec_table_has_every_field_and_no_other() -> None:
    assert set(rows(REFERENCE, "Spec")) == set(SPEC)


@pytest.mark.parametrize("path", SPEC)
def test_the_spec_table_tells_defaults(path: str) -> None:
    assert rows(REFERENCE, "Spec")[path][1] == default(SPEC[path])


@pytest.mark.parametrize("path", [path for path in SPEC if "[]" not in path and "resources" not in path])
def test_the_spec_table_tells_limits(path: str) -> None:
    limits = rows(REFERENCE, "Spec")[path][2]
    known = set(bounds(SPEC[path]))
    if SPEC[path].annotation is int:
        assert known, "the models say nothing about limits: this test has become blind"
    if path == "schedulingStrategy":
        return  # its pattern tells the length
    # Limits of what a list or map holds (a string's length, a label's, a quantity's) are not told; its own are.
    inside = {"command": {16384}, "args": {16384}, "nodeSelector": {63, 317}, "gpuMemory": {64, 2**62}}
    missing = {value for value in known if str(value) not in limits} - inside.get(path, set())
    assert not missing, f"{path}: {sorted(missing)} is a limit in the models and not in the table"


def test_the_status_table_has_every_field_and_no_other() -> None:
    assert set(rows(REFERENCE, "Status")) == {field.alias for field in GPUWorkloadStatus.model_fields.values()}


def test_phases_conditions_and_strategies_are_all_there() -> None:
    assert set(rows(REFERENCE, "Phases")) - {"empty"} == set(get_args(Phase))
    assert set(rows(REFERENCE, "Conditions")) - {""} == set(get_args(ConditionType))
    assert set(rows(REFERENCE, "Strategies")) == set(strategies.installed())


def test_what_may_change_is_told() -> None:
    sentence = re.search(r"After that only (.+?);", read(REFERENCE), re.DOTALL)
    assert sentence and set(CODE.findall(sentence[1])) == set(MUTABLE)


# CamelCase words of these modules that are no reasons of conditions or Events: Kubernetes' own, and reasons of steps
# that write no condition.
_NO_REASON = {
    "Complete", "Failed", "Error", "PodFailurePolicy", "Deleting", "Deleted", "Pending", "Scheduling", "Scheduled",
    "Running", "Succeeded", "Unknown", "True", "False", "Finished", "Suspended", "Accepted", "NextRound",
}  # fmt: skip


def reasons() -> set[str]:
    """Reasons that the code can give, read from the modules that give them."""
    modules = (ROOT / "planning" / f"{module}.py" for module in ("status", "lifecycle", "placement", "turns"))
    return literals(modules, r"([A-Z][a-z]+)+") - _NO_REASON


def test_every_reason_is_explained() -> None:
    text = read(REFERENCE)
    assert {"JobFailed", "WaitingForCapacity", "NotRunning"} <= reasons(), "the search for reasons has become blind"
    missing = {reason for reason in reasons() if f"`{reason}`" not in text}
    assert not missing, f"docs/gpuworkload.md does not mention {sorted(missing)}"
