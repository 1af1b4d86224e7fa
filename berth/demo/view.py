"""What a person sees while the demo runs: a live picture on a terminal, one line every few seconds elsewhere.

Rendering only: everything comes from `live.Fleet`. `picture` also makes the documentation's captures.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from berth.demo.live import Fleet, Sample, State

COLOURS: dict[State, str] = {
    "waiting": "yellow",
    "starting": "cyan",
    "running": "blue",
    "closing": "magenta",
    "succeeded": "green",
    "failed": "red",
}
NEWS_COLOURS = {"placed": "cyan", "retried": "yellow", "done": "green", "failed": "red"}
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


def picture(fleet: Fleet, now: float, *, title: str, width: int, news: int = 7) -> RenderableType:
    """The whole picture at `now` seconds after the first workload was applied. `width` in columns, at least 60."""
    sample = fleet.samples[-1] if fleet.samples else Sample(now, {}, fleet.used(), 0)
    inner = max(56, width - 4)
    placing, ending = fleet.rates(now)
    figures = Text.assemble(
        ("elapsed ", "dim"), (f"{now:5.1f} s", "bold"),
        ("   waiting for a place ", "dim"), (f"{sample.waiting:,}", "bold yellow" if sample.waiting else "bold"),
        ("   placed/s ", "dim"), (f"{placing:.0f}", "bold"),
        ("   finished/s ", "dim"), (f"{ending:.0f}", "bold"),
        ("   GPUs in use ", "dim"), (f"{sample.in_use:,}", "bold"), (f" of {fleet.total:,}", "dim"),
    )  # fmt: skip
    parts: list[RenderableType] = [
        phase_bar(sample, len(fleet.items), inner),
        legend(sample),
        Text(),
        figures,
        Text(),
        models(fleet, sample, inner),
        Rule("what happened last", style="dim"),
        latest(fleet, inner, news),
    ]
    return Panel(Group(*parts), title=title, border_style="blue", width=width, padding=(0, 1))


def phase_bar(sample: Sample, total: int, width: int) -> Text:
    """One bar for all workloads, each state its share; a state that exists gets at least one column."""
    bar = Text()
    for state, columns in shares({state: sample.counts.get(state, 0) for state in COLOURS}, total, width).items():
        bar.append("█" * columns, COLOURS[state])
    return bar


def shares(counts: dict[State, int], total: int, width: int) -> dict[State, int]:
    """`width` columns divided in proportion, at least one for whatever is not zero; they always add up to `width`."""
    columns = {state: max(1, width * count // max(total, 1)) if count else 0 for state, count in counts.items()}
    rest = width - sum(columns.values())
    if any(columns.values()):
        widest = max(columns, key=lambda state: columns[state])
        columns[widest] += rest
    return columns


def legend(sample: Sample) -> Text:
    """The states with their numbers, in the bar's colours."""
    return Text("   ").join(
        Text.assemble(("■ ", colour), f"{state} ", (f"{sample.counts.get(state, 0):,}", "bold"))
        for state, colour in COLOURS.items()
    )


def models(fleet: Fleet, sample: Sample, width: int) -> Table:
    """GPUs in use by model: a bar for now and a curve since the start."""
    table = Table.grid(padding=(0, 1), expand=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=9)
    table.add_column(no_wrap=True)
    room = width - 8 - 9 - 4
    bar_width = room * 2 // 5
    for model, gpus in sorted(fleet.capacity.items(), key=lambda entry: (-entry[1], entry[0])):
        used = sample.used.get(model, 0)
        curve = [each.used.get(model, 0) / gpus if gpus else 0.0 for each in fleet.samples]
        table.add_row(
            model,
            gauge(used / gpus if gpus else 0.0, bar_width),
            Text.assemble((f"{used:,}", "bold"), (f"/{gpus:,}", "dim")),
            Text(sparkline(curve, room - bar_width), "blue"),
        )
    return table


def gauge(share: float, width: int) -> Text:
    """A bar with eighths of a column; the colour tells how full."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, part = divmod(eighths, 8)
    filled = "█" * full + (_PARTS[part] if part else "")
    colour = "green" if share >= 0.9 else "cyan"
    return Text.assemble((filled, colour), ("·" * (width - len(filled)), "dim"))


def sparkline(values: Sequence[float], width: int) -> str:
    """Values from 0 to 1 as a line of at most `width` blocks; more values than that are averaged."""
    if not values:
        return ""
    columns = min(width, len(values))
    groups = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(group) / len(group) for group in groups]
    # What is not zero is never drawn as nothing.
    return "".join(_BLOCKS[max(round(min(mean, 1.0) * 8), 1 if mean > 0 else 0)] for mean in means)


def latest(fleet: Fleet, width: int, count: int) -> Text:
    """The last things that happened; placements give way to rarer news."""
    rare = [each for each in fleet.news if each.kind in ("retried", "failed")][-2:]
    common = [each for each in fleet.news if each not in rare][-(count - len(rare)) :]
    lines = sorted([*rare, *common], key=lambda each: each.at)
    text = Text(no_wrap=True, overflow="ellipsis")
    for index in range(count):
        if index:
            text.append("\n")
        if index < len(lines):
            each = lines[index]
            line = Text.assemble((f"{each.at:6.1f} s  ", "dim"), (each.text, NEWS_COLOURS[each.kind]))
            line.truncate(width, overflow="ellipsis")
            text.append_text(line)
    return text


def line(fleet: Fleet, now: float) -> str:
    """One line for logs and pipes."""
    sample = fleet.samples[-1] if fleet.samples else Sample(now, {}, fleet.used(), 0)
    states = " · ".join(f"{state} {sample.counts.get(state, 0):,}" for state in COLOURS)
    placing, ending = fleet.rates(now)
    return (
        f"{now:6.1f} s  {states} · GPUs {sample.in_use:,}/{fleet.total:,} · "
        f"{placing:.0f} placed/s · {ending:.0f} finished/s"
    )
