"""The tables and charts of README and docs/performance.md, written by `scripts/bench --peers --write`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.contestants import ALL, OURS

PAGE = Path("docs/performance.md")
BEGIN, END = "<!-- written by scripts/bench --peers --write -->", "<!-- end of what scripts/bench wrote -->"

Results = Mapping[str, Any]
Cell = Callable[[Results], str]


def _number(value: float) -> str:
    if value >= 1_000:
        return f"{round(value, -1 if value < 100_000 else -2):,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.1f}"


def _figures(*names: str, scale: float = 1.0) -> Cell:
    return lambda found: " / ".join(_number(scale * found[name]) if name in found else "–" for name in names)


def _rate(name: str, count: int) -> Cell:
    return lambda found: _number(count / found[name]) if name in found else "–"


SPEED: Mapping[str, Cell] = {
    "backlog, tasks/s": _figures("backlog_rate"),
    "while enqueueing, tasks/s": _figures("running_rate"),
    "enqueue one by one / in bulk, per s": _figures("single_rate", "bulk_rate"),
    "idle p50 / p99, ms": _figures("idle_p50", "idle_p99"),
    "at {rate:g}/s p50 / p99, ms": _figures("load_p50", "load_p99"),
    "memory (PSS), MB": lambda found: _number(sum(found["memory"].values())),
    "each task ran once": lambda _: "yes",  # a failure is shown in another column
}
COMPOSED: Mapping[str, Cell] = {
    "chord of 1,000, s": _figures("chord"),
    "chain of 100, ms a step": _figures("chain", scale=10.0),
    "workflow, steps/s in sequence": _rate("steps", 100),
    "40 × fibonacci(10) in sequence, s": _figures("fibonacci"),
}
COMPOSITIONS = ("chord", "chain", "steps", "fibonacci")


def markdown(report: Results) -> str:
    """Return the tables, with machine, versions and configurations."""
    options, machine = report["options"], report["machine"]
    results = dict(sorted(report["results"].items(), key=lambda item: -item[1].get("backlog_rate", 0.0)))
    rows = [_row(name, found, SPEED) for name, found in results.items()]
    composed = [
        _row(name, found, COMPOSED) for name, found in results.items() if any(kind in found for kind in COMPOSITIONS)
    ]
    configured = [[_title(name, found), ALL[name].configuration] for name, found in results.items()]
    return "\n\n".join(
        (
            _table([header.format_map(options) for header in SPEED], rows),
            f"Medians of {options['rounds']} rounds, {report['date']}. On {machine['cores']} cores"
            f" ({machine['processor']}) run Postgres {machine['postgres']} with its default durability, Redis"
            f" {machine['redis']}, the client, and the scheduler and two worker processes of each system, with Python"
            f" {machine['python']}. Compare the ratios; the absolute figures belong to this machine.",
            _table(list(COMPOSED), composed),
            "Tasks and steps do nothing but count that they ran. 40 × fibonacci(10) is Windmill's published benchmark,"
            " as a workflow or else a chain. – means that the system has no such thing, or that it was not measured.",
            _table(["configuration: what differs from the defaults"], configured),
        )
    )


def _title(name: str, found: Results) -> str:
    title = ALL[name].title
    if name == OURS.name:
        return f"**{title}**"
    return f"{title} {next(iter(found['versions'].values()))}" if "versions" in found else title


def _row(name: str, found: Results, columns: Mapping[str, Cell]) -> list[str]:
    if "failed" in found:
        return [_title(name, found), found["failed"], *[""] * (len(columns) - 1)]
    return [_title(name, found), *(cell(found) for cell in columns.values())]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [["", *header], ["---"] * (1 + len(header)), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


STYLE = """\
.back { fill: #ffffff } text { fill: #374151 } .peer { fill: #9ca3af } .ours { fill: #3f51b5 }
.strong { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  .back { fill: #161b22 } text { fill: #d1d5db } .peer { fill: #6b7280 } .ours { fill: #7986cb }
}"""


def chart(title: str, unit: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return an SVG of horizontal bars, readable on light and dark pages."""
    height = 46 + 30 * len(bars)
    longest = max(value for _, value in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" height="{height}" role="img"'
        f' aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="14">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="back" width="760" height="{height}" rx="6"/>',
        f'<text class="strong" x="16" y="27">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(bars):
        top, width = 47 + 30 * number, max(2, round(500 * value / longest))
        bar, text = ("ours", ' class="strong"') if name == OURS.title else ("peer", "")
        lines += [
            f'<text{text} x="140" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{bar}" x="150" y="{top}" width="{width}" height="20" rx="3"/>',
            f'<text{text} x="{158 + width}" y="{top + 14}">{_number(value)} {unit}</text>',
        ]
    return "\n".join((*lines, "</svg>\n"))


CHARTS = {
    "throughput.svg": ("Tasks a second from a backlog (more is better)", "/s", "backlog_rate", True),
    "latency.svg": ("From enqueue to result on an idle system, p50 (less is better)", "ms", "idle_p50", False),
}


def write(report: Results, repository: Path) -> None:
    """Replace the charts, and the tables between the two comments of the page."""
    page = repository / PAGE
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{markdown(report)}\n\n{END}{after}", encoding="utf-8")
    for file, (title, unit, measure, descending) in CHARTS.items():
        bars = [
            (ALL[name].title, float(found[measure])) for name, found in report["results"].items() if measure in found
        ]
        bars.sort(key=lambda bar: bar[1], reverse=descending)
        (page.parent / "images" / file).write_text(chart(title, unit, bars), encoding="utf-8")
