"""Workflows and their runs on the command line, against real Postgres and Redis."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Connection, Engine

from orchestrator.cli import main
from orchestrator.domain.code import history
from orchestrator.domain.code.commands import command_id
from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.domain.dag.graph import Graph
from orchestrator.domain.dag.plan import Plan
from orchestrator.domain.dag.state import StepState
from orchestrator.domain.ids import derived_id, time_ordered_id, to_text
from orchestrator.domain.states import RunState, ShownRunState, TaskState
from orchestrator.domain.tasks.task import NewTask
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.values.payload import digest_call, encode_call
from orchestrator.store import insights
from orchestrator.store.code import runs as code_runs
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.insights import RunFilter
from orchestrator.store.runs import cancels, creation
from orchestrator.store.runs import transitions as runs
from orchestrator.store.tasks import claims, enqueue, transitions
from orchestrator.store.tasks.transitions import AttemptEnd, AttemptStart, Success
from tests.acceptance.stack import Stack
from tests.integration.planning import explained, measured, rows_read, scans

NOBODY = "00000000-0000-7000-8000-000000000000"
ERROR = json.dumps({"kind": "ValueError", "message": "oh no", "traceback": "Traceback …"})
NIGHTLY = """
name: nightly
description: What is done at night.
params: {day: {type: date, default: today}, size: {type: integer, default: 2}}
tags: [etl]
tasks:
  discover: {task: shop.discover, input: {day: "${params.day}"}}
  process: {task: shop.process, depends_on: [discover], foreach: discover.files}
  report: {task: shop.report, depends_on: [process]}
"""


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.begin() as connection:
        yield connection


@pytest.fixture
def run(in_empty_folder: Path) -> Callable[..., Result]:
    """Run a command in a folder that holds a workflow."""
    write(NIGHTLY)
    return lambda *words, **options: CliRunner().invoke(main, [str(word) for word in words], **options)


@pytest.fixture
def read(run: Callable[..., Result]) -> Callable[..., Any]:
    """Run a command with --json and return its document."""

    def document(*words: object, exit_code: int = 0) -> Any:
        result = run(*words, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return document


def write(text: str, name: str = "nightly.yaml") -> None:
    Path(name).write_text(text, encoding="utf-8")


# -- workflows


def test_files_are_validated_without_services(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHESTRATOR_DATABASE_URL")
    monkeypatch.delenv("ORCHESTRATOR_REDIS_URL")
    won = run("workflows", "validate", "nightly.yaml")
    assert (won.exit_code, won.output) == (0, "nightly.yaml: nightly, 3 tasks, valid\n")
    write(NIGHTLY.replace("[process]", "[proces]"), "bad.yaml")
    lost = run("workflows", "validate", "bad.yaml", "nightly.yaml")
    assert lost.exit_code == 1
    assert "bad.yaml:9: tasks.report.depends_on" in lost.stderr
    assert "Did you mean 'process'?" in lost.stderr
    assert lost.stdout == "nightly.yaml: nightly, 3 tasks, valid\n"
    document = json.loads(run("workflows", "validate", "bad.yaml", "nightly.yaml", "--json").stdout)
    assert [file["valid"] for file in document["files"]] == [False, True]
    assert "bad.yaml:9" in document["files"][0]["problems"][0]
    assert run("workflows", "validate", "gone.yaml").exit_code == 2


def test_steps_inherit_the_options_of_the_applications_tasks(run: Callable[..., Result]) -> None:
    write(NIGHTLY.replace("nightly", "limited"))
    code = "from orchestrator import Orchestrator\napp = Orchestrator()\n"
    write(f"{code}app.task(name='shop.process', concurrency=2)(lambda item: item)\n", "night_shop.py")
    write(f"{code}app.task(name='shop.report', unique_key='k')(lambda: None)\n", "unique_shop.py")
    app = ("--app", "night_shop:app", "--elsewhere", "shop.discover", "--elsewhere", "shop.report")
    assert run("workflows", "apply", "nightly.yaml").stdout == "limited: version 1 (new)\n"
    changed = run("workflows", "diff", "nightly.yaml", *app)
    assert (changed.exit_code, "+        concurrency: 2\n" in changed.stdout) == (1, True)
    assert run("workflows", "apply", "nightly.yaml", *app).output == "limited: version 2 (new)\n"
    assert run("workflows", "apply", "nightly.yaml", *app).output == "limited: version 2 (unchanged)\n"
    assert run("workflows", "diff", "nightly.yaml", *app).exit_code == 0
    assert "registered" not in run("workflows", "show", "limited").stdout, "it is a file that can be applied"
    for words in ("apply", "validate"):
        refused = run("workflows", words, "nightly.yaml", "--app", "unique_shop:app")
        assert refused.exit_code == 1
        assert "nightly.yaml:9: tasks.report: Task 'shop.report' has the option unique_key" in refused.stderr
        assert "nightly.yaml:8: tasks.process.task: the application has no task 'shop.process'." in refused.stderr
    assert run("workflows", "validate", "nightly.yaml", *app).exit_code == 0


def test_all_problems_are_reported_at_once_and_none_twice(run: Callable[..., Result]) -> None:
    code = "from orchestrator import Orchestrator\napp = Orchestrator()\n"
    tasks = ("def fetch(day: str, size: int): ...", "def load(rows: list, table: str): ...")
    write(code + "".join(f"@app.task\n{task}\n" for task in tasks), "at_once.py")
    write(
        """
