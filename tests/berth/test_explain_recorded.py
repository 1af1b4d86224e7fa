"""`berth explain --history` reads back through the ledger's runs, says what it leaves out, and never fails for it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflowservice.v1 import (
    GetWorkflowExecutionHistoryReverseRequest,
    GetWorkflowExecutionHistoryReverseResponse,
)
from temporalio.service import RPCError, RPCStatusCode
from typer.testing import CliRunner

from berth.cli import command_line
from berth.explain import collect
from berth.explain.collect import Collected
from berth.explain.history import OWN, Entry
from berth.explain.recorded import Life, Reader, Recorded
from berth.explain.report import show_history
from crds.settings import Settings
from planning.model import Decision
from planning.times import timestamp
from tests.berth.test_explain_history import UID, Ledger, place
from tests.planning.builders import NOW, node, snapshot, workload

GONE = RPCError("workflow execution not found", RPCStatusCode.NOT_FOUND, b"")
AWAY = RPCError("connection refused", RPCStatusCode.UNAVAILABLE, b"")
BEGAN = 1_000_000.0


class Temporal:
    """Has runs of the ledger, the oldest first, as the SDK's client shows them; two events fit on a page."""

    namespace = "default"

    def __init__(self, *runs: list[HistoryEvent], away: Exception | None = None) -> None:
        self.runs = {f"run-{i}": list(reversed(events)) for i, events in enumerate(runs)}
        self.away = away
        self.asked = 0
        self.workflow_service = self

    async def get_workflow_execution_history_reverse(
        self, request: GetWorkflowExecutionHistoryReverseRequest
    ) -> GetWorkflowExecutionHistoryReverseResponse:
        if request.execution.workflow_id != "placement/default":
            raise GONE
        self.asked += 1
        if self.away is not None and self.asked > 1:
            raise self.away
        run = request.execution.run_id or max(self.runs)
        if run not in self.runs:
            raise GONE
        at = int(request.next_page_token or b"0")
        answer = GetWorkflowExecutionHistoryReverseResponse()
        answer.history.events.extend(self.runs[run][at : at + 2])
        if at + 2 < len(self.runs[run]):
            answer.next_page_token = str(at + 2).encode()
        return answer

    async def list_workflows(self, query: str, *, limit: int) -> Any:
        before = query.split('StartTime < "')[1].rstrip('"')
        for run, events in self.runs.items():
            began = events[-1].event_time.seconds
            if 'WorkflowId = "placement/default"' in query and timestamp(began) < before:
                yield SimpleNamespace(run_id=run, start_time=datetime.fromtimestamp(began, UTC))


def a_run(number: int, rounds: int = 2, *, continues: str = "") -> list[HistoryEvent]:
    """A run of the ledger that places the workload in each round; runs begin an hour apart."""
    ledger = Ledger()
    ledger.begins()
    ledger.events[0].workflow_execution_started_event_attributes.continued_execution_run_id = continues
    for i in range(rounds):
        ledger.round(number * rounds + i + 1, Decision(assignments=[place()]))
    for event in ledger.events:
        event.event_time.seconds += number * 3600
    return ledger.events


async def read(temporal: Temporal, created: float = BEGAN, ended: float | None = None, **bounds: Any) -> Recorded:
    reader = Reader(cast(Any, temporal), lambda *_: None, **bounds)
    return await reader.read(Life(UID, created, ended))


def rounds(found: Recorded) -> list[str]:
    return [each.by for each in found.entries for _ in range(each.times)]


async def test_all_runs_are_read_page_by_page_whether_they_go_on_or_begin_anew() -> None:
    temporal = Temporal(a_run(0), a_run(1, continues="run-0"), a_run(2))
    found = await read(temporal)
    assert found.entries[0].at == BEGAN + 2 and found.entries[0].times == 6 and found.notes == []


async def test_what_was_before_the_workload_is_not_read() -> None:
    temporal = Temporal(a_run(0, 50), a_run(1, continues="run-0"))
    found = await read(temporal, BEGAN + 3600)
    assert rounds(found) == ["round 3"] * 2 and found.notes == [] and temporal.asked == 4, "and a page to see that"


