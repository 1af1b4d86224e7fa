"""Holds the documentation against the code: links, commands, fields, reasons, metrics, names of signals and attributes.

What a page says about the code must be found there, and what the code offers must be on the page that lists it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import typer.core
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from crds.gpumodelprofile import GPUModelProfileStatus
from crds.gpuquota import GPUQuotaSpec
from crds.gpureservation import GPUReservationSpec
from crds.gpureservation import Phase as ReservationPhase
from crds.gpuworkload import (
    MUTABLE,
    ConditionType,
    EnvVar,
    GPUWorkloadSpec,
    Phase,
    Toleration,
)
from crds.gpuworkload_status import GPUWorkloadStatus, Recommendation
from crds.kernelcache import TritonKernelCacheClusterSpec, TritonKernelCacheSpec
from crds.kernelcachepolicy import KernelCachePolicySpec
from crds.settings import SETTINGS_KEY, SETTINGS_NAME, SETTINGS_NAMESPACE, Settings
from images.reference import Reference
from images.refused import Reason as RefusedReason
from planning import strategies
from planning.caches.hits import Reason as HitReason
from planning.caches.trust import Reason as TrustReason
from planning.caches.volumes import ATTRIBUTES, DRIVER, VolumeRequest, volume_request
from planning.model import Ledger
from planning.naming import STRATEGY_ANNOTATION

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
ROOMS = (
    "crds", "planning", "kube", "images", "workflows", "activities", "controller", "nodeworkers", "berth", "stack",
)  # fmt: skip
OTHERS = ("benchmarks", "deploy", "docs", "examples", "tests")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def every_page(function: Any) -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=named)(function)


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def code(text: str) -> Iterator[str]:
    """Every line of shell in a page, continued lines joined, and every piece of inline code."""
    for language, block in _FENCE.findall(text):
        if language in ("sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.strip().removeprefix("$ ")
    for piece in _CODE.findall(prose(text)):
        yield piece.strip()


def words(line: str) -> list[str]:
    """A line of shell as words, comments dropped; nothing where it is no shell."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


