"""Output controls no terminal and forges no line, whatever the data: every reading command, every field."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from sqlalchemy.exc import DBAPIError

from orchestrator.cli import main
from orchestrator.cli.runs.progress import watch_run
from orchestrator.cli.system import audit
from orchestrator.domain.tasks.task import Failed, TaskError
from orchestrator.sdk.dag.definitions import loads
from orchestrator.store import insights
from orchestrator.store.audit import AuditEntry
from orchestrator.transport import journal
from orchestrator.transport.codec import LogLine, ProgressMark
from orchestrator.transport.quarantine import Refused
from tests.integration.stage import KEYS, System, raw
from tests.said import say
from tests.unit.test_cli_help import ALL, READS, READS_TOO

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b5n\r\x08\x7f\u202e[/red][bold]\u2028"
FORGED = "\n12:00:00 INFO    forged"
HOSTILE = f"evil{EVIL}{FORGED}{EVIL}"
COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029\u2066-\u2069]")
OUR_STYLES = re.compile(r"\x1b\[[0-9;]*m")
STATES = {"status", "state", "kind", "outcome", "scope", "hash", "generation", "position", "server", "catch_up"}
"""Columns that hold only values of our own."""
WORKFLOW = """
name: hostile
description: "evil \\e[2J\\u202e"
params: {any: {type: any, default: null}}
tasks:
  first: {task: job, input: {number: "evil \\e[2J"}}
  second: {task: job, depends_on: [first]}