name: at once
defaults: {retries: -1}
tasks:
  one: {task: at_once.fetch, input: {day: "${parms.day}", siez: 3}}
  two: {task: at_once.fetsch, timeout: soon, depends_on: [on]}
  three: {task: at_once.load, priority: high, input: {table: t}}
  four: {task: at_once.load, input: {table: 7, rows: "${"}}
""",
        "wrong.yaml",
    )
    lost = run("workflows", "validate", "wrong.yaml", "--app", "at_once:app")
    said = [":".join(line.split(":")[1:3]).replace(" tasks.", "") for line in lost.stderr.splitlines()]
    assert said == [
        "2: name",
        "3: defaults.retries",
        "5:one.input.day",
        "5:one.input.siez",
        "6:two.timeout",
        "6:two.depends_on",
        "6:two.task",
        "7:three.priority",
        "7:three",
        "8:four.input.rows",
        "8:four.input.table",
    ], lost.stderr


def test_a_workflow_is_applied_listed_shown_compared_and_deleted(
    run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    write(NIGHTLY.replace("nightly", "story"))
    assert run("workflows", "diff", "nightly.yaml").stdout.startswith("--- /dev/null\n+++ nightly.yaml\n")
    applied = run("workflows", "apply", "nightly.yaml")
    assert applied.stdout == "story: version 1 (new)\n"
    assert applied.stderr.startswith("Note: no application is given, so steps have only the options in the file")
    assert run("workflows", "apply", "nightly.yaml").output == "story: version 1 (unchanged)\n"
    same = run("workflows", "diff", "nightly.yaml")
    assert (same.exit_code, same.output) == (0, "")

    write(NIGHTLY.replace("nightly", "story").replace("shop.report", "shop.summary"))
    changed = run("workflows", "diff", "nightly.yaml")
    assert changed.exit_code == 1
    assert "--- story version 1\n+++ nightly.yaml\n" in changed.stdout
    assert "-    task: shop.report\n+    task: shop.summary\n" in changed.stdout
    assert read("workflows", "diff", "nightly.yaml", exit_code=1)["different"]
    assert read("workflows", "apply", "nightly.yaml") == {"applied": [{"name": "story", "version": 2, "new": True}]}

    [listed] = [found for found in read("workflows", "list")["workflows"] if found["name"] == "story"]
    assert (listed["version"], listed["tasks"], listed["params"]) == (2, 3, ["day", "size"])
    assert "What is done at night." in run("workflows", "list").output
    shown = run("workflows", "show", "story", "--version", "1").stdout
    write(shown, "again.yaml")
    assert "task: shop.report" in shown
    assert run("workflows", "apply", "again.yaml").output == "story: version 1 (unchanged)\n"
    assert read("workflows", "show", "story")["definition"]["steps"][2]["task"] == "shop.summary"

    kept = run("workflows", "delete", "story", input="n\n")
    assert kept.exit_code == 1
    deleted = run("workflows", "delete", "story", "--yes")
    assert deleted.output == "Deleted workflow 'story' and its schedules. Its runs and their history are kept.\n"
    assert run("workflows", "show", "story").stderr.startswith("Error: There is no workflow 'story'. Apply it with")
    assert run("workflows", "show", "story", "--version", "2").exit_code == 0


def test_apply_stores_nothing_if_a_file_is_invalid(run: Callable[..., Result], read: Callable[..., Any]) -> None:
    write(NIGHTLY.replace("nightly", "innocent"), "innocent.yaml")
    write("name: bad\ntasks: {a: {tsk: x}}\n", "bad.yaml")
    refused = run("workflows", "apply", "innocent.yaml", "bad.yaml")
    assert refused.exit_code == 1
    assert "bad.yaml:2" in refused.stderr
    assert "innocent" not in [found["name"] for found in read("workflows", "list")["workflows"]]


def test_diff_exits_with_2_if_a_file_cannot_be_compared(run: Callable[..., Result]) -> None:
    write("name: [", "bad.yaml")
    assert run("workflows", "diff", "bad.yaml").exit_code == 2
    assert run("workflows", "diff", "gone.yaml").exit_code == 2


def test_unknown_names_and_versions_are_errors(run: Callable[..., Result]) -> None:
    run("workflows", "apply", "nightly.yaml")
    assert "Did you mean 'nightly'?" in run("workflows", "show", "nightli").stderr
    assert "has no version 9; the newest is " in run("workflows", "show", "nightly", "--version", "9").stderr
    assert run("workflows", "delete", "nobody", "--yes").exit_code == 1


def test_the_schema_is_printed(run: Callable[..., Result]) -> None:
    assert "$schema" in json.loads(run("workflows", "schema").stdout)


# -- starting


def test_a_run_is_started_with_parameters_tags_and_a_key(run: Callable[..., Result], read: Callable[..., Any]) -> None:
    run("workflows", "apply", "nightly.yaml")
    words = ("runs", "start", "nightly", "day=2024-01-31", "size=7", "--key", "once", "--tag", "a:1", "--tag", "b")
    started = run(*words)
    assert started.exit_code == 0, started.output
    assert run(*words).stdout == started.stdout
    shown = read("runs", "show", started.stdout.strip())
    assert (shown["workflow"], shown["params"]) == ("nightly", {"day": "2024-01-31", "size": 7})
    assert (shown["tags"], shown["key"]) == (["etl", "a:1", "b"], "once")
    assert [(step["name"], step["state"], step["total"]) for step in shown["steps"]] == [
        ("discover", "waiting", 1),
        ("process", "waiting", None),
        ("report", "waiting", 1),
    ]
    people = run("runs", "show", started.stdout.strip()).output
    for part in ('day="2024-01-31", size=7', "etl, a:1, b", "once", "○ discover"):
        assert part in people


def test_a_start_with_a_used_key_reports_the_existing_run(run: Callable[..., Result], read: Callable[..., Any]) -> None:
    run("workflows", "apply", "nightly.yaml")
    words = ("runs", "start", "nightly", "day=2024-01-31", "--key", "told-once")
    first, second = run(*words), run(*words)
    assert (first.stderr, second.stdout) == ("", first.stdout)
    assert second.stderr.startswith("A run with this id was started before; it is in state '")
    assert read(*words) == {"id": first.stdout.strip(), "new": False, "status": None}


@pytest.mark.parametrize(
    ("words", "message", "exit_code"),
    [
        (["nightli"], "There is no workflow 'nightli'. Did you mean 'nightly'?", 1),
        (["nightly", "size=large"], "parameter 'size': expected a whole number", 1),
        (["nightly", "sise=1"], "unknown parameter 'sise'. Did you mean 'size'?", 1),
        (["nightly", "large"], "Parameter 'large' has no name.", 2),
        (["nightly", "size=1", "size=2"], "Parameter 'size' is given twice.", 2),
        (["nightly", "--wait", "--watch"], "cannot be combined with --wait or --json", 2),
    ],
)
def test_invalid_starts_give_an_error_message(
    run: Callable[..., Result], words: list[str], message: str, exit_code: int
) -> None:
    run("workflows", "apply", "nightly.yaml")
    refused = run("runs", "start", *words)
    assert refused.exit_code == exit_code
    assert message in refused.stderr


# -- reading


class Night:
    """A run of a five-step workflow, brought by hand to its failure."""

    STEPS = (
        Step(name="discover", task="shop.discover"),
        Step(name="process", task="shop.process", depends_on=("discover",), parallel=3),
        Step(name="site", workflow="site", depends_on=("discover",)),
        Step(name="rare", task="shop.rare", depends_on=("discover",), when="false"),
        Step(name="report", task="shop.report", depends_on=("process", "site", "rare")),
    )

    def __init__(self, connection: Connection, name: str, tags: tuple[str, ...] = ()) -> None:
        self.connection = connection
        self.definition = Definition(name=name, steps=self.STEPS, tags=tags)
        self.version = workflows.apply(connection, self.definition).version
        self.id = new_id()
        self.plan = Plan(Graph(self.definition))
        creation.create(connection, [dags.new_run(self.definition, self.version, self.id, {"n": 1})])
        runs.begin(connection, self.now, 1_000)
        self.plan.begin()
        self.drain()

    @property
    def now(self) -> datetime:
        return datetime.now(UTC)

    @property
    def uuid(self) -> UUID:
        return UUID(bytes=self.id)

    def drain(self) -> None:
        while (place := self.plan.next_candidate()) is not None:
            step = self.STEPS[place]
            if step.when:
                self.plan.skip(place, f"when: {step.when}")
            elif isinstance(step.parallel, int):
                self.plan.open_fan(place, step.parallel)
                self.plan.create(place, step.parallel)
            else:
                self.plan.open_single(place)

    def task(self, place: int, position: int, ending: str) -> None:
        step = self.STEPS[place]
        queue = f"{self.definition.name}-{step.name}-{position}"
        new = NewTask(
            id=new_id(),
            name=step.task or "",
            queue=queue,
            payload=b"\xc0",
            run_id=self.id,
            position=position,
            step=step.name,
        )
        enqueue.create_tasks(self.connection, [new], self.now)
        if ending == "queued":
            return
        claims.claim(self.connection, {queue: 1}, self.now)
        transitions.start(self.connection, [AttemptStart(new.id, 1, 0.5, "w")], self.now)
        if ending == "success":
            transitions.succeed(self.connection, [Success(new.id, 1, b"\xc0", 1.25, "w")], self.now)
        if ending == "failed":
            failed = AttemptEnd(new.id, 1, "ValueError", ERROR, failures=1, worker="w", duration=0.5)
            transitions.end(self.connection, TaskState.FAILED, [failed], self.now)
        if ending in ("success", "failed"):
            self.plan.task_ended(place, StepState[ending.upper()])
            self.drain()

    def save(self) -> None:
        state = msgspec.msgpack.encode(self.plan.state())
        self.connection.exec_driver_sql(
            "UPDATE orchestrator.runs SET state = %(state)s WHERE id = %(id)s::uuid",
            {"state": state, "id": self.id.hex()},
        )

    def child(self) -> bytes:
        site = Definition(name="site", steps=(Step(name="build", task="shop.build"),))
        version = workflows.apply(self.connection, site).version
        new = dags.new_run(site, version, new_id(), {})
        creation.create(self.connection, [new._replace(parent_run=self.id, parent_step="site", parent_position=0)])
        runs.begin(self.connection, self.now, 1_000)
        return new.id


def test_the_steps_of_a_run_are_shown_with_their_states(
    engine: Engine, run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    with engine.begin() as connection:
        night = Night(connection, "steps")
        night.task(0, 0, "success")
        child = night.child()
        for position, ending in enumerate(("success", "failed", "running")):
            night.task(1, position, ending)
        night.save()
    document = read("runs", "show", night.uuid)
    steps = {step["name"]: step for step in document["steps"]}
    assert [(step["name"], step["kind"], step["state"]) for step in document["steps"]] == [
        ("discover", "task", "success"),
        ("process", "task", "open"),
        ("site", "workflow", "open"),
        ("rare", "task", "skipped"),
        ("report", "task", "skipped"),
    ]
    process = steps["process"]
    assert (process["total"], process["ended"], process["failed"], process["fan_out"]) == (3, 2, 1, True)
    assert (process["error"]["kind"], process["error"]["message"]) == ("ValueError", "oh no")
    assert process["started_at"] is not None
    assert process["ended_at"] is None
    assert steps["discover"]["ended_at"] > steps["discover"]["started_at"]
    assert steps["site"]["started_at"] is not None
    assert steps["rare"]["reason"] == "when: false"
    assert steps["report"]["depends_on"] == ["process", "site", "rare"]
    assert [(found["id"], found["parent_step"]) for found in document["children"]] == [(str(UUID(bytes=child)), "site")]

    people = run("runs", "show", night.uuid).output
    for part in ("✓ discover", "├─ ● process", "2/3", "1 failed, first: ValueError: oh no", "⤼ rare", "workflow site"):
        assert part in people
    assert str(UUID(bytes=child)) in people.partition("Child runs:")[2]


def test_a_run_that_was_cancelled_before_it_began_has_cancelled_steps(connection: Connection) -> None:
    night = Night(connection, "early")
    cancels.mark_cancelling(connection, [night.id])
    runs.end(connection, [(night.id, RunState.CANCELLED, None)], night.now)
    assert {step.state for step in insights.list_steps(connection, night.uuid)} == {"cancelled"}
    assert insights.list_steps(connection, UUID(NOBODY)) == []


def test_runs_are_found_by_workflow_state_tag_and_time(engine: Engine, read: Callable[..., Any]) -> None:
    with engine.begin() as connection:
        old, new = (Night(connection, "sought", tags) for tags in (("x", "y"), ("x",)))
        other = Night(connection, "other", ("x",))
        runs.end(connection, [(new.id, RunState.FAILED, None)], new.now)
        connection.exec_driver_sql(
            "UPDATE orchestrator.runs SET created_at = now() - interval '3 hours' WHERE id = %(id)s::uuid",
            {"id": old.id.hex()},
        )

    def found(*options: str) -> set[str]:
        return {run["id"] for run in read("runs", "list", *options)["runs"]}

    assert found("--workflow", "sought") == {str(old.uuid), str(new.uuid)}
    assert found("--workflow", "sought", "--status", "failed") == {str(new.uuid)}
    assert found("--tag", "x") == {str(old.uuid), str(new.uuid), str(other.uuid)}
    assert found("--tag", "x", "--tag", "y") == {str(old.uuid)}
    assert found("--tag", "x", "--since", "2h") == {str(new.uuid), str(other.uuid)}
    assert found("--workflow", "sought", "--until", "2h") == {str(old.uuid)}
    page = read("runs", "list", "--workflow", "sought", "--limit", "1")
    assert found("--workflow", "sought", "--before", page["next"]) == {str(old.uuid)}


def test_an_invalid_time_is_a_usage_error(run: Callable[..., Result]) -> None:
    refused = run("runs", "list", "--since", "yesterday")
    assert refused.exit_code == 2
    assert "'yesterday' is neither a duration such as 2h nor a time" in refused.stderr


_MANY_RUNS = """
INSERT INTO orchestrator.runs (id, name, total, open, workflow, version, tags)
SELECT gen_random_uuid(), 'n', 0, 0, 'w' || n %% 500, 1, ARRAY['t' || n %% 500] FROM generate_series(1, 20000) AS n
"""


def test_searches_use_their_indexes(connection: Connection) -> None:
    connection.exec_driver_sql(_MANY_RUNS)
    connection.exec_driver_sql("ANALYZE orchestrator.runs")
    plans = explained(
        connection,
        lambda spy: insights.list_runs(spy, RunFilter(workflow="w7")),
        lambda spy: insights.list_runs(spy, RunFilter(tags=("t7",))),
        lambda spy: insights.list_runs(spy, RunFilter(within="w7")),
    )
    assert "runs_of_workflow" in plans[0]
    assert "runs_by_tag" in plans[1]
    assert "Seq Scan" not in plans[2]
    connection.rollback()


_OLD_AND_NEW = """
INSERT INTO orchestrator.runs (id, name, total, open, workflow, version)
SELECT lpad(to_hex(n), 32, '0')::uuid, 'n', 0, 0,
       %(mark)s || CASE WHEN n <= 2000 THEN 'old' || n %% 2 ELSE 'busy' END, 1
  FROM generate_series(1, 20000) AS n
