"""`berth explain` as a person runs it beside a real control plane."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from typer.testing import CliRunner

from berth.cli import command_line
from tests.application.tenant import Tenant

pytestmark = pytest.mark.stack


async def berth(tenant: Tenant, *arguments: str, who: str = "admin") -> tuple[int, str]:
    command = ["explain", "workload", *arguments, "--kubeconfig", str(tenant.stack.endpoints.kubeconfig(who))]
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "300"}).invoke, command_line(), command)
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


async def test_why_it_waits_who_is_before_it_and_what_would_help(tenant: Tenant) -> None:
    busy = await tenant.node("a", 4)
    await tenant.apply("runs", 3, run="120s")
    await tenant.until("runs", phase="Running")
    await tenant.apply("first", 4, priority="high")
    await tenant.apply("w", 2)
    await tenant.until("w", phase="Scheduling")
    code, text = await berth(tenant, "w", "-n", tenant.namespace)
    assert code == 0, text
    assert f"{tenant.namespace}/w is Scheduling: needs 2 GPUs" in text
    assert "just before it:" in text and f"{tenant.namespace}/first" in text
    assert f"asking for 1 GPU instead of 2: fits {busy} now" in text
    assert "strategy leastLoaded" in text and "WaitingForCapacity" in text
    code, text = await berth(tenant, "w", "-n", tenant.namespace, "--json")
    (mine,) = [each for each in json.loads(text)["nodes"] if each["name"] == busy]
    assert (mine["free"]["gpus"], mine["why"]) == (1, "short of free GPUs")
    code, text = await berth(tenant, "runs", "-n", tenant.namespace)
    assert code == 0 and f"is on node {busy}" in text


async def test_all_that_was_decided_about_one_that_was_stopped_and_failed_twice(tenant: Tenant) -> None:
    node = await tenant.node("a", 2)
    retried = {"maxRetries": 1, "backoffSeconds": 1}
    await tenant.apply("low", 2, run="8s", exit_code=3, priority="low", retryPolicy=retried)
    await tenant.until("low", phase="Running")
    await tenant.apply("high", 2, priority="high")
    await tenant.until("high", phase="Succeeded", seconds=60)
    await tenant.until("low", phase="Failed", seconds=90)
    temporal = ("--history", "--temporal-address", tenant.stack.endpoints.temporal_address)
    code, text = await berth(tenant, "low", "-n", tenant.namespace, "--json", *temporal)
    assert code == 0, text
    told = json.loads(text)["history"]
    assert told["notes"] == []
    entries = [(each["what"], each["where"], each["why"]) for each in told["entries"]]
    turns = [why.split(", by")[0] for what, where, why in entries if (what, where) == ("placed", node)]
    assert turns == ["attempt 0, 0 retries used", "attempt 1, 0 retries used", "attempt 2, 1 retry used"]
    kinds = [what for what, _, _ in entries if what in ("placed", "stopped", "taken back", "queued again", "Failed")]
    assert kinds == ["placed", "stopped", "queued again", "placed", "queued again", "placed", "Failed"]
    (goes_on,) = [why for what, _, why in entries if what == "placed" and "goes on there" in why]
    assert goes_on.startswith("attempt 1, "), "the Job that was stopped"
    stopped = next(why for what, _, why in entries if what == "stopped")
    assert f"its place on node {node} goes to {tenant.namespace}/high" in stopped
    assert any(what == "Pending" and "exit code 3; retry 1 of 1" in why for what, _, why in entries)
    assert entries[-1][2].startswith("the only retry is used; the last cause: ")
    code, text = await berth(tenant, "high", "-n", tenant.namespace, *temporal)
    assert code == 0 and "its history" in text and "note:" not in text
    assert re.search(rf"round \d+ gets room {tenant.namespace}/low is stopped for it", text), text
    assert text.index("gets room") < text.index(f"placed {node} attempt 0") < text.index("ended")


async def test_what_cannot_be_explained_is_told(tenant: Tenant) -> None:
    await tenant.apply("lonely", suspend=True)
    code, text = await berth(tenant, "nobody", "-n", tenant.namespace)
    assert code == 1 and "There is no GPUWorkload 'nobody'" in text
    code, text = await berth(tenant, "lonely", "-n", f"not-{tenant.namespace}")
    assert code == 1 and f"-n {tenant.namespace}" in text, "where there is one"
    code, text = await berth(tenant, "lonely", "-n", tenant.namespace, who="kube-scheduler")
    assert code == 1 and "You may not read all that decides" in text and "kube-scheduler" in text
