"""Data that is too large, too deep or malformed is accepted whole or rejected clearly, and never half-stored.

Whatever a task returns, the leader goes on: a step whose input cannot be built from the result fails with the reason.
"""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

from orchestrator import Orchestrator, OrchestratorError, RunHandle
from orchestrator.domain.plain import is_same
from orchestrator.sdk.dag.definitions import loads
from orchestrator.sdk.values.payload import decode_value
from orchestrator.store import insights
from tests.integration.stage import System

STORED = ("tasks", "ended_tasks", "runs", "inbox")


@pytest.fixture
def system(system: System) -> System:
    system.sql("DELETE FROM orchestrator.workflows")
    system.worker(slots=50)
    return system


# -- what callers pass


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@dataclasses.dataclass
class Chain:
    inner: Chain | None


def chained(levels: int) -> Chain | None:
    value = None
    for _ in range(levels):
        value = Chain(value)
    return value


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

STRANGE: dict[str, Any] = {
    "a NUL": "a\0b",
    "a NUL in a key": {"a\0b": 1},
    "text that looks like a NUL": r"\u0000",
    "a lone surrogate": "\ud800",
    "a lone surrogate in a key": {"\udfff": 1},
    "not a number": [{"x": float("nan")}],
    "infinity": [-float("inf")],
    "ten megabytes": "x" * 10_000_000,
    "ten thousand levels": nested(10_000),
    "nine hundred levels": nested(900),
    "a chain of objects": chained(900),
    "two hundred levels": nested(190),
    "a huge number": 10**30,
    "a huge negative number": [-(10**30)],
    "the largest number": 2**64 - 1,
    "numbers as keys": {1: 2, 1.5: 3},
    "a tuple as key": {(1, 2): 3},
    "no key": {None: 3},
    "itself": ENDLESS,
    "bytes": b"\xff\0",
    "a time": datetime(2024, 1, 31, tzinfo=UTC),
    "a set": {1, 2},
    "an object": object(),
    "a generator": (number for number in range(3)),
    "a class": int,
    "a function": print,
}

WORKFLOW = """
name: strange
params:
  any: {type: any, default: null}
  text: {type: string, default: ""}
  items: {type: list, default: []}
  fields: {type: object, default: {}}
concurrency: {limit: 5, key: "${params.text}"}
tasks: {only: {task: job}}
"""
Door = Callable[[Orchestrator, Any], object]
DOORS: dict[str, Door] = {
    "an argument": lambda app, value: app.enqueue("job", value),
    "a named argument": lambda app, value: app.enqueue("job", number=value),
    "one of many": lambda app, value: app.enqueue_many(app.tasks["job"], [(1,), (value,)]),
    "an item of a run": lambda app, value: app.start_many(app.tasks["job"], [1, (value,)]),
    "the name of a run": lambda app, value: app.start_many(app.tasks["job"], [1], name=value),
    "an event": lambda app, value: app.post_event("event", value),
    "the name of an event": lambda app, value: app.post_event(value),
    "a parameter": lambda app, value: app.workflows["strange"].start(any=value),
    "a text": lambda app, value: app.workflows["strange"].start(text=value),
    "a list": lambda app, value: app.workflows["strange"].start(items=[value]),
    "a field": lambda app, value: app.workflows["strange"].start(fields={"field": value}),
    "an idempotency key": lambda app, value: app.workflows["strange"].options(key=value or "x").start(),
    "a tag": lambda app, value: app.workflows["strange"].options(tags=[value]).start(),
    "the tags": lambda app, value: app.workflows["strange"].options(tags=value).start(),
    "the name of a workflow": lambda app, value: app.workflows[value].start(),
    "the name of a task": lambda app, value: app.enqueue(value),
    "the name of a queue": lambda app, value: app.tasks["job"].options(queue=value).enqueue(),
    "the id of a task": lambda app, value: app.handle(value).cancel(),
    "the id of a run": lambda app, value: app.run(value).cancel(),
}


@pytest.mark.parametrize("door", DOORS)
def test_data_is_accepted_or_rejected_clearly(system: System, door: str) -> None:
    app = system.app
    app.workflows.apply(loads(WORKFLOW))
    for what, value in STRANGE.items():
        before = [system.count(table) for table in STORED]
        try:
            DOORS[door](app, value)
        except OrchestratorError as error:
            assert 10 < len(str(error)) < 1_000, what
            assert [system.count(table) for table in STORED] == before, f"{what} was refused, and something is stored"
        else:
            assert [system.count(table) for table in STORED] != before, what
    system.pass_seconds(3)  # the leader can read all accepted data
    for row in system.sql("SELECT payload FROM orchestrator.tasks"):
        decode_value(bytes(row["payload"]))


