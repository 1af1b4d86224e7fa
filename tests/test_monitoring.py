"""Holds deploy/grafana and deploy/prometheus against the code: every query parses, and names what is exported."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.docs.offered import metrics
from tests.docs.pages import OPERATIONS, ROOMS, ROOT, read, rows

BOARDS: dict[str, dict[str, Any]] = {
    file.name: json.loads(file.read_text()) for file in sorted((ROOT / "deploy" / "grafana").glob("*.json"))
}
RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "berth-rules.yaml").read_text())
ALERTS = [rule for group in RULES["spec"]["groups"] for rule in group["rules"]]
TARGETS = [(panel, target) for board in BOARDS.values() for panel in board["panels"] for target in panel["targets"]]
QUERIES = {f"{panel['title']} {target['refId']}": str(target["expr"]) for panel, target in TARGETS} | {
    rule["alert"]: str(rule["expr"]) for rule in ALERTS
}
METRICS = metrics()
SCRAPED = {"job", "instance"}  # Prometheus' own, on every series


def labels() -> dict[str, set[str]]:
    """The labels of every metric, by its exported name without a histogram's suffixes, as the code gives them."""
    found: dict[str, set[str]] = {}
    exported = {re.sub(r"(_seconds|_bytes)?(_total)?$", "", name): name for name in METRICS}
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            tree = ast.parse(file.read_text())
            functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            instruments: dict[str, str] = {}
            for node in ast.walk(tree):
                match node:
                    case ast.Assign(
                        targets=[ast.Name(id=variable)],
                        value=ast.Call(func=ast.Attribute(), args=[ast.Constant(value=str(name)), *_]),
                    ) if name in exported:
                        instruments[variable] = exported[name]
            for node in ast.walk(tree):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=variable)), args=[*given]) if (
                        variable in instruments
                    ):
                        found.setdefault(instruments[variable], set()).update(*map(keys, given))
                    case ast.Call(func=ast.Attribute(), args=[ast.Constant(value=str(name)), callbacks, *_]) if (
                        name in exported
                    ):
                        called = {each.id for each in ast.walk(callbacks) if isinstance(each, ast.Name)}
                        given_by = [keys(functions[each]) for each in called if each in functions]
                        found.setdefault(exported[name], set()).update(*given_by)
    return found


def keys(node: ast.AST) -> set[str]:
    """Those of the dictionaries written out in a piece of code."""
    written = [key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys]
    return {key.value for key in written if isinstance(key, ast.Constant) and isinstance(key.value, str)}


LABELS = labels()


def parsed(query: str) -> promql.Expr:
    return promql.parse(query.replace("$__rate_interval", "5m"))  # Grafana fills it in


def selected(expression: promql.Expr) -> list[promql.VectorSelector]:
    found: list[Any] = []
    promql.walk(expression, pre_visit=found.append)
    return [part for part in found if isinstance(part, promql.VectorSelector)]


def left(part: Any) -> set[str]:
    """The labels that the result of an expression can have; what is grouped or joined by others is an error."""
    match part:
        case promql.VectorSelector():
            name = str(part.name)
            whole = re.sub(r"_(bucket|count|sum)$", "", name)
            histogram = METRICS.get(whole) == "histogram" and whole != name
            assert histogram or METRICS.get(name, "histogram") != "histogram", f"there is no metric {name}"
            known = LABELS[whole if histogram else name] | SCRAPED | ({"le"} if name.endswith("_bucket") else set())
            assert {matcher.name for matcher in part.matchers.matchers} <= known, f"{name} has {sorted(known)}"
            return known
        case promql.MatrixSelector():
            return left(part.vector_selector)
        case promql.SubqueryExpr() | promql.ParenExpr():
            return left(part.expr)
        case promql.Call():
            found = set[str]().union(*map(left, part.args))
            assert part.func.name != "histogram_quantile" or "le" in found, "quantiles are of buckets"
            return found
        case promql.AggregateExpr():
            inner, by = left(part.expr), set(part.modifier.labels) if part.modifier else set[str]()
            assert by <= inner, f"there are {sorted(inner)} to group by"
            return inner if str(part.op) == "topk" else by
        case promql.BinaryExpr():
            one, other = left(part.lhs), left(part.rhs)
            on = set(part.modifier.matching.labels) if part.modifier and part.modifier.matching else set[str]()
            assert on <= one & other, f"both sides have {sorted(one & other)}"
            return one if str(part.op) == "and" else one | other
        case promql.NumberLiteral():
            return set()
    raise AssertionError(f"nothing here knows what a {type(part).__name__} has")