"""


FLOW = """
start: "evil \\e[2J"
nodes: {"evil \\e[2J": {exec_type: local_func, func: job}}
"""


@pytest.fixture
def hostile_commands(system: System, in_empty_folder: Path) -> dict[str, tuple[object, ...]]:
    """Fill every field of a system with hostile text; return the arguments of each command that shows it."""
    system.app.workflows.apply(loads(WORKFLOW))
    Path("flow.yaml").write_text(FLOW, encoding="utf-8")
    system.app.flows.publish("hostile-flow", Path("flow.yaml"))
    assert invoke("keys", "create", "hostile").exit_code == 0
    assert invoke("schedules", "set", "hostile", "--name", "nightly", "--cron", "0 3 * * *").exit_code == 0
    worker = system.worker()
    failed, won = system.dispatch(2)
    tasks = {task.id: task for task in worker.take()}
    error = TaskError(HOSTILE, HOSTILE, HOSTILE)
    worker.report(Failed(raw(failed), tasks[raw(failed)].attempt, 0.1, error, False))
    worker.succeed(tasks[raw(won)], result=msgspec.msgpack.encode([HOSTILE, {HOSTILE: HOSTILE}]))
    run = system.app.workflows["hostile"].start(any=HOSTILE)
    flow = system.app.flows["hostile-flow"].start(number=HOSTILE)

    def all_fail() -> bool:
        if tasks := worker.take():
            worker.report(*(Failed(task.id, task.attempt, 0.1, error, False) for task in tasks))
        return flow.status() == run.progress().status == "failed"

    system.tick_until(all_fail)
    many = system.app.start_many(system.job, [HOSTILE])
    system.pass_seconds()
    marks = {raw(won): ProgressMark(1, 0.5, HOSTILE)}
    journal.write(system.redis, KEYS, marks)
    hostile = LogLine(1_700_000_000.0, 1, HOSTILE, HOSTILE, HOSTILE)
    say(system.engine, raw(won), hostile, run=raw(run), step=HOSTILE)
    system.scheduler._streams.set_aside([Refused(HOSTILE, HOSTILE.encode(), HOSTILE)])
    system.redis.set(KEYS.complaint, HOSTILE)
    message = json.loads(invoke("quarantine", "list", "--json").stdout)["messages"][0]["id"]
    Path("hostile.yaml").write_text(WORKFLOW.replace("job", "jobs"), encoding="utf-8")
    Path("bad.yaml").write_text(WORKFLOW + "  \u202ethird\x9b: 3\n", encoding="utf-8")
    Path("bad_flow.yaml").write_text(FLOW.replace("local_func, func", "local_func, fnc"), encoding="utf-8")
    Path("replayed.py").write_text("from orchestrator import Orchestrator\napp = Orchestrator()\n", encoding="utf-8")
    poison(system)
    return {
        "db check": (),
        "doctor": (),
        "tasks list": (),
        "tasks show": (failed.id,),
        "tasks watch": (failed.id,),
        "tasks logs": (won.id,),
        "runs logs": (run.id,),
        "workflows validate": ("bad.yaml",),
        "workflows list": (),
        "workflows show": ("hostile",),
        "workflows diff": ("hostile.yaml",),
        "runs list": (),
        "runs show": (run.id,),
        "runs watch": (run.id,),
        "runs history": (many.id,),
        "schedules list": (),
        "schedules show": ("hostile/nightly",),
        "schedules next": ("hostile/nightly",),
        "schedules backfills": (),
        "queues": (),
        "workers": (),
        "status": (),
        "top": (),
        "quarantine list": (),
        "quarantine show": (message,),
        "audit": (),
        "failures": (),
        "failures list": (),
        "flows list": (),
        "flows runs": (),
        "flows show": (flow.id,),
        "flows validate": ("bad_flow.yaml",),
        "flows watch": (flow.id,),
        "keys list": (),
        "search": ("evil",),
        "workflows replay-check": ("--app", "replayed:app"),
        "workflows export": ("exported",),
    }


def poison(system: System) -> None:
    """Append hostile text to all text in the tables, where constraints allow it."""
    columns = system.sql(
        "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'orchestrator'"
    )
    changed: set[str] = set()
    for column in columns:
        table, name, kind = column["table_name"], column["column_name"], column["data_type"]
        if name in STATES or (table, name) in {("workflows", "name"), ("schedules", "workflow"), ("schedules", "name")}:
            continue
        if kind == "text":
            value = f"coalesce({name}, '') || :evil"
        elif kind == "ARRAY":
            value = f"{name} || ARRAY[:evil]"
        else:
            continue
        try:
            system.sql(f"UPDATE orchestrator.{table} SET {name} = {value}", evil=HOSTILE)
            changed.add(f"{table}.{name}")
        except DBAPIError:
            continue  # a constraint of the table
    assert {"tasks.name", "runs.tags", "runs.name", "workers.host", "schedules.error", "ended_tasks.reason"} <= changed
    assert {"flows.name", "node_runs.error", "api_keys.name", "audit.who"} <= changed


def invoke(*words: object, terminal: bool = False) -> Result:
    """Run a command; with `terminal`, keep control sequences in its output, as a terminal gets them."""
    return CliRunner().invoke(main, [str(word) for word in words], color=terminal)


def control_characters_in(shown: str) -> set[str]:
    return set(COMMANDS.findall(OUR_STYLES.sub("", shown)))


def test_no_command_prints_control_characters_from_data(
    hostile_commands: dict[str, tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(hostile_commands) == (READS | READS_TOO | {"flows watch", "workflows export"}) - {
        "celery inspect",
        "migrate check",
    }
    seen = 0
    for name, arguments in hostile_commands.items():
        ways: list[tuple[list[str], bool]] = [([], True), ([], False)]
        ways += [(["--json"], False)] if name in READS | READS_TOO else []
        for more, terminal in ways:
            result = invoke(*name.split(), *arguments, *more, terminal=terminal)
            assert result.exception is None or isinstance(result.exception, SystemExit), (name, result.exception)
            assert control_characters_in(result.stdout + result.stderr) == set(), (name, more, result.output)
            seen += "evil" in result.output
            if more and result.exit_code == 0:
                assert "�" not in result.stdout, name  # programs get the full text, escaped
                json.loads(result.stdout)
    assert seen > 50, "and it was shown"


def test_tables_and_logs_have_no_forged_lines(hostile_commands: dict[str, tuple[object, ...]]) -> None:
    tables = ("tasks list", "runs list", "schedules list", "workers", "quarantine list", "queues")
    others = ("audit", "failures", "flows list", "flows runs", "flows show", "flows watch", "keys list", "search")
    for name in (*tables, *others, "tasks logs", "runs logs"):
        result = invoke(*name.split(), *hostile_commands[name])
        assert "evil" in result.stdout, name
        assert not [line for line in result.stdout.splitlines() if line.startswith("12:00:00")], (name, result.stdout)


def test_following_the_audit_log_prints_no_forged_lines(capsys: pytest.CaptureFixture[str]) -> None:
    words = dict.fromkeys(("who", "origin", "act", "kind", "target"), HOSTILE)
    told = AuditEntry(id=7, at=datetime(2026, 1, 1, tzinfo=UTC), detail={HOSTILE: HOSTILE}, **words)
    audit._print(told, as_json=False)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 1
    assert control_characters_in(shown) == set()


def test_json_output_contains_the_original_text(hostile_commands: dict[str, tuple[object, ...]]) -> None:
    logged = json.loads(invoke("tasks", "logs", *hostile_commands["tasks logs"], "--json").stdout)
    assert logged["lines"][0]["text"] == HOSTILE
    task = json.loads(invoke("tasks", "show", *hostile_commands["tasks show"], "--json").stdout)
    assert task["error"]["message"] == HOSTILE


@pytest.mark.parametrize(
    "words", [("tasks", "retry", "--queue", "default", "--dry-run"), ("tasks", "cancel", "evil\x9b")]
)
def test_acting_commands_print_no_control_characters(
    hostile_commands: dict[str, tuple[object, ...]], words: tuple[str, ...]
) -> None:
    assert control_characters_in(invoke(*words, terminal=True).output) == set()


def test_progress_bars_print_no_control_characters(
    hostile_commands: dict[str, tuple[object, ...]], system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress bar of a run on a terminal; Rich markup in a name is printed as text."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    @click.command()
    def watch() -> None:
        with system.engine.connect() as connection:
            run = next(
                run for run in insights.list_runs(connection, insights.RunFilter(), limit=9).runs if run.ended_at
            )
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        watch_run(lambda: run)

    result = CliRunner().invoke(watch, color=True)
    assert result.exception is None, result.exception
    assert "[bold]" in result.output
    assert not control_characters_in(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", result.output))


def test_all_commands_print_through_the_output_module() -> None:
    """This also covers commands that are added later."""
    folder = Path(main.callback.__code__.co_filename).parent  # type: ignore[union-attr]
    doors = re.compile(
        r"click\.s?echo\(|(?<![\w.])print\(|rich\.console import [^\n]*\bConsole\b|TextColumn\("
        r"|sys\.std(out|err)\.write"
    )
    files = list(folder.rglob("*.py"))
    found = {str(path.relative_to(folder)) for path in files if doors.search(path.read_text(encoding="utf-8"))}
    assert found == {
        "terminal/output.py",
        "dev/children.py",  # lines of child processes, whose styles are kept
        "top/live.py",  # draws the lines of the frame, and no other text
        "system/keys.py",  # a progress bar with table names
    }
    assert len(files) > 50, "it looks where commands are"
    assert set(ALL) >= READS | READS_TOO