"""


def test_the_last_runs_of_a_workflow_are_found_behind_newer_runs(connection: Connection) -> None:
    mark = f"{uuid4().hex} "  # names that are not in the index, not even in deleted rows
    even, odd, busy = (f"{mark}{name}" for name in ("old0", "old1", "busy"))
    connection.exec_driver_sql("DELETE FROM orchestrator.runs")
    connection.exec_driver_sql(_OLD_AND_NEW, {"mark": mark})
    connection.exec_driver_sql("ANALYZE orchestrator.runs")
    found = insights.last_runs(connection, [even, "none", busy, odd, even], 3)
    numbers = {name: [run.id.int for run in runs] for name, runs in found.items()}
    assert numbers == {
        even: [1996, 1998, 2000],
        "none": [],
        busy: [19998, 19999, 20000],
        odd: [1995, 1997, 1999],
    }
    assert {run.workflow for run in found[odd]} == {odd}
    assert insights.last_runs(connection, [], 3) == {}
    for look in (
        lambda spy: insights.last_runs(spy, [even, busy, odd], 3),
        lambda spy: insights.page_of_runs(spy, RunFilter(workflow=even), limit=9),
    ):
        (plan,) = measured(connection, look)
        assert sum(map(rows_read, scans(plan, "runs"))) <= 9
    deep = RunFilter(workflow=busy)
    page = insights.page_of_runs(connection, deep, limit=9, before=UUID(int=2010))
    assert [run.id.int for run in page.runs] == [*range(2009, 2000, -1)]
    assert insights.page_of_runs(connection, deep, limit=9, before=page.next) == ([], None)
    (plan,) = measured(connection, lambda spy: insights.page_of_runs(spy, deep, limit=9, before=UUID(int=2010)))
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 60, "it begins where the page does"
    page = insights.page_of_runs(connection, RunFilter(workflow=odd, statuses=(ShownRunState.PENDING,)), limit=2)
    assert [run.id.int for run in page.runs] == [1999, 1997], "of its own runs, so many are looked at"
    connection.rollback()


def test_sorted_run_lists_use_an_index(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    connection.exec_driver_sql("DELETE FROM orchestrator.runs")
    connection.exec_driver_sql(_OLD_AND_NEW, {"mark": ""})
    connection.exec_driver_sql(
        "UPDATE orchestrator.runs SET ended_at = created_at + ('x' || right(id::text, 8))::bit(32)::int %% 977 *"
        " interval '1 s', status = CASE WHEN id::text LIKE '%%7' THEN 'failed' ELSE 'success' END"
        " WHERE id::text NOT LIKE '%%00'",
        (),
    )
    connection.exec_driver_sql("ANALYZE orchestrator.runs")
    everything = connection.exec_driver_sql("SELECT id FROM orchestrator.runs").scalars()
    states = {run.id: run for run in insights.find_runs(connection, [id.bytes for id in everything])}
    for order, index, key in (("ended", "runs_by_end", "ended_at"), ("workflow", "runs_of_workflow", "workflow")):
        expected = connection.exec_driver_sql(
            f"SELECT id FROM orchestrator.runs WHERE {key} IS NOT NULL ORDER BY {key}, id"
        ).scalars()
        ids = [*expected]
        failed = RunFilter(statuses=(ShownRunState.FAILED,), workflow="old1" if order == "ended" else None)
        wanted = [id for id in ids if states[id].status == "failed" and failed.workflow in (None, states[id].workflow)]
        assert len(wanted) > 100
        _check_order(connection, monkeypatch, order, index, ids, failed, wanted)
        _check_order(connection, monkeypatch, f"-{order}", index, ids[::-1], failed, wanted[::-1])
    connection.rollback()


def _check_order(
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    sort: Any,
    index: str,
    ids: list[UUID],
    failed: RunFilter,
    wanted: list[UUID],
) -> None:
    middle = ids[9_000]

    def look(connection: Any) -> Any:
        return insights.page_of_runs(connection, RunFilter(), limit=9, before=middle, sort=sort)

    assert [run.id for run in look(connection).runs] == ids[9_001:9_010], sort
    (plan,) = measured(connection, look)
    found = scans(plan, "runs")
    assert index in {scan.get("Index Name") for scan in found}, (sort, found)
    assert sum(map(rows_read, found)) <= 100, f"{sort}: it begins where the page does"
    with monkeypatch.context() as patched:
        patched.setattr(insights.run_lists, "MAX_SCANNED", 3_000)
        seen: list[UUID] = []
        page = insights.page_of_runs(connection, failed, limit=200, sort=sort)
        while page.next:
            seen += [run.id for run in page.runs]
            page = insights.page_of_runs(connection, failed, limit=200, before=page.next, sort=sort)
        seen += [run.id for run in page.runs]
    assert seen == wanted, f"{sort}: page after page, all that match"


_MANY_TASKS = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, run_id,
                                      position, payload, error, created_at, started_at, ended_at, step)
SELECT gen_random_uuid(), n, 'n', 'q', 0, CASE WHEN n %% 2 = 0 THEN 'failed' ELSE 'success' END, 1, 0, 0,
       %(run)s::uuid, n, '', %(error)s::jsonb, now(), now(), now(), 'process'
  FROM generate_series(1, 10000) AS n
"""


