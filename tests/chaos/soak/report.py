"""Reports of a soak test: a progress line, a final table, and JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.soak.faults import Struck
from tests.chaos.soak.lines import Samples
from tests.chaos.soak.verdict import Verdict

_LOG_INTERVAL = 10
"""Seconds between two progress lines, if the output is no terminal."""


@dataclass(frozen=True, kw_only=True)
class SoakOutcome:
    """The result of a soak test."""

    minutes: float
    rate: float
    seed: int
    times: list[float]
    samples: Samples
    struck: list[Struck]
    verdicts: list[Verdict]
    enqueued: int
    refused: int
    unfinished: Counter[str]
    """Committed tasks and runs that did not succeed, by state."""
    fell: list[str]
    """Descriptions of processes that ended without a fault."""

    @property
    def achieved(self) -> float:
        """Enqueued tasks per second; below `rate` on a busy machine, or while Postgres is down."""
        return self.enqueued / (self.minutes * 60)

    @property
    def good(self) -> bool:
        return not self.unfinished and not self.fell and all(verdict.flat for verdict in self.verdicts)


def show_progress(seconds: float, line: str) -> None:
    """Show one changing line on a terminal, otherwise one line every few seconds."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif int(seconds) % _LOG_INTERVAL == 0:
        print(line, file=sys.stderr, flush=True)


def table(verdicts: Sequence[Verdict]) -> str:
    rows = [("line", "median", "growth", "allowed", "")]
    for verdict in verdicts:
        line = verdict.line
        allowed = "" if verdict.allowed is None else f"{verdict.allowed:,.1f}"
        word = "shown" if verdict.allowed is None else "flat" if verdict.flat else "NOT FLAT"
        name = f"{line.panel}, {line.label}"
        rows.append((name, f"{verdict.median:,.1f} {line.unit}", f"{verdict.growth:+,.1f}", allowed, word))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    )


def summary(outcome: SoakOutcome) -> str:
    faults = Counter(struck.name for struck in outcome.struck)
    fault_counts = ", ".join(f"{name} {count}" for name, count in faults.most_common()) or "none"
    lines = [
        f"{outcome.minutes:g} minutes, seed {outcome.seed}: {outcome.enqueued:,} enqueued "
        f"({outcome.achieved:.0f}/s of {outcome.rate:g}/s asked), {outcome.refused:,} refused",
        f"{len(outcome.struck)} faults: {fault_counts}",
    ]
    if outcome.unfinished:
        states = ", ".join(f"{count} {state}" for state, count in outcome.unfinished.items())
        lines.append(f"NOT SUCCESSFUL: {states}")
    else:
        lines.append("everything that was committed succeeded")
    lines.extend(f"FELL: {description}" for description in outcome.fell)
    return "\n".join(lines)


def write_json(outcome: SoakOutcome, path: Path) -> None:
    document = {
        "minutes": outcome.minutes,
        "rate": outcome.rate,
        "seed": outcome.seed,
        "good": outcome.good,
        "enqueued": outcome.enqueued,
        "refused": outcome.refused,
        "unfinished": dict(outcome.unfinished),
        "fell": outcome.fell,
        "faults": [struck._asdict() for struck in outcome.struck],
        "verdicts": [
            {
                "line": verdict.line.key,
                "unit": verdict.line.unit,
                "median": round(verdict.median, 3),
                "growth": round(verdict.growth, 3),
                "allowed": verdict.allowed,
                "flat": verdict.flat,
            }
            for verdict in outcome.verdicts
        ],
        "times": [round(at, 2) for at in outcome.times],
        "samples": {
            key: [None if value is None else round(value, 3) for value in values]
            for key, values in outcome.samples.items()
        },
    }
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
