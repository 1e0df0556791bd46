"""Every command explains itself, and imports only what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli import COMMANDS, main

READS = {
    "db check",
    "tasks list",
    "tasks show",
    "tasks watch",
    "tasks logs",
    "workflows validate",
    "workflows list",
    "workflows show",
    "workflows diff",
    "runs list",
    "runs show",
    "runs watch",
    "runs logs",
    "runs history",
    "schedules list",
    "schedules show",
    "schedules next",
    "schedules backfills",
    "queues",
    "workers",
    "status",
    "top",
    "quarantine list",
    "quarantine show",
}
READS_TOO = {
    "migrate check",
    "celery inspect",
    "doctor",
    "audit",
    "failures",
    "failures list",
    "flows list",
    "flows runs",
    "flows show",
    "flows validate",
    "keys list",
    "search",
    "workflows replay-check",
}
"""Reading commands whose data `tests.integration.filled` does not create; they have tests of their own."""
ACTS = {
    "bridge celery",
    "enqueue",
    "flows publish",
    "flows start",
    "keys create",
    "rq import",
    "runs reset",
    "runs start",
    "schedules apply",
    "workflows apply",
}
"""Acting commands that print their actions as JSON."""


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands())


def test_the_list_of_commands_is_complete() -> None:
    assert set(ALL) == {
        *COMMANDS,
        *(f"db {verb}" for verb in ("upgrade", "downgrade", "check")),
        *(f"tasks {verb}" for verb in ("list", "show", "watch", "logs", "cancel", "retry")),
        *(f"workflows {verb}" for verb in ("validate", "apply", "list", "show", "diff", "delete", "schema")),
        "workflows export",
        "workflows replay-check",
        *(f"runs {verb}" for verb in ("start", "list", "show", "watch", "cancel", "retry", "rerun", "delete")),
        *(f"runs {verb}" for verb in ("signal", "query", "update", "resolve", "reject", "terminate")),
        *(f"runs {verb}" for verb in ("logs", "reset", "history")),
        *(f"failures {verb}" for verb in ("list", "ack", "snooze", "reopen")),
        *(f"queues {verb}" for verb in ("pause", "resume", "limit", "retain", "purge", "drain")),
        "workers drain",
        *(f"schedules {verb}" for verb in ("list", "show", "next", "set", "apply", "pause", "resume", "trigger")),
        *(f"schedules {verb}" for verb in ("delete", "backfill", "backfills", "cancel-backfill")),
        *(f"keys {verb}" for verb in ("create", "list", "revoke", "generate-signing", "generate-data", "rotate-data")),
        "events post",
        *(f"flows {verb}" for verb in ("validate", "publish", "list", "start", "show", "watch", "runs")),
        *(f"flows {verb}" for verb in ("signal", "approve", "reject")),
        "bridge celery",
        *(f"celery {verb}" for verb in ("worker", "beat", "inspect", "status", "call", "result", "purge", "control")),
        "rq import",
        "rq worker",
        "migrate check",
        *(f"quarantine {verb}" for verb in ("list", "show", "clear")),
    }


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_explains_every_option_and_gives_an_example(name: str) -> None:
    result = CliRunner().invoke(main, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert "Example:\n" in result.output
    assert (
        f"orchestrator {name.replace('celery ', 'celery -A proj ', name.startswith('celery'))}".rstrip()
        in result.output.partition("Example:")[2]
    )
    command = ALL[name] if name else main
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_every_command_with_json_is_listed_as_reading_or_acting() -> None:
    """So tests of all reading commands include the next reading command, too."""
    speaking = {name for name, command in ALL.items() if any("--json" in one.opts for one in command.params)}
    assert speaking == READS | READS_TOO | ACTS


@pytest.mark.parametrize("name", sorted(READS))
def test_every_reading_command_can_print_json(name: str) -> None:
    assert "--json" in CliRunner().invoke(main, [*name.split(), "--help"]).output


def test_the_short_help_of_the_list_matches_the_command() -> None:
    for name, (_, text) in COMMANDS.items():
        assert ALL[name].help
        assert text.rstrip(".").split()[0] == str(ALL[name].help).split()[0]


@pytest.mark.slow
def test_a_shell_completes_commands() -> None:
    command = Path(sys.executable).with_name("orchestrator")
    words = {"_ORCHESTRATOR_COMPLETE": "bash_complete", "COMP_WORDS": "orchestrator runs ca", "COMP_CWORD": "2"}
    done = subprocess.run([command], env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert done.stdout == "plain,cancel\n"


def test_defaults_are_shown() -> None:
    worker = CliRunner().invoke(main, ["worker", "--help"]).output
    assert "[default: default]" in worker
    assert "[default: 10" in worker
    assert "(one per" in worker
    assert "[default: 1;" in CliRunner().invoke(main, ["dev", "--help"]).output


def test_an_unknown_command_is_a_usage_error_with_a_suggestion() -> None:
    result = CliRunner().invoke(main, ["taks"])
    assert result.exit_code == 2
    assert "No such command 'taks'. Did you mean 'tasks'?" in result.stderr


@pytest.mark.parametrize(
    "words",
    [["tasks", "show", "123"], ["tasks", "show"], ["worker", "--processes", "0"], ["tasks", "list", "--status", "x"]],
)
def test_bad_usage_exits_with_2(words: list[str]) -> None:
    assert CliRunner().invoke(main, words).exit_code == 2


_WORKER_WITHOUT_DATABASE = """
import sys
from orchestrator.cli import main
early = {"redis", "asyncio"} & set(sys.modules)
assert not early, early
from orchestrator.cli.fleet import worker
asked = []
worker.run_worker = lambda spec, settings: asked.append((spec, settings)) or 0
try:
    main(["worker", "--app", "shop:app", "--queues", "a, b", "--processes", "2", "--concurrency", "3", "--burst"])
except SystemExit as end:
    assert end.code == 0, end.code
[(spec, settings)] = asked
assert settings.app == "shop:app"
assert (spec.app, spec.queues, spec.processes, spec.concurrency, spec.burst) == ("shop:app", ("a", "b"), 2, 3, True)
heavy = {"sqlalchemy", "psycopg2", "alembic", "rich", "orchestrator.store"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.slow
def test_a_worker_loads_neither_sqlalchemy_nor_psycopg2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WORKER_WITHOUT_DATABASE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_worker_without_an_application_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORCHESTRATOR_APP", raising=False)
    result = CliRunner().invoke(main, ["worker"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: No application is given. Give it with --app module:app")


@pytest.mark.slow
def test_python_m_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("orchestrator, version ")
