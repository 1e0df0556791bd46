"""Draws a soak test: a small panel per group of lines, and the faults below, with a shared time axis."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from tests.chaos.soak.faults import FAULTS
from tests.chaos.soak.lines import LINES, LOGARITHMIC, Line
from tests.chaos.soak.report import SoakOutcome

_COLUMNS = 3
_COLORS = ("#1f5fa8", "#d9822b", "#3a8f5c", "#8a5aa8")
_FAULT = "#b03a3a"
_PALETTE = 48
"""Colors of the compressed picture: enough for thin lines, at a third of the size."""
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 6.5,
}


def draw(outcome: SoakOutcome, path: Path) -> None:
    drawn_lines = [line for line in LINES if any(value is not None for value in outcome.samples[line.key])]
    panels = list(dict.fromkeys(line.panel for line in drawn_lines))
    rows = -(-len(panels) // _COLUMNS)
    with matplotlib.rc_context(_STYLE):
        fault_heights = [1.25] if outcome.struck else []
        figure = pyplot.figure(figsize=(12, 1.7 * rows + 1.75 * sum(fault_heights)), layout="constrained")
        grid = figure.add_gridspec(rows + len(fault_heights), _COLUMNS, height_ratios=[1.0] * rows + fault_heights)
        shared: Axes | None = None
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(grid[index // _COLUMNS, index % _COLUMNS], sharex=shared)
            shared = shared or axes
            _panel(axes, panel, [line for line in LINES if line.panel == panel], outcome)
        if fault_heights:
            _faults(figure.add_subplot(grid[rows, :], sharex=shared), outcome)
        _title(figure, outcome)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
        pyplot.close(figure)
    Image.open(buffer).convert("RGB").quantize(_PALETTE).save(path, format="png", optimize=True)


def _panel(axes: Axes, title: str, lines: list[Line], outcome: SoakOutcome) -> None:
    for struck in outcome.struck:
        axes.axvline(struck.at / 60, ymin=0, ymax=0.04, color=_FAULT, linewidth=0.5, alpha=0.7)
    flat = {verdict.line.key: verdict.flat for verdict in outcome.verdicts}
    for line, color in zip(lines, _COLORS, strict=False):
        values = outcome.samples[line.key]
        points = [(at / 60, value) for at, value in zip(outcome.times, values, strict=True) if value is not None]
        label = line.label if flat.get(line.key, True) else f"{line.label}: NOT FLAT"
        judged = line.may_grow is not None
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            color=color,
            linewidth=0.9 if judged else 0.7,
            alpha=1.0 if judged else 0.55,
            label=label,
        )
    axes.set_title(title)
    axes.set_ylabel(lines[0].unit)
    axes.set_xlim(0, max(outcome.times[-1] / 60, 0.1))
    if title in LOGARITHMIC:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.margins(y=0.15)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.98),
        ncols=len(lines),
        handlelength=1.0,
        borderaxespad=0,
        columnspacing=0.8,
        handletextpad=0.4,
    )  # above the panel, so that it covers no line


def _faults(axes: Axes, outcome: SoakOutcome) -> None:
    names = [fault.name for fault in FAULTS]
    moments = [[struck.at / 60 for struck in outcome.struck if struck.name == name] for name in names]
    axes.eventplot(moments, colors=_FAULT, linelengths=0.7, linewidths=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title("Faults")
    axes.set_xlabel("minutes")
    axes.grid(axis="y", visible=False)


def _title(figure: Figure, outcome: SoakOutcome) -> None:
    figure.suptitle(
        f"{outcome.minutes:g} minutes, {outcome.enqueued:,} tasks "
        f"({outcome.achieved:,.0f}/s of {outcome.rate:,g}/s asked), "
        f"{len(outcome.struck)} faults (seed {outcome.seed}): "
        f"{'all' if not outcome.unfinished else 'NOT all'} succeeded",
        x=0.01,
        ha="left",
        fontsize=10,
    )