def test_accepted_values_arrive_unchanged(system: System) -> None:
    accepted = ("a NUL", "a NUL in a key", "text that looks like a NUL", "two hundred levels", "the largest number")
    for what in accepted:
        system.job.enqueue(STRANGE[what])
    system.pass_seconds()
    received = [msgspec.msgpack.decode(task.payload)[0][0] for task in system.workers[0].take()]
    assert received == [STRANGE[what] for what in accepted]


def test_a_concurrency_key_may_be_long(system: System) -> None:
    """The key would not fit an index, and random text cannot be compressed to fit."""
    system.app.workflows.apply(loads(WORKFLOW))
    long = "".join(random.Random(1).choices(string.printable, k=500_000))
    run = system.app.workflows["strange"].start(text=long)
    system.pass_seconds()
    assert run.progress().status == "running"
    (row,) = system.sql("SELECT lane, params FROM orchestrator.runs")
    assert row["params"]["text"] == long
    assert len(row["lane"]) < 100


# -- what tasks return


CHAIN = """
name: chain
tasks:
  first: {task: job}
  second: {FIELDS}
"""
CHILD = """
name: child
params: {value: {type: any}}
tasks: {only: {task: job}}
"""


def chain(system: System, second: str, result: bytes) -> tuple[RunHandle[Any], str]:
    """Run two steps, the first returning these bytes; return the run, and why the second step failed."""
    system.app.task(name="wants")(lambda first: first)
    system.app.workflows.apply(loads(CHILD))
    system.app.workflows.apply(loads(CHAIN.replace("FIELDS", second)))
    run = system.app.workflows["chain"].start()
    system.pass_seconds()
    (worker,) = system.workers
    worker.succeed(*worker.take(), result=result)
    system.pass_seconds()
    for _ in range(5):
        worker.succeed(*worker.take())
        system.pass_seconds()
    with system.engine.connect() as connection:
        steps = {step.name: step for step in insights.list_steps(connection, UUID(run.id))}
    return run, steps["second"].reason or ""


UNREADABLE = [b"\xc1", b"", b"\x91" * 3_000, b"\xa2\xff\xfe"]


@pytest.mark.parametrize(
    "fields", ["task: wants, depends_on: [first]", 'task: job, depends_on: [first], foreach: "first"']
)
@pytest.mark.parametrize("result", UNREADABLE)
def test_an_unreadable_result_fails_the_step_that_needs_it(system: System, result: bytes, fields: str) -> None:
    """Such a report may come from a foreign program or from an old release."""
    run, reason = chain(system, fields, result)
    assert run.progress().status == "failed"
    assert "The output of task 'first' cannot be read" in reason
    assert (run.progress().counters.success, run.progress().counters.failed) == (1, 1)
    handle = system.job.enqueue(1)
    system.pass_seconds()
    (worker,) = system.workers
    worker.succeed(*worker.take())
    system.tick()
    assert handle.status() == "success"


@pytest.mark.parametrize(
    "value",
    [
        "a\0b",
        {"a\0b": 1},
        [float("nan")],
        float("inf"),
        nested(900),
        "x" * 1_500_000,
        {1: "number"},
        b"\xff",
        datetime(2024, 1, 31, tzinfo=UTC),
    ],
    ids=lambda value: type(value).__name__ + str(value)[:20],
)
def test_a_result_becomes_a_parameter_or_fails_the_step(system: System, value: Any) -> None:
    result = msgspec.msgpack.encode(value)
    run, reason = chain(system, 'workflow: child, depends_on: [first], input: {value: "${first}"}', result)
    assert (run.progress().status == "success") is not bool(reason)
    assert system.count("tasks") == 0


@pytest.mark.parametrize("number", [10**15, 2**64 - 1, 2_000_000])
def test_a_fan_out_has_a_maximum_size(system: System, number: int) -> None:
    result = msgspec.msgpack.encode(number)
    run, reason = chain(system, 'task: job, depends_on: [first], parallel: "first"', result)
    assert run.progress().status == "failed"
    assert "expected a whole number up to 1,000,000" in reason


def test_an_unsuitable_event_does_not_block_later_events(system: System) -> None:
    """The concurrency key cannot be computed from the event."""
    text = CHILD.replace("tasks:", 'concurrency: {limit: 1, key: "${params.value.name}"}\ntasks:')
    text += 'on: [{event: arrived, params: {value: "${event}"}}]\n'
    system.app.workflows.apply(loads(text))
    system.app.post_event("arrived", ["no name"])
    system.app.post_event("arrived", {"name": "a"})
    system.pass_seconds(3)
    assert system.count("inbox") == 0
    assert system.count("runs") == 1


def test_events_arrive_unchanged(system: System) -> None:
    """This includes numbers that jsonb would change, and text that looks like such numbers, as every other id does."""
    text = CHILD.replace("{task: job}", '{task: job, input: {number: "${params.value}"}}')
    system.app.workflows.apply(loads(text + 'on: [{event: arrived, params: {value: "${event}"}}]\n'))
    posted = {"id": "0199b2f4-1e77-7a3e-9c41-5b0d6f2a8e17", "2e5": [1e20, -1.5e18, 2.0, 12345678901234567]}
    system.app.post_event("arrived", posted)
    system.pass_seconds(3)
    (task,) = system.workers[0].take()
    given = msgspec.msgpack.decode(task.payload)[1]["number"]
    assert is_same(given, posted), given