_ROWS_READ = """
SELECT pg_stat_get_xact_tuples_returned(found) + pg_stat_get_xact_tuples_fetched(found)
  FROM CAST('orchestrator.ended_tasks' AS regclass) AS found
"""


def test_the_steps_of_ten_thousand_tasks_are_read_quickly(connection: Connection) -> None:
    """Rows and CPU time are counted: a busy machine takes any time for it."""
    night = Night(connection, "large")
    connection.exec_driver_sql(_MANY_TASKS, {"run": night.id.hex(), "error": ERROR})
    before, began = connection.exec_driver_sql(_ROWS_READ).scalar_one(), time.thread_time()
    steps = {step.name: step for step in insights.list_steps(connection, night.uuid)}
    assert time.thread_time() - began < 1
    assert connection.exec_driver_sql(_ROWS_READ).scalar_one() - before < 5 * 10_000
    error = steps["process"].error
    assert error is not None
    assert error.message == "oh no"
    connection.rollback()


# -- watching


def test_watching_an_ended_run_prints_its_steps_at_once(
    engine: Engine, run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    with engine.begin() as connection:
        night = Night(connection, "ended")
        night.task(0, 0, "success")
        for position in range(3):
            night.task(1, position, "failed")
        night.save()
        runs.count(connection, {night.id: {"total": 5, "success": 1, "failed": 3, "skipped": 1}})
        runs.end(connection, [(night.id, RunState.FAILED, None)], night.now)
    watched = run("runs", "watch", night.uuid)
    assert watched.exit_code == 1
    lines = watched.output.splitlines()
    assert lines[0].startswith("discover: success in ")
    assert lines[1].startswith("process: failed 3/3 in ")
    assert lines[1].endswith("(3 failed, first: ValueError: oh no)")
    assert "rare: skipped (when: false)" in lines
    assert lines[-1] == "ended 5/5 failed, 3 failed, 1 skipped"
    document = read("runs", "watch", night.uuid, exit_code=1)
    assert [step["state"] for step in document["steps"]][:2] == ["success", "failed"]


WATCHED = """
name: watched
params: {a: {type: integer}}
tasks:
  first: {task: project.add, input: {a: "${params.a}", b: 1}}
  each: {task: project.add, depends_on: [first], parallel: 5, input: {a: "${index}", b: 1}}
  never: {task: project.noop, depends_on: [first], when: "${first > 100}"}
"""


@pytest.fixture
def stack(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(database_url, redis_url, tmp_path)
    try:
        stack.scheduler()
        stack.worker()
        yield stack
    finally:
        stack.close()


def test_a_run_is_started_watched_and_run_again(
    stack: Stack, run: Callable[..., Result], read: Callable[..., Any]
) -> None:
    write(WATCHED, "watched.yaml")
    assert run("workflows", "apply", "watched.yaml").exit_code == 0
    watched = run("runs", "start", "watched", "a=1", "--watch")
    run_id = watched.stdout.splitlines()[0]
    shown = read("runs", "show", run_id)
    steps = {step["name"]: step for step in shown["steps"]}
    assert steps["first"]["state"] == "success", shown
    assert (steps["each"]["total"], steps["each"]["ended"]) == (5, 5)
    assert steps["never"]["state"] == "skipped"
    lines = watched.stdout.splitlines()
    assert any(line.startswith("first: success in ") for line in lines)
    assert any(line.startswith("each: ") and "5/5" in line for line in lines)
    assert (watched.exit_code, shown["status"]) == (0, "success"), shown

    again = run("runs", "rerun", run_id, "--from", "each")
    assert again.exit_code == 0, again.output
    assert run("runs", "watch", again.stdout.strip()).exit_code == 0
    again = run("runs", "rerun", run_id, "--wait")
    assert (again.exit_code, again.stderr) == (0, "success\n")
    assert read("runs", "show", again.stdout.strip())["status"] == "success"
    assert "Did you mean 'each'?" in run("runs", "rerun", run_id, "--from", "eech").stderr
    waited = run("runs", "start", "watched", "a=1", "--wait")
    assert (waited.exit_code, waited.stderr) == (0, "success\n")
    assert read("runs", "show", waited.stdout.strip())["status"] == "success"


def test_events_are_posted(engine: Engine, run: Callable[..., Result]) -> None:
    posted = run("events", "post", "file.arrived", '{"path": "a.csv"}')
    assert posted.exit_code == 0
    assert posted.output.startswith("Posted file.arrived. No workflow waits for it")
    with engine.connect() as connection:
        bodies = connection.exec_driver_sql("SELECT body FROM orchestrator.inbox WHERE body IS NOT NULL").scalars()
        assert {"name": "file.arrived", "payload": {"path": "a.csv"}} in bodies.all()
    refused = run("events", "post", "file.arrived", "{path")
    assert refused.exit_code == 2
    assert "The payload is not JSON" in refused.stderr


# -- replay-check

ORDERS = """
from orchestrator import Orchestrator, WorkflowContext

app = Orchestrator()

@app.task(name="ship")
def ship(item: str) -> str: ...

@app.workflow(name="order")
async def order(ctx: WorkflowContext, item: str) -> str:
    return await ship.schedule(item)

@app.workflow(name="refund")
async def refund(ctx: WorkflowContext, item: str) -> str:
    return await ship.schedule(item)
"""


@pytest.fixture
def open_orders(run: Callable[..., Result], connection: Connection) -> None:
    """Two runs of `order` and one of `refund`, each waiting for a task."""
    write(ORDERS, "orders.py")
    for number, workflow in enumerate(("order", "order", "refund"), 1):
        identifier = derived_id(bytes(16), workflow, number)
        task = NewTask(command_id(identifier, "task", 1), "ship", "default", b"")
        events: list[history.HistoryItem] = [
            history.RunStarted(workflow, 1, encode_call(workflow, ["tea"], {}, 1000)),
            history.ActivationApplied(1),
            history.TaskScheduled(1, task.id, "ship", digest_call(["tea"], {})),
        ]
        creation.create(connection, [code_runs.new_run(identifier, events, pinned=workflow == "refund")])
    connection.commit()


@pytest.mark.usefixtures("open_orders")
@pytest.mark.parametrize(
    ("old", "new", "exit_code", "said"),
    [
        ("", "", 0, "Replayed 3 open runs. The code matches."),
        (
            "order(ctx: WorkflowContext, item: str)",
            "order(ctx: WorkflowContext, item: int)",
            1,
            "Signature mismatch (event 1): the run was started with arguments that do not match: Workflow 'order'",
        ),
        ("item: str) -> str:\n    return", "item: str) -> str:\n    1 / 0\n    return", 1, "raises ZeroDivisionError"),
        ("ship.schedule(item)", 'ship.schedule(item + "s")', 1, "Arguments mismatch at task 1 ship (event 3)"),
        (
            '"order"',
            '"orders"',
            1,
            "order: 2 open runs, but the application has no workflow of this name. Did you mean",
        ),
        pytest.param(
            "ship.schedule(item)",
            f"ship.schedule(item if hash('a') == {hash('a')} else 'another')",
            1,
            "not in a process with PYTHONHASHSEED=",
            id="hash seed",
        ),
        (
            '"refund"',
            '"refund", version=2',
            0,
            "Not replayed: 1 open run pinned to a version that the application does not have. "
            "Keep workers of that version until this run has ended.",
        ),
    ],
)
def test_replay_check_finds_code_that_would_make_runs_stuck(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, old: str, new: str, exit_code: int, said: str
) -> None:
    name = f"orders_{abs(hash(new))}"
    write(ORDERS.replace(old, new) if old else ORDERS, f"{name}.py")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    once = () if "hash(" in new else ("--once",)  # without the second process
    result = run("workflows", "replay-check", "--app", f"{name}:app", *once)
    assert said in result.output
    assert result.exit_code == exit_code, result.output
    document = json.loads(run("workflows", "replay-check", "--app", f"{name}:app", "--json", *once).stdout)
    assert (document["misfits"] > 0, document["problems"] != []) == (bool(exit_code), bool(exit_code))


@pytest.mark.usefixtures("open_orders")
def test_replay_check_goes_on_after_code_that_exits(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exits(*_: object, **__: object) -> None:
        raise SystemExit("bad")

    monkeypatch.setattr("orchestrator.cli.code.replay_check.replay", exits)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    result = run("workflows", "replay-check", "--app", "orders:app")
    assert result.output.count("SystemExit: bad") == 3
    assert "Replayed 3 open runs: 3 of them do not match the code." in result.output


@pytest.mark.usefixtures("open_orders")
def test_replay_check_skips_workflows_of_another_application(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ORDERS.replace('"order"', '"orders"'), "orders_elsewhere.py")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    result = run("workflows", "replay-check", "--app", "orders_elsewhere:app", "--elsewhere", "order")
    assert result.exit_code == 0, result.output
    assert "Replayed 1 open run. The code matches." in result.output


# -- export

EXPORTED = """
from orchestrator import Orchestrator, WorkflowContext

app = Orchestrator()

@app.task(name="ship")
def ship(item: str) -> str: ...

@app.workflow(name="depot/order")
async def order(ctx: WorkflowContext, item: str, password: str) -> str:
    await ctx.sleep(60)
    return await ship.schedule(item)
"""


@pytest.fixture
def ended_orders(run: Callable[..., Result], connection: Connection) -> list[bytes]:
    """Four runs: the first has the longest history, and the last is open."""
    ids = []
    for number in range(1, 5):
        run_id = time_ordered_id(number, bytes(10))
        timer, task = command_id(run_id, "timer", 1), command_id(run_id, "task", 1)
        events: list[history.HistoryItem] = [
            history.RunStarted("depot/order", 1, encode_call("order", ["tea", "sesame"], {}, 1000)),
            history.ActivationApplied(1),
            history.TimerStarted(1, timer, 60.0),
        ]
        if number == 1:
            more = (history.TimerFired(timer), history.ActivationApplied(4))
            events += [*more, history.TaskScheduled(1, task, "ship", digest_call(["tea"], {}))]
        creation.create(connection, [code_runs.new_run(run_id, events)._replace(shown=1)])
        ids.append(run_id)
    runs.end(connection, [(one, RunState.CANCELLED, None) for one in ids[:3]], datetime.now(UTC))
    connection.commit()
    return ids


def test_histories_are_exported_and_checked_without_a_database(
    run: Callable[..., Result], ended_orders: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_REDACT", "password")
    result = run("workflows", "export", "histories", "--limit", "1")
    assert result.exit_code == 0, result.output
    assert "Wrote the histories of 3 runs of 1 workflow to histories." in result.output
    files = sorted(file.name for file in Path("histories").iterdir())
    chosen = [ended_orders[0], ended_orders[2], ended_orders[3]]  # the longest, the newest ended, the newest open
    assert files == sorted(f"depot_order-1-{to_text(one)}.json" for one in chosen)
    monkeypatch.setenv("ORCHESTRATOR_DATABASE_URL", "postgresql://nowhere.invalid/none")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    write(EXPORTED, "depot.py")
    check = ("workflows", "replay-check", "--histories", "histories", "--app")
    fitting = run(*check, "depot:app", "--in-order")
    assert fitting.exit_code == 0, fitting.output
    assert "Replayed 3 runs. The code matches." in fitting.output
    write(EXPORTED.replace('"ship"', '"send"'), "depot_sends.py")
    misfit = run(*check, "depot_sends:app", "--json")
    assert misfit.exit_code == 1
    (problem,) = json.loads(misfit.stdout)["problems"]
    assert problem["run"] == to_text(ended_orders[0])
    assert "history has 'ship' and the code says 'send'" in problem["problem"]
    write(EXPORTED.replace("depot/order", "depot/orders"), "depot_lost.py")
    lost = run(*check, "depot_lost:app")
    assert (lost.exit_code, "Replayed 3 runs: 3 of them do not match the code." in lost.output) == (1, True)
    assert run(*check, "depot_lost:app", "--elsewhere", "depot/order").exit_code == 2  # nothing was checked


def test_replay_check_reports_an_invalid_history_file(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    write(EXPORTED, "depot_read.py")
    Path("histories").mkdir()
    Path("histories/one.json").write_text("{}", encoding="utf-8")
    result = run("workflows", "replay-check", "--histories", "histories", "--app", "depot_read:app")
    assert (result.exit_code, "one.json: History: expected" in result.output) == (1, True)


def test_swapped_commands_are_found_only_by_the_option_in_order(
    run: Callable[..., Result], ended_orders: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended_orders
    assert run("workflows", "export", "histories").exit_code == 0
    monkeypatch.syspath_prepend(str(Path.cwd()))
    sleep, ship = "    await ctx.sleep(60)\n", "    return await ship.schedule(item)\n"
    swapped = EXPORTED.replace(sleep, "    shipped = ship.schedule(item)\n" + sleep).replace(
        ship, "    return await shipped\n"
    )
    write(swapped, "depot_swapped.py")
    check = ("workflows", "replay-check", "--histories", "histories", "--app", "depot_swapped:app")
    assert run(*check).exit_code == 0
    result = run(*check, "--in-order")
    assert result.exit_code == 1, (
        result.output,
        list(Path("histories").iterdir()),
        Path("depot_swapped.py").read_text(),
    )
    assert "Order mismatch at timer 1 (event 3): the history has it before task 1 ship (event 6)" in result.output
