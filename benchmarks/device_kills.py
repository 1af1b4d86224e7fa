"""How soon devices are back when the kubelet or `berth node` is killed under load, and how much memory it takes.

For whoever changes how devices are offered. A real kubelet, scheduler and API server run here, with simulated cards
and seats by device plugin and simulated GPUs by DRA; the rig is that of tests/nodeworkers/devices/test_whole.py.
It asserts nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.own_stack import MEGABYTE
from benchmarks.report import Report, arguments, progress
from berth.demo import measure
from stack import Stack, StackError
from stack.realnode import unavailable
from tests.nodeworkers.devices.kills import BY_DRA, BY_PLUGIN, FRONTS, Seen, Watch, kill
from tests.nodeworkers.devices.whole import Machine, machine

KILLS = 20
GOAL = 150 * MEGABYTE  # for `berth node` with its watchers
_QUIET = 20.0  # seconds, before its memory at rest is read


def family(pid: int) -> Iterator[int]:
    """A process and all that it started, with theirs."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def memory(pid: int) -> dict[str, int]:
    """Bytes of the process, and of it with all that it started. What a process that is ending had is left out."""
    found = []
    for each in family(pid):
        with suppress(OSError, KeyError):
            found.append(measure.memory(each))
    return {
        "processes": len(found),
        "rss": sum(each.rss for each in found),
        "pss": sum(each.pss for each in found),
        "own_rss": found[0].rss,
        "own_pss": found[0].pss,
    }


def tell_memory(stack: Stack, when: str, report: Report) -> None:
    """Of `berth node` now."""
    now = memory(stack.pid("node"))
    report.note({f"memory {when}": now})
    report.row(
        f"memory of berth node {when}",
        f"{now['pss'] / MEGABYTE:.0f} MB",
        f"PSS of {now['processes']} processes, {now['own_pss'] / MEGABYTE:.0f} MB its own; RSS "
        f"{now['rss'] / MEGABYTE:.0f} MB; goal {GOAL // MEGABYTE} MB",
    )


def tell(seen: Seen, report: Report) -> None:
    """What was seen while both sides were killed."""
    for (victim, front), seconds in seen.away.items():
        p50, most, whole = statistics.median(seconds), max(seconds), seen.whole[victim, front]
        title = f"{victim} killed, devices by {front} away"
        report.note({title: {"p50": round(p50, 2), "max": round(most, 2), "all": seconds, "from the kill on": whole}})
        report.row(
            title,
            f"{p50:.1f} / {most:.1f} s",
            f"p50 / max of {len(seconds)} kills, from when both run; goal 5 s. From the kill on "
            f"{statistics.median(whole):.1f} / {max(whole):.1f}",
        )
    lost = {"pods": seen.ended, "failed": len(seen.trouble), "unsaved": seen.unsaved, "doubled": len(seen.doubled)}
    report.note(lost | {"moved": len(seen.moved), "looks": seen.looks, "trouble": seen.trouble + seen.moved})
    report.row("pods that ran meanwhile", str(seen.ended), "one after another in two rows; three more ran throughout")
    report.row("failed that berth could have saved", str(len(seen.trouble)))
    report.row("failed as no plugin can prevent", str(seen.unsaved), "admitted by a kubelet that has no devices yet")
    report.row("devices in two pods", str(len(seen.doubled)), f"in {seen.looks} looks at podresources")
    report.row("pods that lost what they held", str(len(seen.moved)))


def rest(node: Machine) -> None:
    """Until all devices are offered, and then some."""
    watch = Watch(node)
    watch.start()
    watch.until_whole(time.monotonic(), 120)
    watch.over.set()
    watch.join(20)
    time.sleep(_QUIET)


def main() -> None:
    parser = arguments("device_kills", str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=KILLS, help="of the kubelet, and as many of berth node")
    options = parser.parse_args()
    if why := unavailable():
        raise SystemExit(f"No real kubelet can run here: {why}")
    report = Report("Devices of a node whose kubelet and berth are killed, simulated cards and GPUs")
    with tempfile.TemporaryDirectory(prefix="berth-kills-") as folder, machine(Path(folder), *FRONTS) as node:
        progress("it rests ...")
        rest(node)
        tell_memory(node.stack, "at rest", report)
        report.note({"devices": BY_PLUGIN | BY_DRA})
        progress(f"{options.kills} kills of each ...")
        seen = kill(node, options.kills)
        tell(seen, report)
        with suppress(StackError):
            tell_memory(node.stack, "after the kills", report)
    report.finish(options.json)


if __name__ == "__main__":
    main()
