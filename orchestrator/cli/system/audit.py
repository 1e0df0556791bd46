"""`orchestrator audit`."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from orchestrator.cli.terminal.options import json_option, moment
from orchestrator.cli.terminal.output import echo, echo_json, print_json, print_table
from orchestrator.cli.terminal.reading import open_calls
from orchestrator.domain.plain import stored_json
from orchestrator.sdk.calls.interface import Calls
from orchestrator.store.audit import AuditEntry, AuditFilter
from orchestrator.terminal_safe import one_line

_POLL_INTERVAL = 1.0
_LATE_WINDOW = 1_000
"""Ids before the newest that are read again: an entry may be committed after one with a larger id."""


@click.command("audit")
@click.option("--who", metavar="TEXT", help="Only actors whose name has this prefix.")
@click.option("--act", metavar="WORD", help="Only this action: cancel, retry, pause, apply, refused, …")
@click.option("--kind", metavar="WORD", help="Only targets of this kind: task, run, queue, schedule, workflow, key.")
@click.option("--target", metavar="NAME", help="Only this target: an id or a name.")
@click.option("--since", type=moment, metavar="TIME", help="Only since: 2h (ago), or 2024-01-31T09:30.")
@click.option("--until", type=moment, metavar="TIME", help="Only before this time.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many to show.")
@click.option("--before", type=click.IntRange(1), metavar="NUMBER", help="Continue before this line.")
@click.option("-f", "--follow", is_flag=True, help="Print new entries as they arrive, until Ctrl-C.")
@json_option
def command(limit: int, before: int | None, follow: bool, as_json: bool, **matching: Any) -> None:
    """Show who did what to which task, run, queue, schedule, workflow or key, newest first.

    Enqueueing tasks, starting runs and posting events is not recorded.

    \b
    Example:
      orchestrator audit --kind queue --since 2h
      orchestrator audit --target mail --json | jq -r '.entries[].who'
      orchestrator audit --act refused --follow
    """
    audit_filter = AuditFilter(**matching)
    if follow and (before is not None or audit_filter.until is not None):
        raise click.UsageError("--follow cannot be combined with --before or --until.")
    with open_calls() as calls:
        entries = calls.insights.audit(audit_filter, limit=limit, before=before)
        if follow:
            _follow(calls, audit_filter, entries, as_json)
            return
    if as_json:
        print_json({"entries": entries})
        return
    print_table(
        ("line", "time (UTC)", "who…", "from…?", "act", "kind", "target…", "detail…?"),
        [
            (row.id, f"{row.at:%Y-%m-%d %H:%M:%S}", row.who, row.origin, row.act, row.kind, row.target, _detail(row))
            for row in entries
        ],
        empty="No matching audit entries.",
    )


def _follow(calls: Calls, audit_filter: AuditFilter, entries: list[AuditEntry], as_json: bool) -> None:
    """Print the existing entries, the oldest first, then new ones as they come."""
    seen: dict[int, None] = {}
    last = entries[0].id if entries else 0
    batch = entries[::-1]
    while True:
        for row in batch:
            if row.id not in seen:
                seen[row.id] = None
                _print(row, as_json)
        last = max([last, *(row.id for row in batch)])
        for expired in [number for number in seen if number <= last - _LATE_WINDOW]:
            del seen[expired]
        time.sleep(_POLL_INTERVAL)
        first = min((row.id for row in entries), default=0)
        batch = calls.insights.audit_after(audit_filter, max(0, first, last - _LATE_WINDOW))


def _print(row: AuditEntry, as_json: bool) -> None:
    if as_json:
        echo_json(msgspec.json.encode(row).decode())
        return
    text = f"{row.at:%Y-%m-%d %H:%M:%S} {row.who} ({row.origin}): {row.act} {row.kind} {row.target} {_detail(row)}"
    echo(one_line(text.strip()))


def _detail(row: AuditEntry) -> str:
    values = {name: value for name, value in row.detail.items() if value is not None}
    return stored_json(values) if values else ""