def test_labels_are_found_in_the_code() -> None:
    assert LABELS["warp_gpuworkload_scheduled_total"] == {"strategy"}
    assert LABELS["warp_gpuworkload_time_to_placement_seconds"] == {"strategy"}
    assert LABELS["warp_gpuworkload_failed_total"] == LABELS["warp_gpuworkload_retries_total"] == {"reason"}
    assert LABELS["berth_waiting_workloads"] == {"reason"} and LABELS["berth_tenant_gpus_used"] == {"tenant"}
    assert LABELS["berth_admission_reviews_total"] == {"webhook", "kind", "result"}
    assert LABELS["berth_leading"] == set() and LABELS.keys() == METRICS.keys()


@pytest.mark.parametrize("name", METRICS)
def test_the_metrics_table_names_the_labels(name: str) -> None:
    meaning = rows(OPERATIONS, "Metrics")[name][2]
    assert {label for label in LABELS[name] if f"`{label}`" not in meaning} == set()


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_query_asks_for_what_is_exported(query: str) -> None:
    expression = parsed(query)
    assert selected(expression), "it asks for nothing"
    left(expression)


@pytest.mark.parametrize(
    "query",
    [
        "berth_queue", "berth_queue_depth{reason='x'}", "sum by (strategy) (berth_queue_depth)",
        "histogram_quantile(0.5, rate(berth_decision_duration_seconds_count[5m]))", "berth_decision_duration_seconds",
        "berth_queue_depth and on (tenant) berth_tenant_share",
    ],
)  # fmt: skip
def test_a_query_for_what_is_not_exported_is_noticed(query: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        left(parsed(query))


@pytest.mark.parametrize("query", ["sum(x", "rat(x[5m])", "sum by (x", "rate(x)", "x and on job y"])
def test_what_is_no_query_does_not_parse(query: str) -> None:
    with pytest.raises(ValueError):
        parsed(query)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_what_grafana_takes(board: dict[str, Any]) -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert "id" not in board, "a number of the Grafana it came from"
    (source,) = board["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] == "timeseries" and panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, f"{panel['title']} lies upon another"
        taken |= cells
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
    for thing in (*board["panels"], *(target for panel in board["panels"] for target in panel["targets"])):
        assert thing["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}


def test_dashboards_are_told_apart_and_told_in_the_docs() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS) >= 2
    assert len({panel["title"] for board in BOARDS.values() for panel in board["panels"]}) == len(
        [panel for board in BOARDS.values() for panel in board["panels"]]
    )
    assert all(f"deploy/grafana/{name}" in read(OPERATIONS) for name in BOARDS)


@pytest.mark.parametrize(("panel", "target"), TARGETS, ids=[f"{p['title']} {t['refId']}" for p, t in TARGETS])
def test_a_legend_names_labels_that_are_left(panel: dict[str, Any], target: dict[str, Any]) -> None:
    used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert used <= left(parsed(target["expr"]))


def test_every_alert_is_whole_and_told_in_the_docs() -> None:
    assert (RULES["apiVersion"], RULES["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    for rule in ALERTS:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
    assert list(rows(OPERATIONS, "Alerts")) == [rule["alert"] for rule in ALERTS]