def test_a_failing_event_filter_is_logged_with_its_workflow(system: System, caplog: pytest.LogCaptureFixture) -> None:
    text = CHILD + 'on: [{event: arrived, filter: "event.total > 10", params: {value: 1}}]\n'
    system.app.workflows.apply(loads(text))
    system.app.post_event("arrived", {"total": "much"})
    system.pass_seconds(2)
    assert system.count("runs") == 0
    name = loads(text).name
    (told,) = [record.getMessage() for record in caplog.records if "filter" in record.getMessage()]
    assert told.startswith(f"workflow.not_triggered workflow={name} event_id=")
    assert "filter=event.total > 10 error=" in told


# -- small definitions that cause much work


BOMB = """
name: bomb
params: {many: {type: list}, known: {type: list}, large: {type: string, default: ""}}
tasks: {each: {task: job, foreach: "params.many", input: {INPUT}}}
"""


def created(system: System) -> int:
    """Return the number of tasks."""
    return int(system.sql("SELECT count(*) FROM orchestrator.tasks")[0]["count"])


def test_a_fan_out_that_searches_a_long_list_is_created(system: System) -> None:
    system.app.workflows.apply(loads(BOMB.replace("INPUT", 'number: "${item in params.known}"')))
    run = system.app.workflows["bomb"].start(many=list(range(3_000)), known=list(range(1_000, 120_000)))
    system.tick_until(lambda: created(system) == 3_000)
    assert run.progress().status == "running"
    system.tick()
    assert created(system) == 3_000


def test_a_too_expensive_fan_out_fails_and_other_tasks_go_on(system: System) -> None:
    """Each of its tasks receives one value a thousand times."""
    often = ", ".join(f'n{number}: "${{params.known}}"' for number in range(1_000))
    system.app.workflows.apply(loads(BOMB.replace("INPUT", f"number: {{{often}}}")))
    run = system.app.workflows["bomb"].start(many=list(range(1_000)), known=list(range(100_000)))
    handle = system.job.enqueue(1)
    system.tick_until(lambda: run.progress().status == "failed")
    with system.engine.connect() as connection:
        (step,) = insights.list_steps(connection, UUID(run.id))
    assert "one value is named too often" in (step.reason or "")
    (worker,) = system.workers
    worker.succeed(*worker.take())
    system.tick()
    assert handle.status() == "success"


def test_tasks_with_large_inputs_are_created_over_several_ticks(system: System) -> None:
    system.app.workflows.apply(loads(BOMB.replace("INPUT", 'number: "${params.large}"')))
    system.app.workflows["bomb"].start(many=list(range(30)), known=[], large="x" * 900_000)
    system.tick()
    assert 0 < created(system) < 15
    system.tick_until(lambda: created(system) == 30)
    assert created(system) == 30


def test_steps_with_large_inputs_are_created_over_several_ticks(system: System) -> None:
    steps = "\n".join(f'  s{number}: {{task: job, input: {{number: "${{params.large}}"}}}}' for number in range(16))
    system.app.workflows.apply(loads(f"name: wide\nparams: {{large: {{type: string}}}}\ntasks:\n{steps}"))
    runs = [system.app.workflows["wide"].start(large="x" * 900_000) for _ in range(2)]
    system.tick()
    assert 0 < created(system) < 15
    system.tick_until(lambda: created(system) == 32)
    assert [run.progress().counters.open for run in runs] == [16, 16]
    (worker,) = system.workers
    for _ in range(60):
        worker.succeed(*worker.take())
        system.pass_seconds()
        if {run.progress().status for run in runs} == {"success"}:
            break
    assert [run.progress().counters.success for run in runs] == [16, 16]


JOIN = """
name: join
tasks:
  one: {task: job}
  two: {task: job}
  both: {task: nothing, depends_on: [one, two]}
"""


def test_a_task_without_parameters_does_not_receive_large_results(system: System) -> None:
    system.app.task(name="nothing")(lambda: None)
    system.app.workflows.apply(loads(JOIN))
    run = system.app.workflows["join"].start()
    worker = system.worker("w2", knows=("job", "nothing"))
    large = msgspec.msgpack.encode("x" * 700_000)
    system.pass_seconds()
    for member in system.workers:
        member.succeed(*member.take(), result=large)
    system.pass_seconds()
    (last,) = [task for member in system.workers for task in member.take()]
    assert (last.name, len(last.payload) < 1_000) == ("nothing", True)
    worker.succeed(last)
    system.tick()
    assert run.wait_ended(timeout=10) == "success"