# --- links and paths -----------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@every_page
def test_relative_links_resolve(page: Path) -> None:
    for link in _LINK.findall(prose(read(page))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading; there are {sorted(anchors(target))}"


@every_page
def test_files_named_in_code_exist(page: Path) -> None:
    pattern = re.compile(rf"(?:{'|'.join((*ROOMS, *OTHERS))})(?:/[\w.-]+)+/?")
    for piece in _CODE.findall(prose(read(page))):
        if pattern.fullmatch(piece) and not piece.startswith(("images/", "nodeworkers/")):
            assert (ROOT / piece).exists() or piece == "berth/default", f"{piece} does not exist"


# --- commands ------------------------------------------------------------------------------------------------------


@cache
def commands() -> dict[str, set[str]]:
    """berth's commands and their options; those of a group are `explain workload`."""
    from berth.cli import command_line

    found: dict[str, set[str]] = {}

    def collect(command: typer.core.TyperGroup, before: str) -> None:
        for name, each in command.commands.items():
            if isinstance(each, typer.core.TyperGroup):
                collect(each, f"{before}{name} ")
            else:
                options = {option for at in each.params for option in (*at.opts, *at.secondary_opts)}
                found[before + name] = options

    group = typer.main.get_command(command_line())
    assert isinstance(group, typer.core.TyperGroup)
    collect(group, "")
    return found


def targets() -> set[str]:
    found = re.findall(r"^([A-Za-z0-9_./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for target in found if not target.startswith(".PHONY")}


def unknown_options(command: str, arguments: list[str]) -> list[str]:
    given = [word.split("=")[0] for word in arguments if re.match(r"--?[A-Za-z]", word)]
    return [option for option in given if option not in commands()[command]]


@every_page
def test_make_targets_exist(page: Path) -> None:
    for line in code(read(page)):
        called = words(line)
        if len(called) < 2 or called[0] != "make":
            continue
        for word in called[1:]:
            if word.startswith("ARGS=") and called[1] == "demo":
                wrong = unknown_options("demo", words(word.removeprefix("ARGS=")))
                assert not wrong, f"{line}: berth demo has no {wrong}"
            elif "=" not in word:
                assert word in targets(), f"{line}: the Makefile has no target {word}"


@every_page
def test_berths_commands_and_options_exist(page: Path) -> None:
    for line in code(read(page)):
        called = words(line.removeprefix("sudo ").removeprefix("uv run "))
        if len(called) < 2 or called[0].removeprefix(".venv/bin/") != "berth":
            continue
        name = next((each for each in (" ".join(called[1:3]), called[1]) if each in commands()), "")
        assert name, f"{line}: berth has no command {called[1]}"
        wrong = unknown_options(name, called[1 + len(name.split()) :])
        assert not wrong, f"{line}: berth {name} has no {wrong}"


@every_page
def test_options_that_stand_alone_exist_somewhere(page: Path) -> None:
    """`--data DIR` in a sentence: some command of berth's must have it, unless the page says whose it is."""
    foreign = {"--strict", "--locked", "--bump-revision", "--mark-compacted", "--check"}
    known = {option for options in commands().values() for option in options} | foreign
    for piece in _CODE.findall(prose(read(page))):
        if piece.startswith("--"):
            assert piece.split()[0].split("=")[0] in known, f"`{piece}`: no command of berth's has this option"


# --- YAML ----------------------------------------------------------------------------------------------------------


_OF_THE_POD = tuple(f"csi.storage.k8s.io/{each}" for each in ("ephemeral", "pod.uid", "pod.namespace", "pod.name"))


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for page in PAGES:
        for language, block in _FENCE.findall(read(page)):
            if language == "yaml":
                for number, document in enumerate(yaml.safe_load_all(block)):
                    yield f"{named(page)}: {document['kind']} {document['metadata']['name']} ({number})", document
    examples = ROOT / "examples"
    for file in sorted([*examples.glob("*.yaml"), *(examples / "kernelcache").glob("*.yaml")]):
        for number, document in enumerate(yaml.safe_load_all(read(file))):
            yield f"{named(file)}: {document['kind']} {document['metadata']['name']} ({number})", document


@pytest.mark.parametrize(("where", "document"), [pytest.param(*entry, id=entry[0]) for entry in documents()])
def test_examples_are_valid(where: str, document: dict[str, Any]) -> None:
    metadata = document["metadata"]
    match document["kind"]:
        case "GPUWorkload":
            assert document["apiVersion"] == "gpu.warp.dev/v1alpha1"
            spec, refused = GPUWorkloadSpec.parse(document["spec"])
            assert spec is not None, refused
            assert spec.scheduling_strategy in (None, *strategies.installed())
        case "GPUQuota":
            assert document["apiVersion"] == "gpu.warp.dev/v1alpha1"
            quota, refused = GPUQuotaSpec.parse(document["spec"])
            assert quota is not None, refused
        case "GPUReservation":
            assert document["apiVersion"] == "gpu.warp.dev/v1alpha1"
            reservation, refused = GPUReservationSpec.parse(document["spec"])
            assert reservation is not None, refused
        case "TritonKernelCache" | "TritonKernelCacheCluster" as kind:
            assert document["apiVersion"] == "tkm.io/v1alpha1"
            model = TritonKernelCacheSpec if kind == "TritonKernelCache" else TritonKernelCacheClusterSpec
            cache, refused = model.parse(document["spec"])
            assert cache is not None, refused
            Reference.parse(cache.oci_image.image)
        case "Pod":
            mounted = {
                each["name"]: each["mountPath"]
                for container in document["spec"]["containers"]
                for each in container.get("volumeMounts", ())
            }
            for volume in document["spec"].get("volumes", ()):
                assert volume["csi"]["driver"] == DRIVER
                attributes = volume["csi"]["volumeAttributes"]
                told = dict(zip(_OF_THE_POD, ("true", "u", metadata["namespace"], metadata["name"]), strict=True))
                request = volume_request({**attributes, **told}, volume["csi"].get("readOnly", False))
                assert isinstance(request, VolumeRequest), request
                assert request.mount_path in ("", mounted[volume["name"]])
        case "KernelCachePolicy":
            from images.signatures.keys import load_public_key

            assert document["apiVersion"] == "tkm.io/v1alpha1"
            policy, refused = KernelCachePolicySpec.parse(document["spec"])
            assert policy is not None, refused
            assert all(load_public_key(signer.key) for signer in policy.signers if signer.key is not None)
        case "ConfigMap":
            assert (metadata["namespace"], metadata["name"]) == (SETTINGS_NAMESPACE, SETTINGS_NAME)
            settings, refused = Settings.parse(yaml.safe_load(document["data"][SETTINGS_KEY]))
            assert settings is not None, refused
        case "Namespace":
            assert metadata["annotations"][STRATEGY_ANNOTATION] in strategies.installed()
        case "Node":
            from stack import SimulatedNode, node_manifest

            ours = node_manifest(SimulatedNode(metadata["name"], gpus=8))
            assert metadata["annotations"].items() <= ours["metadata"]["annotations"].items()
            assert metadata["labels"].items() <= ours["metadata"]["labels"].items()
            assert document["status"]["allocatable"].items() <= ours["status"]["allocatable"].items()
        case kind:
            pytest.fail(f"{where}: nothing checks examples of kind {kind}")


# --- docs/gpuworkload.md -------------------------------------------------------------------------------------------

REFERENCE = ROOT / "docs" / "gpuworkload.md"


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The table under a heading: first cell without backticks → the other cells."""
    section = re.split(rf"^#+ {re.escape(heading)}$", read(page), flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in table[2:]]
    return {row[0].strip("`*()"): row[1:] for row in cells}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All fields by the path under which a person writes them, nested models and lists of them included."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path, field
        nested = [part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        for inner in nested:
            listed = inner in (EnvVar, Toleration)
            yield from fields(inner, f"{path}[]." if listed else f"{path}.")


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def default(field: FieldInfo) -> str:
    """A default as the table writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "–"
    if isinstance(value, BaseModel):
        return "`{}`"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value, separators=(',', ':'))}`"


def bounds(field: FieldInfo) -> Iterator[int]:
    """The numeric limits of a field itself, as far as pydantic's metadata tells them."""
    metadata = list(field.metadata)
    for part in _parts(field.annotation):
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
    assert sentence and set(_CODE.findall(sentence[1])) == set(MUTABLE)


# CamelCase words of these modules that are no reasons of conditions or Events: Kubernetes' own, and reasons of steps
# that write no condition.
_NO_REASON = {
    "Complete", "Failed", "Error", "PodFailurePolicy", "Deleting", "Deleted", "Pending", "Scheduling", "Scheduled",
    "Running", "Succeeded", "Unknown", "True", "False", "Finished", "Suspended", "Accepted", "NextRound",
}  # fmt: skip


def reasons() -> set[str]:
    """Reasons that the code can give, read from the modules that give them."""
    found = set()
    for module in ("status", "lifecycle", "placement", "turns"):
        for node in ast.walk(ast.parse((ROOT / "planning" / f"{module}.py").read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]+)*", text):
                found.add(text)
    return found - _NO_REASON


def test_every_reason_is_explained() -> None:
    text = read(REFERENCE)
    assert {"JobFailed", "WaitingForCapacity", "NotRunning"} <= reasons(), "the search for reasons has become blind"
    missing = {reason for reason in reasons() if f"`{reason}`" not in text}
    assert not missing, f"docs/gpuworkload.md does not mention {sorted(missing)}"


# --- docs/reservations.md ------------------------------------------------------------------------------------------


def test_what_a_reservation_says_is_all_told() -> None:
    page = ROOT / "docs" / "reservations.md"
    told = {name for cell in rows(page, "The spec") for name in re.split(r"`, `", cell)}
    assert told == {field.alias for field in GPUReservationSpec.model_fields.values()}
    assert set(rows(page, "Looking")) == set(get_args(ReservationPhase))


# --- docs/profiles.md ----------------------------------------------------------------------------------------------

PROFILES = ROOT / "docs" / "profiles.md"


def test_what_a_profile_and_a_recommendation_say_is_all_told() -> None:
    told = {name for cell in rows(PROFILES, "GPUModelProfile") for name in re.split(r"`, `", cell)}
    assert told == {field.alias for field in GPUModelProfileStatus.model_fields.values()}
    recommended = {field.alias for field in Recommendation.model_fields.values()}
    assert set(rows(PROFILES, "What is recommended")) == recommended


# --- docs/autoscaling.md -------------------------------------------------------------------------------------------

AUTOSCALING = ROOT / "docs" / "autoscaling.md"


def said(module: str) -> set[str]:
    """The CamelCase words of two or more parts, and `Failed` and `Refused`, that a module has as literals."""
    constants = (
        node.value for node in ast.walk(ast.parse((ROOT / module).read_text())) if isinstance(node, ast.Constant)
    )
    pattern = r"[A-Z][a-z]+([A-Z][a-z]+)+|Failed|Refused"
    return {text for text in constants if isinstance(text, str) and re.fullmatch(pattern, text)}


def test_every_end_of_an_order_and_every_event_of_it_is_told() -> None:
    text = read(AUTOSCALING)
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    told = next(part for part in section if part.startswith("What happens then"))
    tables = re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE)
    kinds = {"ProvisioningRequest", "PodTemplate", "GPUWorkload"}
    given = (said("planning/requests.py") | said("activities/provisioning.py")) - kinds
    assert given == set(tables)
    events = next(part for part in re.split(r"^## ", read(OPERATIONS), flags=re.MULTILINE) if part.startswith("Events"))
    for event in said("activities/provisioning.py") - kinds - said("planning/requests.py") - {"Refused"}:
        assert f"`{event}`" in events, event


# --- docs/kernelcaches.md ------------------------------------------------------------------------------------------

CACHES = ROOT / "docs" / "kernelcaches.md"
# Values of other fields than a condition's reason, and conditions themselves.
_NO_CACHE_REASON = {
    "Error", "Outdated", "False", "True", "Unknown", "Always", "Never", "Pending", "Failed", "Normal", "Warning",
    "Prepare", "Changed", "Deleted", "OnTagChange", "NodeKernelCache",
}  # fmt: skip


def cache_reasons() -> set[str]:
    """What the conditions of a cache and of its nodes may give as reasons."""
    modules = [*(ROOT / "nodeworkers" / "caches").glob("*.py")]
    others = ("planning/caches/status.py", "planning/caches/grants.py", "activities/kernel_caches.py")
    modules += [ROOT / name for name in others]
    found = {*get_args(TrustReason), *get_args(HitReason), *get_args(RefusedReason)}
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"(API)?([A-Z][a-z]+)+", text):
                found.add(text)
    return found - _NO_CACHE_REASON


def test_every_reason_of_a_cache_is_told() -> None:
    text = read(CACHES)
    assert {"APIServerAway", "RolledBack", "NotOnNode"} <= cache_reasons(), "the search for reasons has become blind"
    missing = {reason for reason in cache_reasons() if f"`{reason}`" not in text}
    assert not missing, f"docs/kernelcaches.md does not mention {sorted(missing)}"


def test_the_nodes_options_and_attributes_are_all_told() -> None:
    section = re.split(r"^## On a node$", read(CACHES), flags=re.MULTILINE)[1]
    told = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", section, re.MULTILINE))
    everywhere = {"--help", *(commands()["worker"] - {"--make-current"})}
    assert set(told) == commands()["node"] - everywhere
    attributes = re.split(r"^\| attribute \|", read(CACHES), flags=re.MULTILINE)[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", attributes, re.MULTILINE)) == set(ATTRIBUTES)


# --- docs/architecture.md ------------------------------------------------------------------------------------------


def test_the_ledgers_parts_are_all_there() -> None:
    table = rows(ROOT / "docs" / "architecture.md", "What the ledger remembers")
    assert set(table) == {field.name for field in dataclasses.fields(Ledger)}


# --- docs/operations.md --------------------------------------------------------------------------------------------

OPERATIONS = ROOT / "docs" / "operations.md"


def metrics() -> dict[str, str]:
    """Metrics that the code makes, by the name they are exported under → kind."""
    found = {}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                kind = node.func.attr.removeprefix("create_").removeprefix("observable_")
                if not node.func.attr.startswith("create_") or kind not in ("counter", "gauge", "histogram"):
                    continue
                name = next(iter(node.args), None) or next(k.value for k in node.keywords if k.arg == "name")
                assert isinstance(name, ast.Constant) and isinstance(name.value, str), (
                    f"{file}:{node.lineno}: not a literal"
                )
                unit = next((k.value.value for k in node.keywords if k.arg == "unit"), "")  # type: ignore[attr-defined]
                suffix = {"s": "_seconds", "By": "_bytes"}.get(unit, "") + ("_total" if kind == "counter" else "")
                found[f"{name.value}{suffix}"] = kind
    return found


def test_the_metrics_table_is_what_is_exported() -> None:
    table = rows(OPERATIONS, "Metrics")
    assert {name: cells[0] for name, cells in table.items()} == metrics()


def test_the_settings_table_is_complete() -> None:
    table = rows(OPERATIONS, "Settings")
    assert set(table) == {name for name, _ in fields(Settings)}
    for name, field in fields(Settings):
        if name != "defaultArgs":  # a line of shell, described in words
            assert table[name][0] == default(field), name


def test_the_deployment_name_is_right() -> None:
    from berth.version import DEPLOYMENT

    text = read(OPERATIONS)
    assert f"--name {DEPLOYMENT}" in text and f"--deployment-name {DEPLOYMENT} " in text


@cache
def handlers() -> dict[str, set[str]]:
    """Names of the workflows' signals and queries, from the decorators."""
    found: dict[str, set[str]] = {"signal": set(), "query": set()}
    for file in (ROOT / "workflows").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for decorator in getattr(node, "decorator_list", ()):
                target = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(target, ast.Attribute) and target.attr in found:
                    found[target.attr].add(node.name)  # type: ignore[attr-defined]
    return found


@every_page
def test_lines_for_the_temporal_cli_name_what_exists(page: Path) -> None:
    from activities.messages import placement_id, provisioning_id, workload_id
    from activities.signatures import TASK_QUEUE
    from planning.caches.orders import cache_id, node_id

    for line in code(read(page)):
        called = words(line)
        if called[:1] != ["temporal"] or len(called) < 3:
            continue
        options = dict(pairwise(called))
        kind = called[2]
        if kind in ("signal", "query"):
            name = options.get("--name") or options.get("--type")
            assert name in handlers()[kind], f"{line}: there is no {kind} {name}"
        if "--input" in options:
            json.loads(options["--input"])
        if "--workflow-id" in options:
            ids = (workload_id(""), placement_id(""), provisioning_id(""), cache_id(""), node_id(""))
            assert options["--workflow-id"].startswith(ids), line
        if "--task-queue" in options:
            assert options["--task-queue"] == TASK_QUEUE, line


@every_page
def test_search_attributes_exist(page: Path) -> None:
    from activities import messages

    known = {key.name for key in (messages.KIND, messages.NAMESPACE, messages.NAME, messages.NODE, messages.PHASE)}
    alerts = set(re.findall(r"alert: (\w+)", read(ROOT / "deploy" / "prometheus" / "berth-rules.yaml")))
    assert set(re.findall(r"\bBerth[A-Z]\w+", read(page))) <= known | alerts


# --- the rooms -----------------------------------------------------------------------------------------------------

MODULES = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py") if file.stat().st_size)


@pytest.mark.parametrize("module", MODULES, ids=named)
def test_a_module_says_what_it_is_and_stays_readable(module: Path) -> None:
    text = module.read_text()
    assert len(text.splitlines()) <= 500, "more than 500 lines: split it"
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(docstring.split()) >= 3, "a module opens with what it decides or does, and for whom"


def test_the_readme_shows_every_room() -> None:
    shown = set(re.findall(r"^\| \[`(\w+)/`\]", read(ROOT / "README.md"), re.MULTILINE))
    rooms = {room for room in ROOMS if any((ROOT / room).glob("*.py"))}
    assert rooms <= shown


def test_the_readmes_figures_of_the_demo_are_the_cuts() -> None:
    from berth.cli.demo_command import demo
    from berth.demo.cut import FAILS_AFTER, RunTimes, make_cut
    from berth.demo.report import simulation
    from berth.demo.trace import load

    cut, text = make_cut(load()), " ".join(read(ROOT / "README.md").split())
    assert f"creates {len(cut.nodes)} simulated nodes with {cut.gpus:,} GPUs" in text
    assert f"applies {len(cut.runs):,} GPUWorkloads" in text
    assert f"They want {cut.gpus_wanted:,} GPUs" in text
    options = inspect.signature(demo).parameters
    times = RunTimes(options["shortest"].default, options["longest"].default)
    assert times == RunTimes(), "make_cut's are those of the command"
    assert f"scale of {times.shortest:g} to {times.longest:g} seconds" in text
    assert f"here {times.shortest:g} to {times.longest:g} s" in simulation(cut)
    assert f"made to fail after {FAILS_AFTER:g} seconds" in text
    assert f"{sum(run.fails != 0 for run in cut.runs) / len(cut.runs):.0%}".replace("%", " %") in text
