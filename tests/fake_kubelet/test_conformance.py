"""The conformance set: a good plugin passes all of it, and each fault is found by the scenario that it is for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.fake_kubelet.conformance import SCENARIOS, Outcome, Process, Trial, run
from tests.fake_kubelet.kubelet import FakeKubelet
from tests.fake_kubelet.reference_plugin import ReferencePlugin, running
from tests.fake_kubelet.transcript import RULES

WITHOUT_PROCESS = [name for name in SCENARIOS if name not in ("plugin-killed", "race", "quiet")]


async def tried(
    kubelet: FakeKubelet, *names: str, faults: tuple[str, ...] = (), patience: float = 20.0
) -> list[Outcome]:
    """Against the reference plugin in this process."""
    async with running(ReferencePlugin(kubelet.plugins, devices=5, faults=faults)):
        return await run(Trial(kubelet, patience, quiet=0.5), names)


async def test_a_good_plugin_passes(kubelet: FakeKubelet) -> None:
    outcomes = await tried(kubelet, *WITHOUT_PROCESS, "quiet", "race")
    assert {each.scenario: (each.outcome, each.text) for each in outcomes if each.outcome != "pass"} == {
        "race": ("skip", "needs the plugin's command, to start and end it")
    }
    assert kubelet.violations == []
    assert len(kubelet.transcript.of("registered")) >= 5, "the kubelet was restarted and the stream was cut"


@pytest.mark.parametrize(
    ("scenario", "fault", "says"),
    [
        ("allocate", "allocate-failed", "does not run"),
        ("allocate", "wrong-response-count", "does not run"),
        ("prefer", "preference-failed", "GetPreferredAllocation rpc failed"),
        ("init-container", "pre-start-failed", "PreStartContainer rpc failed"),
        ("restart", "never-registers-again", "After 1 s still not"),
        ("kill", "never-registers-again", "After 1 s still not"),
        ("restarts", "never-registers-again", "After 1 s still not"),
        ("cut", "never-registers-again", "After 1 s still not"),
        ("restart", "loses-a-device", "After 1 s still not"),
        ("register", "wrong-version", "After 1 s still not"),
    ],
)
async def test_a_fault_is_found(kubelet: FakeKubelet, scenario: str, fault: str, says: str) -> None:
    (outcome,) = await tried(kubelet, scenario, faults=(fault,), patience=1)
    assert outcome.outcome == "fail" and says in outcome.text, outcome


async def test_a_plugin_that_sends_without_need_is_not_quiet(kubelet: FakeKubelet) -> None:
    plugin = ReferencePlugin(kubelet.plugins)

    async def chatter() -> None:
        while True:
            await asyncio.sleep(0.05)
            plugin.changed()

    async with running(plugin):
        talking = asyncio.create_task(chatter())
        (outcome,) = await run(Trial(kubelet, 20, quiet=0.5), ["quiet"])
        talking.cancel()
    assert outcome.outcome == "fail" and "in which nothing changed" in outcome.text
    assert {each.rule for each in outcome.violations} == {"resent-list"}


async def test_an_answer_that_never_comes_is_not_waited_for(kubelet: FakeKubelet) -> None:
    class Hanging(ReferencePlugin):
        async def Allocate(self, request: object, context: object) -> None:
            await asyncio.Event().wait()

    async with running(Hanging(kubelet.plugins)):
        (outcome,) = await run(Trial(kubelet, 1), ["allocate"])
    assert outcome.outcome == "fail" and "has not answered for 1 s" in outcome.text


def plugin_of(folder: Path, *more: str) -> list[str]:
    where = str(folder / "device-plugins")
    return [sys.executable, "-m", "tests.fake_kubelet.reference_plugin", "--folder", where, *more]


async def test_a_plugins_process_is_killed_and_replaced(kubelet: FakeKubelet) -> None:
    trial = Trial(kubelet, 30, Process(plugin_of(kubelet.folder)))
    outcomes = await run(trial, ["plugin-killed", "race"])
    assert [each.outcome for each in outcomes] == ["pass", "pass"], outcomes
    assert kubelet.transcript.of("disconnect race") and not any(each.violations for each in outcomes)


def command(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tests.fake_kubelet", "--folder", str(folder), *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_the_command_line(folder: Path) -> None:
    file, log = folder / "out.json", folder / "log"
    done = command(
        folder,
        "--scenario",
        "restart",
        "--json",
        str(file),
        "--log",
        str(log),
        "--",
        *plugin_of(folder, "--fault", "resent-list"),
    )
    assert done.returncode == 1 and "resent-list" in done.stdout, done
    read = json.loads(file.read_text())
    (scenario,) = read["scenarios"]
    assert (scenario["scenario"], scenario["outcome"]) == ("restart", "pass")
    assert {each["rule"] for each in scenario["violations"]} == {"resent-list"}
    assert read["checkpoint_writes"] > 2 and read["transcript"][0]["what"] == "started" and log.exists()
    done = command(folder, "--scenario", "register", "--", *plugin_of(folder))
    assert done.returncode == 0 and "No rule was broken" in done.stdout, done


def test_the_command_line_says_what_is_wrong(folder: Path) -> None:
    assert "cannot run: " in command(folder, "--scenario", "register", "--", "/no/such/plugin").stderr
    assert "too long for a socket" in command(folder / ("x" * 100)).stderr
    assert command(folder, "--scenario", "nothing").returncode == 2


def test_the_readme_names_every_scenario_and_rule() -> None:
    text = (ROOT / "tests" / "fake_kubelet" / "README.md").read_text()
    assert [name for name in SCENARIOS if f"`{name}`" not in text] == []
    assert [name for name in RULES if f"`{name}`" not in text] == []
