"""Tables for terminals of any width, and ids abbreviated to as many digits as are needed."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import click
import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len
from sqlalchemy import Engine, text

from orchestrator.cli import main
from orchestrator.cli.terminal.ids import IdOf
from orchestrator.payloads import stores
from orchestrator.store.insights import lookup
from tests.integration.filled import fill, fill_with_code
from tests.integration.planning import explained
from tests.integration.serving import both_ways  # noqa: F401
from tests.integration.stage import System
from tests.integration.test_cli_reads import LISTS
from tests.unit.test_cli_help import ALL

_TASKS = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      created_at, ended_at)
SELECT id, 1, 'many', 'q', 0, 'success', 1, 0, 0, '\\x929080', now(), now() FROM unnest(cast(:ids AS uuid[])) AS id
"""
ALIKE = [f"0199b2f4-7d5c-7{number:03x}-8000-00000000000{number:x}" for number in range(1, 13)]


@pytest.fixture
def here(system: System, in_empty_folder: Path) -> System:
    return system


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def read(*words: object) -> Any:
    return json.loads(invoke(*words, "--json").stdout)


def widen(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let commands print on a terminal of the given width."""
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


# -- ids


def test_a_unique_prefix_of_an_id_is_accepted(here: System) -> None:
    here.sql(_TASKS, ids=[*ALIKE, "0199b2f5-0000-7000-8000-000000000000"])
    for written in ("0199b2f5", "0199B2F5-00", "0199b2f50000", "{0199b2f5-0000-7000-8000-000000000000}"):
        assert read("tasks", "show", written)["id"] == "0199b2f5-0000-7000-8000-000000000000"
    assert read("tasks", "show", "0199b2f4-7d5c-700a")["id"] == ALIKE[9]
    assert read("tasks", "list", "--before", "0199b2f4-7d5c-7002")["tasks"][0]["id"] == ALIKE[0]


def test_the_last_digits_of_an_id_are_accepted(here: System) -> None:
    """The dashboard shows the last 8 digits of ids, and `top` the last 12."""
    ended, failed = "0199b2f5-0000-7000-8000-00005b0d6f2a", here.job.enqueue().id
    here.sql(_TASKS, ids=[*ALIKE, ended])
    for id in (ended, failed):
        for digits in (8, 12):
            assert read("tasks", "show", id[-digits:])["id"] == id
    assert "No task has the id 0d6f2a" in invoke("tasks", "show", ended[-6:]).stderr, "too few digits"


def test_an_ambiguous_prefix_lists_the_matching_ids(here: System) -> None:
    here.sql(_TASKS, ids=ALIKE)
    refused = invoke("tasks", "show", "0199b2f4-7d")
    assert refused.exit_code == 1
    assert "The ids of several tasks begin or end with 0199b2f4-7d. Give more of the id:" in refused.stderr
    named = [line for line in refused.stderr.splitlines() if line.startswith("  0199")]
    assert [line.split()[0] for line in named] == ALIKE[:1:-1], "the newest"
    assert re.search(r"many, success, \d+s ago$", named[0])
    assert refused.stderr.splitlines()[-1] == "  …"


def test_an_unknown_or_malformed_prefix_is_rejected(here: System) -> None:
    refused = invoke("tasks", "show", "0199b2f4")
    assert refused.exit_code == 1
    assert "No task has the id 0199b2f4…." in refused.stderr
    for short in ("019", "xyz12", "0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17-00"):
        refused = invoke("tasks", "show", short)
        assert refused.exit_code == 2
        assert "is not the id of a task: expected one such as 0199b2f4-7d5c-7a3e-9c41-5b0d6f2a8e17" in refused.stderr
        refused = invoke("runs", "show", short)
        assert refused.exit_code == 1
        assert "Expected a UUID, its first 4 or last 8 digits or more, or an id or key" in refused.stderr


def test_every_command_accepts_abbreviated_ids() -> None:
    taken = {
        (name, parameter.name): isinstance(parameter.type, IdOf)
        for name, command in ALL.items()
        for parameter in command.params
        if isinstance(parameter.type, IdOf | type(click.UUID)) or parameter.metavar in ("ID", "ID…", "[ID…]")
        if (name, parameter.name) not in {("quarantine show", "message"), ("schedules cancel-backfill", "number")}
    }
    assert len(taken) > 20
    assert all(taken.values()), taken


def test_ids_printed_on_a_terminal_are_short_but_unambiguous(here: System, monkeypatch: pytest.MonkeyPatch) -> None:
    here.sql(_TASKS, ids=["0199b2f5-0000-7000-8000-000000000000"])
    widen(monkeypatch, 100)
    assert column(invoke("tasks", "list").stdout) == ["0199b2f5-0000"]
    here.sql(_TASKS, ids=ALIKE)
    shown = column(invoke("tasks", "list", "--limit", "3").stdout)
    assert shown == ["0199b2f5-0000-7000", "0199b2f4-7d5c-700c", "0199b2f4-7d5c-700b"]
    assert "--before 0199b2f4-7d5c-700b" in invoke("tasks", "list", "--limit", "3").stderr
    for one in shown:
        assert read("tasks", "show", one)["id"].startswith(one)
    assert len(read("tasks", "list")["tasks"][0]["id"]) == 36
    monkeypatch.undo()


@pytest.mark.long_for("http")
def test_abbreviated_ids_of_every_list_find_their_objects(here: System, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(here)
    fill_with_code(here)
    with monkeypatch.context() as terminal:
        widen(terminal, 100)
        shown = {what: column(invoke(what, "list").stdout) for what in ("tasks", "runs")}
    for what, some in shown.items():
        assert len(set(some)) == len(some) > 5
        for one in some:
            assert invoke(what, "show", one).exit_code == 0


def column(table: str, number: int = 0) -> list[str]:
    return [line.split()[number] for line in table.splitlines()[1:]]


def test_abbreviations_are_looked_up_in_the_index(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL timezone = 'UTC'"))
        many = "SELECT gen_random_uuid(), 'n', 0, 0 FROM generate_series(1, 20000)"
        connection.execute(text(f"INSERT INTO orchestrator.runs (id, name, total, open) {many}"))
        connection.execute(text("ANALYZE orchestrator.runs"))
        for plan in explained(
            connection,
            lambda spy: lookup.find_by_partial_id(spy, "run", "0199b2f4", 11),
            lambda spy: lookup.distinguishing_length(spy, "run", [uuid4() for _ in range(50)]),
        ):
            assert "Index" in plan
            assert "Seq Scan" not in plan
        connection.rollback()


# -- order


def test_tasks_kept_by_a_rerun_are_listed_with_their_run(here: System) -> None:
    fill(here)
    kept = next(run["id"] for run in read("runs", "list", "--workflow", "steps", "--status", "success")["runs"])
    new = invoke("runs", "rerun", kept, "--from", "last").stdout.strip()
    here.pass_seconds()
    last = here.job.enqueue(3).id
    assert read("tasks", "list")["tasks"][0]["id"] == last
    beside = [task["id"] for task in read("tasks", "list", "--run", new)["tasks"]]
    assert len(beside) > 4
    assert {one[:13] for one in beside} == {new[:13]}
    assert all(UUID(run["id"]).version in (7, 8) for run in read("runs", "list")["runs"])


def test_the_tasks_of_a_run_are_listed_by_position(here: System) -> None:
    run = here.app.start_many(here.job, list(range(25)))
    here.app.enqueue_many(here.job.options(queue="batch"), [(number,) for number in range(25)])
    seen: list[int] = []
    before: list[str] = []
    while True:
        page = read("tasks", "list", "--run", run.id, "--limit", "10", *before)
        seen += [task["position"] for task in page["tasks"]]
        before = ["--after", str(page["next"])]
        if page["next"] is None:
            break
    assert seen == list(range(25))
    assert "More of them: add --after" in invoke("tasks", "list", "--run", run.id, "--limit", "3").output
    for wrong in (("--run", run.id, "--before", page["tasks"][0]["id"]), ("--after", page["tasks"][0]["id"])):
        assert invoke("tasks", "list", *wrong).exit_code == 2
    batch = read("tasks", "list", "--queue", "batch")["tasks"]
    order = here.sql("SELECT id FROM orchestrator.tasks WHERE queue = 'batch' ORDER BY seq DESC")
    assert [task["id"] for task in batch] == [str(row["id"]) for row in order]


# -- width


def test_an_empty_list_suggests_the_first_command(here: System) -> None:
    assert "There is no task yet. Enqueue one: orchestrator enqueue NAME" in invoke("tasks", "list").stdout
    assert invoke("tasks", "list", "--queue", "q").stdout == "No task matches.\n"
    assert "There is no run yet. Start one: orchestrator runs start WORKFLOW" in invoke("runs", "list").stdout
    assert invoke("runs", "list", "--stuck").stdout == "No run matches.\n"


@pytest.mark.long_for("http")
def test_table_rows_fit_the_width_of_the_terminal(here: System, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(here)
    fill_with_code(here)
    here.app.start_many(here.job, [1], name="サムネイルを全部つくるための長い長い名前" * 3)
    here.sql("UPDATE orchestrator.runs SET tags = ARRAY['customer:42', 'a-rather-long-tag-that-nobody-reads']")
    here.sql("UPDATE orchestrator.tasks SET queue = 'the-queue-of-the-customer-number-4711'")
    for name in ("sometimes", "on-a-tuesday-in-the-summer-of-next-year"):
        assert invoke("schedules", "set", "steps", "--name", name, "--cron", "15 3,9,12 * 1-6 2").exit_code == 0
    assert invoke("schedules", "backfill", "steps/default", "--from", "2026-01-01", "--to", "2026-02-01").exit_code == 0
    here.sql("UPDATE orchestrator.workers SET seen_at = now() + interval '1 hour'")  # live throughout the test
    counts = {words: rows_of(words) for words in LISTS if words not in (("status",), ("top",), ("db", "check"))}
    for width in (60, 61, 80, 100, 140, 400):
        widen(monkeypatch, width)
        for words, count in counts.items():
            lines = invoke(*words).stdout.splitlines()
            assert len(lines) == (count + 1 if count else 1), (words, lines)
            if count:
                assert max(map(cell_len, lines)) <= width, (words, lines)
                assert not re.search(r"  [0-9,]+…( |$)", "\n".join(lines)), "no number is cut"


def test_each_step_of_a_run_is_shown_on_one_line(here: System, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(here)
    here.sql(
        """UPDATE orchestrator.ended_tasks SET error = '{"kind": "E", "message": "a long 説明文 of what went wrong"}'"""
    )
    runs = [run["id"] for run in read("runs", "list", "--workflow", "steps")["runs"]]
    widen(monkeypatch, 60)
    for run in runs:
        lines = invoke("runs", "show", run).stdout.splitlines()
        assert max(map(cell_len, lines)) <= 60
        drawn = lines[lines.index("") + 1 :][:5]
        assert [name for name in ("first", "each", "child", "never", "last") if name not in " ".join(drawn)] == [], (
            lines
        )


def rows_of(words: tuple[str, ...]) -> int:
    return sum(len(value) for value in read(*words).values() if isinstance(value, list))


def test_output_outside_a_terminal_is_not_cut(here: System) -> None:
    name = "x" * 12_000
    here.app.start_many(here.job, [1])
    here.sql("UPDATE orchestrator.runs SET name = :name", name=name)
    listed = invoke("runs", "list").stdout
    assert name in listed
    assert len(listed.splitlines()) == 2


@pytest.mark.long_for("http")
def test_no_line_ends_in_blanks(here: System, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(here)
    fill_with_code(here)
    long = here.job.enqueue("x" * 1_000).id
    run = read("runs", "list")["runs"][0]["id"]
    commands = [*LISTS, ("tasks", "show", long), ("runs", "show", run)]
    for width in (None, 60, 400):
        if width:
            widen(monkeypatch, width)
        for words in commands:
            lines = invoke(*words).stdout.splitlines()
            assert [line for line in lines if line.endswith(" ")] == [], words
    monkeypatch.undo()


def test_a_long_line_does_not_pad_the_lines_below(here: System) -> None:
    run = here.app.start_many(here.job, [1]).id
    here.sql("UPDATE orchestrator.runs SET name = :name", name="x" * 100_000)
    shown = invoke("runs", "show", run).stdout
    assert "x" * 100_000 in shown
    assert len(shown) < 101_000


# -- counts


def test_status_counts_all_ended_tasks(here: System) -> None:
    assert "no ended tasks" in invoke("status").stdout
    here.sql(_TASKS, ids=[str(uuid4()) for _ in range(112)])
    shown = invoke("status").stdout
    assert "112 success" in shown
    assert ", 112 ended tasks" in shown.replace("\n", " ")
    here.sql(_TASKS, ids=[str(uuid4()) for _ in range(10_001)])
    shown = invoke("status").stdout
    assert "10,113 success" in shown
    assert "about 10,113 ended tasks" in shown.replace("\n", " ")


def test_a_backfill_counts_running_waiting_and_stuck_runs(here: System) -> None:
    fill(here)
    assert invoke("schedules", "backfill", "steps", "--from", "2026-01-01", "--to", "2026-01-21").exit_code == 0
    here.pass_seconds()
    view = read("schedules", "backfills")["backfills"][0]
    assert (view["done"], view["running"], view["waiting"], view["total"], view["open"]) == (0, 1, 19, 20, 20)
    here.sql("UPDATE orchestrator.runs SET stuck = '{\"kind\": \"K\"}' WHERE status = 'running'")
    assert read("schedules", "backfills")["backfills"][0]["stuck"] == 1
    assert "1 stuck" in invoke("schedules", "backfills").stdout


def test_a_backfill_is_previewed_and_counts_its_runs(here: System) -> None:
    fill(here)
    words = ("schedules", "backfill", "steps", "--from", "2026-01-01", "--to")
    preview = invoke(*words, "2026-01-04", "--dry-run").stdout.splitlines()
    assert preview[0] == "Thu 2026-01-01 03:00:00 UTC"
    assert preview[3] == "3 fires: 3 would get a run, 1 at once."
    assert read("schedules", "backfills")["backfills"] == [], "nothing was asked for"
    assert invoke(*words, "2026-01-04").exit_code == 0
    here.pass_seconds()
    more = invoke(*words, "2026-01-06", "--dry-run").stdout
    assert more.count("(already has a run)") == 3
    assert "5 fires: 2 would get a run, 1 at once, 3 already have one.\n" in more
    assert "5 fires: 5 would get a run, 1 at once.\n" in invoke(*words, "2026-01-06", "--dry-run", "--again").stdout
    assert "… and 39 more, up to:" in invoke(*words, "2026-04-01", "--dry-run").stdout
    assert invoke(*words, "2026-01-06").exit_code == 0
    here.pass_seconds()
    view = read("schedules", "backfills")["backfills"][0]
    assert (view["total"], view["started"], view["had_run"], view["open"]) == (5, 2, 3, 2)


def test_status_says_that_short_retention_limits_the_last_hour(here: System) -> None:
    assert "last hour    none\n" in invoke("status").stdout
    here.app.queue("mail").retain(success=120, failed=0)
    assert "last hour    none (some are kept for 2m only, and not counted after that)\n" in invoke("status").stdout


def test_status_names_a_payload_store_that_is_full(
    here: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_PAYLOAD_STORE", str(tmp_path))
    assert "payload store" not in invoke("status").stdout
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    assert f"! The payload store {tmp_path} has 5.0 MB left." in invoke("status").stdout
    may_answer = threading.Event()
    monkeypatch.setattr(stores, "_FREE_SPACE_TIMEOUT", 0.05)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: may_answer.wait(60) and SimpleNamespace(free=0))
    assert "payload store" not in invoke("status").stdout, "one that hangs holds up nobody"
    may_answer.set()
