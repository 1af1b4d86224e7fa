"""`python -m tests.fake_kubelet`: runs the conformance set against whatever device plugin registers in a folder."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fake_kubelet.conformance import SCENARIOS, Outcome, Process, Trial, run
from tests.fake_kubelet.kubelet import FakeKubelet
from tests.fake_kubelet.transcript import RULES

_COLOURS = {"pass": "green", "fail": "red", "skip": "yellow"}


def parser() -> argparse.ArgumentParser:
    """What it may be told."""
    made = argparse.ArgumentParser(
        prog="python -m tests.fake_kubelet",
        description="Judges a Kubernetes device plugin (v1beta1) by a simulated kubelet, as strict as real ones.",
        epilog="Exits with 0 if nothing failed and no rule was broken, with 1 otherwise, with 2 if it could not run.",
    )
    made.add_argument("--folder", type=Path, required=True, metavar="DIR", help="plays /var/lib/kubelet: the plugin"
                      " registers at DIR/device-plugins/kubelet.sock")  # fmt: skip
    made.add_argument(
        "--scenario", action="append", choices=["all", *SCENARIOS], help="may be repeated (default: all)", default=[]
    )
    made.add_argument("--patience", type=float, default=30.0, metavar="SECONDS", help="for the plugin to come back")
    made.add_argument("--seed", type=int, default=0, help="of the order in which devices are picked")
    made.add_argument("--fixed-race", action="store_true", help="the disconnect race is mended, as from 1.37")
    made.add_argument("--registry", action="store_true", help="plugins may be found in DIR/plugins_registry too")
    made.add_argument("--json", type=Path, metavar="FILE", help="write outcomes, violations and transcript there")
    made.add_argument("--log", type=Path, metavar="FILE", help="where the plugin's output goes")
    made.add_argument(
        "plugin", nargs="*", metavar="-- COMMAND", help="starts the plugin; without it, start it yourself"
    )
    return made


async def judge(given: argparse.Namespace) -> tuple[list[Outcome], FakeKubelet]:
    """Runs the scenarios that were asked for. Raises OSError and ValueError."""
    names = list(SCENARIOS) if not given.scenario or "all" in given.scenario else given.scenario
    kubelet = FakeKubelet(
        given.folder, seed=given.seed, disconnect_race=not given.fixed_race, watch_registry=given.registry
    )
    with ExitStack() as stack:
        output = stack.enter_context(given.log.open("wb")) if given.log else None
        process = Process(given.plugin, output) if given.plugin else None
        async with kubelet:
            try:
                return await run(Trial(kubelet, given.patience, process), names), kubelet
            finally:
                if process is not None:
                    await process.end_all()


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Two tables: scenarios, and rules that were broken."""
    table = Table(title="A device plugin on a simulated kubelet")
    for column in ("scenario", "outcome", "s", "what"):
        table.add_column(column)
    for each in outcomes:
        colour = _COLOURS[each.outcome]
        table.add_row(each.scenario, f"[{colour}]{each.outcome}[/]", f"{each.seconds:.1f}", each.text)
    console.print(table)
    counted: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for violation in (violation for each in outcomes for violation in each.violations):
        counted[violation.rule, violation.resource] += 1
        example.setdefault((violation.rule, violation.resource), violation.text)
    if not counted:
        console.print("No rule was broken.")
        return
    broken = Table(title="Rules that were broken")
    broken.add_column("times")
    broken.add_column("rule", no_wrap=True)
    broken.add_column("for example, and why it matters")
    for (rule, resource), times in counted.most_common():
        broken.add_row(str(times), rule, f"{resource}: {example[rule, resource]}. {RULES[rule]}")
    console.print(broken)


def as_json(outcomes: Sequence[Outcome], kubelet: FakeKubelet) -> str:
    """For machines. Times are seconds since the first entry of the transcript."""
    zero = kubelet.transcript.entries[0].at
    return json.dumps(
        {
            "scenarios": [
                {
                    "scenario": each.scenario,
                    "outcome": each.outcome,
                    "seconds": round(each.seconds, 3),
                    "text": each.text,
                    "violations": [
                        {"rule": it.rule, "resource": it.resource, "text": it.text} for it in each.violations
                    ],
                }
                for each in outcomes
            ],
            "checkpoint_writes": kubelet.checkpoint_writes,
            "transcript": [
                {"at": round(each.at - zero, 4), "what": each.what, "resource": each.resource, "text": each.text}
                for each in kubelet.transcript.entries
            ],
        },
        indent=1,
    )


def main() -> int:
    """The process's exit status."""
    given = parser().parse_args()
    try:
        outcomes, kubelet = asyncio.run(judge(given))
        if given.json:
            given.json.write_text(as_json(outcomes, kubelet))
    except (OSError, ValueError) as error:
        print(f"The fake kubelet cannot run: {error}", file=sys.stderr)
        return 2
    show(outcomes, Console())
    return int(any(each.outcome == "fail" or each.violations for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