async def test_of_one_that_ended_the_runs_that_began_later_are_not_read() -> None:
    temporal = Temporal(a_run(0), a_run(1, continues="run-0"), a_run(2, 50, continues="run-1"))
    found = await read(temporal, BEGAN, BEGAN + 10)
    assert rounds(found) == ["round 1"] * 2 and found.notes == []


async def test_if_there_is_too_much_the_newest_is_told_and_that_there_was_more() -> None:
    temporal = Temporal(a_run(0), a_run(1, 6, continues="run-0"))
    found = await read(temporal, most_events=4)
    assert [each.times for each in found.entries] == [2]
    (note,) = found.notes
    assert note == f"older rounds are not shown: 4 events were read, back to {timestamp(BEGAN + 3609)}"
    late = await read(temporal, most_seconds=0)
    assert late.entries == [] and late.notes == ["older rounds are not shown: 0 events were read"]


async def test_what_temporal_keeps_no_more_is_told() -> None:
    found = await read(Temporal(a_run(1, continues="long-ago")))
    assert rounds(found) == ["round 3"] * 2
    assert found.notes == [f"what was before {timestamp(BEGAN + 3600)} is not kept by Temporal any more"]


async def test_without_a_ledger_there_is_nothing_to_tell() -> None:
    assert await read(Temporal([])) == Recorded()


@pytest.mark.parametrize("away", [AWAY, RuntimeError("Failed client connect"), TimeoutError()])
async def test_if_temporal_goes_away_what_was_read_is_told(away: Exception) -> None:
    found = await read(Temporal(a_run(0), away=away))
    assert rounds(found) == ["round 2"]
    assert found.notes[0].startswith("Temporal's history could not be read to the end")


# --- as a person sees it --------------------------------------------------------------------------------------------


def printed(found: Recorded, width: int = 100) -> str:
    console = Console(width=width, record=True, highlight=False)
    show_history(found, console)
    return " ".join(console.export_text().split())


def test_a_person_reads_when_by_whom_what_where_and_why() -> None:
    entry = Entry(0.0, "round 7", "placed", "n[red]1", "by fgd [0]", 3)
    text = printed(Recorded([entry], ["older rounds are not shown"]))
    assert "its history 1970-01-01T00:00:00 round 7 placed n[red]1 by fgd [0] (said 3 times in a row)" in text
    assert text.endswith("note: older rounds are not shown")
    narrow = printed(Recorded([Entry(0.0, "round 123456", "queued again", "gpu-node-0123456789.example", "m")]), 60)
    assert "1970-01-01T00:00:00 round 123456 queued again" in narrow and "…" not in narrow
    assert "times in a row" not in printed(Recorded([Entry(0.0, OWN, "Running", "n", "m")]))
    assert printed(Recorded()) == "Temporal has recorded nothing about it yet."


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster in which workload w waits for a place."""

    async def found(*_: object) -> Collected:
        return Collected(snapshot([node("n", 1)], [workload("w", 2)], now=NOW), Settings(), [], "")

    monkeypatch.setattr(collect, "collect", found)


def explain(*arguments: str) -> Any:
    return CliRunner().invoke(command_line(), ["explain", "workload", "w", "-n", "ns", *arguments])


@pytest.mark.usefixtures("waits")
def test_without_temporal_the_rest_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("127.0.0.1:1", "not an address"):
        result = explain("--history", "--temporal-address", address)
        assert result.exit_code == 0
        text = " ".join(result.output.split())
        assert "ns/w: no node has 2 GPUs" in text and "note: Temporal's history could not be read" in text
        assert "--temporal-address, TEMPORAL_ADDRESS or a profile" in text
    monkeypatch.setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", str(tmp_path / "missing"))
    result = explain("--history", "--json")
    told = json.loads(result.stdout)["history"]
    assert told["entries"] == [] and "missing" in told["notes"][0]


@pytest.mark.usefixtures("waits")
def test_temporal_is_not_asked_unless_the_history_is() -> None:
    result = explain("--json", "--temporal-address", "not an address")
    assert result.exit_code == 0 and "history" not in json.loads(result.output)
