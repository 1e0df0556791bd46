"""`orchestrator audit`."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from orchestrator.cli.terminal.options import json_option, moment
from orchestrator.cli.terminal.output import echo, echo_json, print_json, print_table
from orchestrator.cli.terminal.reading import looking
from orchestrator.domain.plain import stored_json
from orchestrator.sdk.calls.interface import Calls
from orchestrator.store.audit import AuditEntry, AuditFilter
from orchestrator.terminal_safe import one_line

_LOOK_AGAIN = 1.0
_LATE = 1_000
"""A line may be committed after one whose id is larger by so much."""


@click.command("audit")
@click.option("--who", metavar="TEXT", help="Only of those whose names begin so.")
@click.option("--act", metavar="WORD", help="Only this: cancel, retry, pause, apply, refused, …")
@click.option("--kind", metavar="WORD", help="Only to this kind of thing: task, run, queue, schedule, workflow, key.")
@click.option("--target", metavar="NAME", help="Only to this one: an id or a name.")
@click.option("--since", type=moment, metavar="TIME", help="Only since then: 2h (ago), or 2024-01-31T09:30.")
@click.option("--until", type=moment, metavar="TIME", help="Only before then.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many to show.")
@click.option("--before", type=click.IntRange(1), metavar="NUMBER", help="Continue before this line.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, a line each, until Ctrl-C.")
@json_option
def command(limit: int, before: int | None, follow: bool, as_json: bool, **matching: Any) -> None:
    """Show who did what to which task, run, queue, schedule, workflow or key, newest first.

    Enqueueing tasks, starting runs and posting events is not in it.

    \b
    Example:
      orchestrator audit --kind queue --since 2h
      orchestrator audit --target mail --json | jq -r '.entries[].who'
      orchestrator audit --act refused --follow
    """
    wanted = AuditFilter(**matching)
    if follow and (before is not None or wanted.until is not None):
        raise click.UsageError("--follow is about what comes: leave out --before and --until.")
    with looking() as calls:
        found = calls.insights.audit(wanted, limit=limit, before=before)
        if follow:
            _follow(calls, wanted, found, as_json)
            return
    if as_json:
        print_json({"entries": found})
        return
    print_table(
        ("line", "time (UTC)", "who…", "from…?", "act", "kind", "target…", "detail…?"),
        [
            (one.id, f"{one.at:%Y-%m-%d %H:%M:%S}", one.who, one.origin, one.act, one.kind, one.target, _detail(one))
            for one in found
        ],
        empty="Nobody has done anything that is kept in the audit log and matches.",
    )


def _follow(calls: Calls, wanted: AuditFilter, found: list[AuditEntry], as_json: bool) -> None:
    """Print what is there, the oldest first, and what comes."""
    seen: dict[int, None] = {}
    last = found[0].id if found else 0
    lines = found[::-1]
    while True:
        for one in lines:
            if one.id not in seen:
                seen[one.id] = None
                _print(one, as_json)
        last = max([last, *(one.id for one in lines)])
        for old in [number for number in seen if number <= last - _LATE]:
            del seen[old]
        time.sleep(_LOOK_AGAIN)
        first = min((one.id for one in found), default=0)
        lines = calls.insights.audit_after(wanted, max(0, first, last - _LATE))


def _print(one: AuditEntry, as_json: bool) -> None:
    if as_json:
        echo_json(msgspec.json.encode(one).decode())
        return
    told = f"{one.at:%Y-%m-%d %H:%M:%S} {one.who} ({one.origin}): {one.act} {one.kind} {one.target} {_detail(one)}"
    echo(one_line(told.strip()))


def _detail(one: AuditEntry) -> str:
    given = {name: value for name, value in one.detail.items() if value is not None}
    return stored_json(given) if given else ""
