"""Schedules on the command line, against real Postgres and Redis."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, text

from orchestrator.cli import main
from tests.emptying import empty

NIGHTLY = """
name: nightly
params: {day: {type: date, default: today}}
schedule: {cron: 30 2 * * *, timezone: Europe/Berlin, overlap: queue, catch_up: all(3)}
tasks: {only: {task: shop.job}}
"""
CODE = """
from datetime import timedelta
from orchestrator import Orchestrator

app = Orchestrator()

@app.schedule(every=timedelta(minutes=30), jitter="1m")
@app.task(name="shop.clean")
def clean(): ...
"""

Run = Callable[..., Result]


@pytest.fixture
def run(engine: Engine, in_empty_folder: Path) -> Run:
    """Run a command, on a database that holds one workflow with a schedule."""
    with engine.begin() as connection:
        empty(connection)
    Path("nightly.yaml").write_text(NIGHTLY)

    def run(*words: object, exit_code: int = 0, **options: Any) -> Result:
        result = CliRunner().invoke(main, [str(word) for word in words], **options)
        assert result.exit_code == exit_code, result.output
        return result

    run("workflows", "apply", "nightly.yaml")
    return run


def document(result: Result) -> Any:
    return json.loads(result.stdout)


def test_schedules_are_listed_and_shown(run: Run) -> None:
    listed = run("schedules", "list").output
    assert "nightly" in listed
    assert "30 2 * * *" in listed
    assert re.search("(02:30|03:00):00 CE", listed), "in the night in which there is no half past two, at three"
    (found,) = document(run("schedules", "list", "--json"))["schedules"]
    assert (found["key"], found["paused"], found["timezone"]) == ("nightly/default", False, "Europe/Berlin")
    assert found["definition"]["catch_up"] == "all(3)"
    assert document(run("schedules", "show", "nightly", "--json")) == found
    shown = run("schedules", "show", "nightly").output
    assert "the workflow's definition" in shown
    assert "queue" in shown


def test_next_previews_fires_with_and_without_a_database(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fires = document(run("schedules", "next", "nightly", "-n", "3", "--json"))["fires"]
    assert len(fires) == 3
    assert all("T02:30:00+0" in fire or "T03:00:00+02:00" in fire for fire in fires)
    monkeypatch.delenv("ORCHESTRATOR_DATABASE_URL")
    assert len(run("schedules", "next", "--every", "1h").output.splitlines()) == 5
    refused = run("schedules", "next", "--cron", "0 25 * * *", exit_code=1).output
    assert "schedule.cron: hour '25' of '0 25 * * *': expected 0 to 23" in refused
    assert "Give either" in run("schedules", "next", exit_code=2).output
    assert "will not fire again" in run("schedules", "next", "--at", "2020-01-01T00:00").output
    bounds = ("--start", "2090-01-01", "--end", "2090-01-03")
    bounded = run("schedules", "next", "--cron", "0 0 * * *", *bounds).output.splitlines()
    assert [line[4:14] for line in bounded] == ["2090-01-01", "2090-01-02"]


def test_set_replaces_a_schedule_and_rejects_invalid_options(run: Run) -> None:
    said = run("schedules", "set", "nightly", "--name", "often", "--every", "10m", "--param", "day=2026-01-01").output
    assert said.startswith("nightly/often: next fire ")
    run("schedules", "set", "nightly", "--name", "often", "--cron", "0 * * * *", "--overlap", "allow")
    found = document(run("schedules", "show", "nightly/often", "--json"))
    assert found["definition"]["cron"] == "0 * * * *"
    assert "Specify one: nightly/default, nightly/often" in run("schedules", "pause", "nightly", exit_code=1).output
    for words, message in {
        ("nigthly", "--every", "1h"): "There is no workflow 'nigthly', and no published flow. Did you mean 'nightly'?",
        ("nightly", "--every", "1h", "--cron", "* * * * *"): "exactly one of cron, every and at",
        ("nightly", "--every", "1h", "--param", "dya=1"): "schedule.params.dya: unknown parameter 'dya'",
        ("nightly", "--every", "1h", "--timezone", "Europe/Berlni"): "Did you mean 'Europe/Berlin'?",
        ("nightly", "--at", "2020-01-01T00:00"): "would never fire: that time has passed",
        ("nightly", "--every", "1h", "--catch-up", "all(1001)"): "a limit up to 1,000",
        ("nightly", "--every", "0.5s"): "at least 1 second",
        ("nightly", "--every", "1h", "--param", 'day="\\u0000"'): "NUL character",
    }.items():
        assert message in run("schedules", "set", *words, exit_code=1).output


def test_a_schedule_is_paused_resumed_and_deleted(run: Run) -> None:
    run("schedules", "pause", "nightly")
    assert "is paused already" in run("schedules", "pause", "nightly", exit_code=1).output
    run("workflows", "apply", "nightly.yaml")
    assert "paused" in run("schedules", "list").output
    assert "1 paused" in run("status").output
    assert "next fire" in run("schedules", "resume", "nightly").output
    assert "is not paused" in run("schedules", "resume", "nightly", exit_code=1).output
    assert "Aborted" in run("schedules", "delete", "nightly", exit_code=1, input="n\n").output
    assert "30 2 * * *" in run("workflows", "list").output
    run("schedules", "delete", "nightly", "--yes")
    assert "30 2 * * *" not in run("workflows", "list").output, "it is no longer when it starts"
    assert "There is no schedule 'nightly'" in run("schedules", "show", "nightly", exit_code=1).output


def test_trigger_starts_a_run_of_the_schedule(run: Run, engine: Engine) -> None:
    started = run("schedules", "trigger", "nightly").output.strip()
    with engine.connect() as connection:
        (found,) = connection.execute(text("SELECT id::text, schedule, lane_limit FROM orchestrator.runs"))
    assert tuple(found) == (started, "nightly/default", 1)
    shown = run("runs", "show", started).output
    assert "nightly/default" in shown
    assert "fire time" in shown


def test_backfills_are_created_listed_and_cancelled(run: Run) -> None:
    """Tests with a leader cover how backfills run."""
    words = ("schedules", "backfill", "nightly", "--from", "2026-01-01", "--to", "2026-02-01")
    number = run(*words, "--concurrency", "3").output.strip()
    (found,) = document(run("schedules", "backfills", "--json"))["backfills"]
    assert (str(found["id"]), found["total"], found["done"], found["concurrency"]) == (number, 31, 0, 3)
    assert found["start_at"] == "2025-12-31T23:00:00Z", "midnight in Berlin"
    assert "nightly/default" in run("schedules", "backfills").output
    run("schedules", "cancel-backfill", number)
    assert "has ended" in run("schedules", "cancel-backfill", number, exit_code=1).output
    assert "There is no backfill 999" in run("schedules", "cancel-backfill", "999", exit_code=1).output
    for start, end, message in [
        ("2026-02-01", "2026-01-01", "expected start < end <= now"),
        ("2026-01-01", "9000-01-01", "expected start < end <= now"),
        ("soon", "2026-01-01", "start: expected a time such as"),
        ("0001-01-01T00:00:00+14:00", "2026-01-01", "start: expected a time such as"),
        ("2026-01-01T03:00", "2026-01-01T04:00", "has no fire between"),
    ]:
        refused = run("schedules", "backfill", "nightly", "--from", start, "--to", end, exit_code=1)
        assert message in refused.output


def test_schedules_declared_in_code_are_applied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("shop_of_schedules.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    said = run("schedules", "apply", "--app", "shop_of_schedules:app").output
    assert said.startswith("shop.clean: next fire ")
    applied = document(run("schedules", "apply", "--app", "shop_of_schedules:app", "--json"))
    assert [one["key"] for one in applied["applied"]] == ["shop.clean/default"]
    assert applied["forgotten"] == []
    found = document(run("schedules", "show", "shop.clean", "--json"))
    assert found["definition"]["every"] == 1800.0
    run("schedules", "pause", "shop.clean")
    run("schedules", "apply", "--app", "shop_of_schedules:app")
    assert document(run("schedules", "show", "shop.clean", "--json"))["paused"]
    Path("clash.yaml").write_text("name: shop.clean\ntasks: {a: {task: t}}")
    run("workflows", "apply", "clash.yaml")
    refused = run("schedules", "apply", "--app", "shop_of_schedules:app", exit_code=1).output
    assert "cannot be named 'shop.clean', because a workflow has that name" in refused


def test_schedules_removed_from_the_code_are_reported_and_can_be_pruned(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))

    def deploy(*names: str, app: str = "forgetful_shop", **options: bool) -> str:
        tasks = [f"@app.schedule(every='1h')\n@app.task(name='{name}')\ndef {name}() -> None: ...\n" for name in names]
        Path(f"{app}.py").write_text("from orchestrator import Orchestrator\napp = Orchestrator()\n" + "".join(tasks))
        importlib.invalidate_caches()
        sys.modules.pop(app, None)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return run("schedules", "apply", "--app", f"{app}:app", *(f"--{name}" for name in options)).output

    def forgotten() -> set[str]:
        return {one["key"] for one in document(run("schedules", "list", "--json"))["schedules"] if one["forgotten_at"]}

    deploy("stays", "goes")
    deploy("others", app="another_shop")
    assert "in the code" not in run("schedules", "list").output
    said = deploy("stays")
    assert "goes/default: no longer in the code of forgetful_shop:app; it still fires" in said
    assert forgotten() == {"goes/default"}, "of this application, and of no other"
    assert "no longer in the code of forg" in run("schedules", "list").output
    assert "no longer has it" in run("schedules", "show", "goes").output
    troubles = document(run("status", "--json"))["trouble"]
    assert [found["kind"] for found in troubles if "goes/default" in found["message"]] == ["forgotten schedule"]
    deploy("stays", "goes")
    assert forgotten() == set(), "it is back"
    assert "deleted" in deploy("stays", prune=True)
    keys = {one["key"] for one in document(run("schedules", "list", "--json"))["schedules"]}
    assert keys >= {"stays/default", "others/default"}
    assert "goes/default" not in keys


def test_deleting_a_workflow_deletes_its_schedules(run: Run) -> None:
    assert "and its schedules" in run("workflows", "delete", "nightly", "--yes").output
    assert document(run("schedules", "list", "--json"))["schedules"] == []
