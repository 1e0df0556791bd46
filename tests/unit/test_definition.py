"""Definitions as data: their JSON, their hash, their problems, and the parameters of a run."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.dag.checks import check
from orchestrator.domain.dag.definition import (
    Concurrency,
    Definition,
    EventTrigger,
    Hook,
    Param,
    Step,
    content_hash,
    resolve_params,
)
from orchestrator.domain.durations import format_duration, parse_duration
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag.definitions import loads

DOCS = Path(__file__).parents[2] / "docs"
NOW = datetime(2024, 1, 31, 23, 30, tzinfo=UTC)


def define(*steps: Step, **options: Any) -> Definition:
    return Definition(name=options.pop("name", "flow"), steps=steps, **options)


def step(name: str, *depends_on: str, **options: Any) -> Step:
    kind: dict[str, Any] = {} if {"task", "workflow", "executor"} & options.keys() else {"task": "t"}
    return Step(name=name, depends_on=depends_on, **kind, **options)


def messages(definition: Definition) -> list[tuple[str, str]]:
    return [(".".join(map(str, problem.path)), problem.message) for problem in check(definition)]


FULL = define(
    step("a", input={"day": "${params.day}", "fire": "at ${run.fire_time}"}),
    step("b-c", "a", foreach="a.files", concurrency=4, input={"f": "${item.name} ${index}/${count}"}, retries=3),
    step("d", "a", parallel="a.count", input={"i": "${index}"}, trigger="none_failed"),
    step("e", "b-c", "d", workflow="child", when="len(b-c) > 0 and a.ok", timeout=1.5, queue="q", priority=-5),
    version=3,
    params={"day": Param(type="date", default="today"), "customer": Param(default=None)},
    concurrency=Concurrency(limit=2, key="${params.customer}"),
    tags=("x",),
    on=(EventTrigger(workflow="other", state="ended"), EventTrigger(event="order", filter="event.kind == 'x'")),
    on_failure=(Hook(task="mail.send"), Hook(webhook="https://example.com/hook")),
    schedule={"cron": "0 3 * * *", "params": {"day": "${run.fire_time}"}},
)


def test_json_is_compact_and_decodes_to_the_same_definition() -> None:
    text = msgspec.json.encode(FULL)
    assert msgspec.json.decode(text, type=Definition) == FULL
    assert b"null" not in text.replace(b'"default":null', b"")
    small = define(step("a"), params={"p": Param()})
    assert msgspec.json.encode(small) == b'{"name":"flow","params":{"p":{}},"steps":[{"name":"a","task":"t"}]}'
    assert msgspec.json.decode(msgspec.json.encode(small), type=Definition).params["p"].required


def test_the_hash_covers_all_but_the_version() -> None:
    assert content_hash(FULL) == content_hash(msgspec.structs.replace(FULL, version=None))
    assert content_hash(FULL) == content_hash(msgspec.json.decode(msgspec.json.encode(FULL), type=Definition))
    assert content_hash(FULL) != content_hash(msgspec.structs.replace(FULL, queue="other"))
    reordered = msgspec.structs.replace(FULL, params=dict(reversed(FULL.params.items())))
    assert content_hash(FULL) == content_hash(reordered)


def test_a_valid_definition_has_no_problems() -> None:
    assert check(FULL) == []


@pytest.mark.parametrize(
    ("definition", "path", "message"),
    [
        (define(), "tasks", "a workflow needs at least one task."),
        (define(step("a"), name="a b"), "name", "expected 1 to 128 letters"),
        (define(step("a"), version=0), "version", "expected 1 or more, found 0."),
        (define(step("a"), timeout=0.0), "timeout", "expected more than 0 seconds"),
        (define(step("a"), queue=""), "queue", "found the string ''."),
        (define(step("a"), tags=("",)), "tags.0", "a tag has 1 to 128 printable characters"),
        (define(step("a"), concurrency=Concurrency(limit=0)), "concurrency.limit", "expected 1 or more"),
        (
            define(step("a"), concurrency=Concurrency(limit=1, key="${a.x}")),
            "concurrency.key",
            "unknown name 'a'.",
        ),
        (define(step("a"), on_failure=(Hook(),)), "on_failure.0", "expected either task or webhook."),
        (define(step("a"), on_success=(Hook(webhook="ftp://x"),)), "on_success.0.webhook", "expected an http://"),
        (define(step("a"), on=(EventTrigger(),)), "on.0", "expected either workflow or event."),
        (
            define(step("a"), on=(EventTrigger(event="e", state="failed"),)),
            "on.0.state",
            "state can be given only with workflow",
        ),
        (define(step("a"), on=(EventTrigger(event="e", filter="params.x"),)), "on.0.filter", "unknown name 'params'."),
        (
            define(step("a"), on=(EventTrigger(event="e"),), params={"p": Param()}),
            "on.0",
            "parameter 'p' has no default: pass it here, under params.",
        ),
        (
            define(step("a"), schedule={"cron": "0 3 * * *"}, params={"p": Param()}),
            "schedule",
            "parameter 'p' has no default: pass it here, under params.",
        ),
        (
            define(step("a"), schedule={"cron": "0 3 * * *", "params": {"dya": 1}}, params={"day": Param(default=1)}),
            "schedule.params.dya",
            "unknown parameter 'dya'. Did you mean 'day'?",
        ),
        (define(step("a"), params={"1x": Param()}), "params.1x", "starts with one of a-z, A-Z and _"),
        (
            define(step("a"), params={"p": Param(type="integer", default="x")}),
            "params.p.default",
            "expected a whole number, found the string 'x'.",
        ),
        (define(step("a"), step("a")), "tasks.a", "two tasks are named 'a'."),
        (define(step("a b")), "tasks.a b", "starts with one of a-z, A-Z and _"),
        (define(step("item")), "tasks.item", "'item' has a special meaning in expressions: choose a different name."),
        (define(step("not")), "tasks.not", "'not' has a special meaning"),
        (define(Step(name="a")), "tasks.a", "expected exactly one of task, workflow and executor, found none"),
        (
            define(step("a", task="t", executor="process", with_={"command": ["ls"]})),
            "tasks.a",
            "expected exactly one of task, workflow and executor, found task and executor.",
        ),
        (define(step("a", with_={"x": 1})), "tasks.a.with", "with is only for an executor"),
        (
            define(step("a", task="t", workflow="w")),
            "tasks.a",
            "expected exactly one of task, workflow and executor, found task and workflow.",
        ),
        (define(step("a", task="a b")), "tasks.a.task", "expected 1 to 128 letters"),
        (
            define(step("a", foreach="params.x", parallel=2), params={"x": Param()}),
            "tasks.a.parallel",
            "foreach and parallel cannot be combined: keep one of them.",
        ),
        (define(step("a", parallel=0)), "tasks.a.parallel", "expected 1 or more, found 0."),
        (define(step("a", parallel=2, concurrency=0)), "tasks.a.concurrency", "expected 1 or more, found 0."),
        (define(step("a", concurrency=2)), "tasks.a.concurrency", "concurrency limits a fan-out"),
        (define(step("a", trigger="any_failed")), "tasks.a.trigger", "any_failed waits for other tasks"),
        (define(step("a", retries=-1)), "tasks.a.retries", "expected 0 or more"),
        (define(step("a", priority=101)), "tasks.a.priority", "from -100 to 100, found 101."),
        (define(step("a", timeout=-1.0)), "tasks.a.timeout", "found -1."),
        (define(step("a", queue="a b")), "tasks.a.queue", "expected 1 to 128 letters"),
        (
            define(step("process"), step("report", "proces")),
            "tasks.report.depends_on.0",
            "unknown task 'proces'. Did you mean 'process'?",
        ),
        (define(step("a"), step("b", "a", "a")), "tasks.b.depends_on.1", "'a' occurs twice."),
        (
            define(step("a"), step("b", input={"x": [{"y": "${a.z}"}]})),
            "tasks.b.input.x.0.y",
            "'a' may not have ended by then: add it to depends_on.",
        ),
        (define(step("a"), step("b", foreach="a.x")), "tasks.b.foreach", "add it to depends_on."),
        (define(step("a"), step("b", parallel="a.x")), "tasks.b.parallel", "add it to depends_on."),
        (define(step("a"), step("b", when="a.x")), "tasks.b.when", "add it to depends_on."),
        (define(step("a", "b"), step("b", input={"x": "${a}"})), "tasks.b.input.x", "add it to depends_on."),
        (define(step("a", input={"x": "${a.y}"})), "tasks.a.input.x", "'a' is this task itself"),
        (
            define(step("discover"), step("b", "discover", when="discovr.ok")),
            "tasks.b.when",
            "unknown name 'discovr'. Did you mean 'discover'?",
        ),
        (
            define(step("a", parallel=2, input={"x": "${index-1}"})),
            "tasks.a.input.x",
            "A minus needs spaces around it.",
        ),
        (
            define(step("a", input={"x": "${params.dya}"}), params={"day": Param()}),
            "tasks.a.input.x",
            "unknown parameter 'dya'. Did you mean 'day'?",
        ),
        (define(step("a", input={"x": "${params.x}"})), "tasks.a.input.x", "The workflow has none."),
        (
            define(step("a", input={"x": "${item}"})),
            "tasks.a.input.x",
            "'item' can be used only in the input and the concurrency_key of a task with foreach.",
        ),
        (define(step("a", parallel=2, input={"x": "${item}"})), "tasks.a.input.x", "a task with foreach."),
        (define(step("a", parallel=2, when="index > 0")), "tasks.a.when", "a task with foreach or parallel."),
        (
            define(step("a", when="1 +")),
            "tasks.a.when",
            "Expression '1 +': expected a value at character 4, found the end.",
        ),
        (define(step("a", input={"x": "${1 +}"})), "tasks.a.input.x", "at character 4"),
        (define(step("a", "a")), "tasks.a.depends_on", "cycle: a → a, each depends on the next."),
        (
            define(step("a", "b"), step("b", "c"), step("c", "a"), step("d", "c")),
            "tasks.a.depends_on",
            "cycle: a → b → c → a, each depends on the next. Remove one of these dependencies.",
        ),
    ],
)
def test_each_problem_is_reported_once_with_its_path(definition: Definition, path: str, message: str) -> None:
    found = messages(definition)
    assert [place for place, text in found if message in text] == [path], found
    assert len(found) == 1, found


def test_all_problems_are_found_at_once() -> None:
    found = check(define(step("a", "x", retries=-1), step("b", "c", when="("), step("c", "b")))
    assert len(found) == 4


@pytest.mark.slow
def test_each_cycle_is_reported_once_and_at_most_ten_cycles() -> None:
    pairs = [(f"a{n}", f"b{n}") for n in range(1000)]
    steps = [made for a, b in pairs for made in (step(a, b), step(b, a))]
    found = messages(define(*steps))
    assert len(found) == 10
    assert found[1] == (
        "tasks.a1.depends_on",
        "cycle: a1 → b1 → a1, each depends on the next. Remove one of these dependencies.",
    )


def test_a_large_graph_is_checked_quickly() -> None:
    layers = [[f"s{layer}_{n}" for n in range(100)] for layer in range(10)]
    steps = [step(name, *above) for above, layer in zip([[], *layers], layers, strict=False) for name in layer]
    steps.append(step("last", *layers[-1], when="s0_0.ok"))
    assert check(define(*steps)) == []


_EDGES = st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14)


@given(_EDGES, st.integers(0, 6), st.integers(0, 6))
def test_cycles_and_missing_dependencies_agree_with_a_naive_walk(
    edges: set[tuple[int, int]], one: int, other: int
) -> None:
    above: dict[int, set[int]] = {n: {up for down, up in edges if down == n} for n in range(7)}
    key_scope = {n: set(ups) for n, ups in above.items()}
    for _, n in itertools.product(range(7), range(7)):
        key_scope[n] = key_scope[n].union(*(key_scope[up] for up in key_scope[n]))
    when = {"when": f"s{other}.ok"}
    steps = [step(f"s{n}", *(f"s{up}" for up in sorted(above[n])), **(when if n == one else {})) for n in range(7)]
    found = messages(define(*steps))
    cycles = [text for _, text in found if text.startswith("cycle")]
    assert bool(cycles) == any(n in key_scope[n] for n in range(7))
    for text in cycles:
        path = [int(name.removeprefix("s")) for name in text.removeprefix("cycle: ").split(",")[0].split(" → ")]
        assert path[0] == path[-1]
        assert all(up in above[down] for down, up in itertools.pairwise(path))
    complaints = [text for place, text in found if place == f"tasks.s{one}.when"]
    around_cycle = any(n in key_scope[n] for n in key_scope[one] | {one})
    if other == one:
        assert "itself" in complaints[0]
    elif not around_cycle:
        assert bool(complaints) == (other not in key_scope[one])


# -- parameters


def resolve(given: dict[str, Any], **params: Param) -> dict[str, Any]:
    return resolve_params(define(step("a"), params=params), given, NOW)


def test_missing_parameters_take_their_defaults() -> None:
    assert resolve(
        {"n": 3},
        n=Param(type="integer"),
        day=Param(type="date", default="today"),
        at=Param(type="datetime", default="now"),
        text=Param(type="string", default="x"),
        nothing=Param(type="string", default=None),
    ) == {"n": 3, "day": "2024-01-31", "at": "2024-01-31T23:30:00+00:00", "text": "x", "nothing": None}


def test_today_is_in_the_time_zone_of_the_schedule() -> None:
    definition = define(
        step("a"),
        params={"day": Param(type="date", default="today")},
        schedule={"cron": "30 0 * * *", "timezone": "Europe/Berlin"},
    )
    assert resolve_params(definition, {}, NOW) == {"day": "2024-02-01"}


@pytest.mark.parametrize(
    ("kind", "value", "resolved"),
    [
        ("string", "", ""),
        ("integer", -5, -5),
        ("number", 5, 5),
        ("number", 1.5, 1.5),
        ("boolean", False, False),
        ("date", "2024-02-29", "2024-02-29"),
        ("date", date(2024, 2, 29), "2024-02-29"),
        ("date", "today", "2024-01-31"),
        ("datetime", "2024-02-29T10:00:00Z", "2024-02-29T10:00:00+00:00"),
        ("datetime", datetime(2024, 2, 29, 10), "2024-02-29T10:00:00+00:00"),
        ("list", (1, "a"), [1, "a"]),
        ("object", {"a": [date(2024, 1, 1)]}, {"a": ["2024-01-01"]}),
        ("any", None, None),
        ("any", {"a": 1}, {"a": 1}),
    ],
)
def test_valid_parameter_values_are_resolved(kind: Any, value: Any, resolved: Any) -> None:
    assert resolve({"p": value}, p=Param(type=kind)) == {"p": resolved}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("string", 5, "expected a string, found the number 5."),
        ("integer", 1.5, "expected a whole number, found the number 1.5."),
        ("integer", True, "expected a whole number, found true."),
        ("integer", 2**70, "the number is too large."),
        ("number", "5", "expected a number, found the string '5'."),
        ("number", float("nan"), "expected a finite number, found nan."),
        ("number", float("-inf"), "expected a finite number, found -inf."),
        ("boolean", 1, "expected true or false, found the number 1."),
        ("date", "2024-02-30", "expected a date such as 2024-01-31, or today, found the string '2024-02-30'."),
        ("date", datetime(2024, 1, 1), "expected a date"),
        ("datetime", "later", "expected a time such as 2024-01-31T09:30:00Z, or now, found the string 'later'."),
        ("list", {"a": 1}, "expected a list, found an object with a."),
        ("object", [], "expected an object, found an empty list."),
        ("string", None, "expected a string, found null."),
        ("any", object(), "expected plain data"),
    ],
)
def test_parameter_values_of_the_wrong_type_are_rejected(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(InvalidWorkflow) as caught:
        resolve({"p": value}, p=Param(type=kind))
    assert f"Workflow 'flow': parameter 'p': {message}".rstrip(".") in str(caught.value)


def test_every_wrong_parameter_is_named() -> None:
    with pytest.raises(InvalidWorkflow) as caught:
        resolve({"dya": 1, "n": "x"}, day=Param(type="date"), n=Param(type="integer"))
    assert str(caught.value).splitlines() == [
        "Workflow 'flow': unknown parameter 'dya'. Did you mean 'day'?",
        "Workflow 'flow': parameter 'day' (date) is missing and has no default.",
        "Workflow 'flow': parameter 'n': expected a whole number, found the string 'x'.",
    ]


# -- durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("1w", 604800.0),
        ("", None),
        ("5", None),
        ("m", None),
        ("-5s", None),
        ("5x", None),
    ],
)
def test_durations_are_parsed(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@given(st.floats(0, 1e10) | st.integers(1, 10**9).map(lambda n: n / 1000))
def test_formatted_durations_parse_to_the_same_value(seconds: float) -> None:
    written = format_duration(seconds)
    assert (parse_duration(written) if isinstance(written, str) else written) == seconds


# -- names


@pytest.mark.parametrize("name", ["a" * 129, "x" * 6_000, "", "1a", ".a", "a b", "ä", "a\n"])
def test_invalid_step_names_are_rejected(name: str) -> None:
    (found,) = (message for path, message in messages(define(step(name))) if path == f"tasks.{name}")
    assert found.startswith("a name has 1 to 128 characters, starts with one of a-z, A-Z and _")
    assert len(found) < 250


@pytest.mark.parametrize("name", ["a" * 128, "_", "load.orders", "mProject-1.fits_2", "a.b.c"])
def test_step_names_may_contain_dots(name: str) -> None:
    after = step("last", name, input={"x": f"${{`{name}`.rows[0].id}}"}, when=f"len(`{name}`) > 0")
    assert messages(define(step(name), after)) == []


def test_parameter_names_are_limited_in_length_and_have_no_dots() -> None:
    for name in ("p" * 129, "p.q"):
        assert messages(define(step("a"), params={name: Param()}))[0][0] == f"params.{name}"


def test_a_step_name_with_a_dot_needs_backquotes() -> None:
    found = messages(define(step("load.orders"), step("b", "load.orders", input={"x": "${load.orders.rows}"})))
    assert found == [
        (
            "tasks.b.input.x",
            "unknown name 'load'. A dot reads a field; the task 'load.orders' is written in backquotes: `load.orders`.",
        )
    ]
    both = define(step("a"), step("a.b"), step("c", "a", "a.b", input={"field": "${a.b}", "step": "${`a.b`}"}))
    assert messages(both) == []


def test_a_workflow_that_is_too_large_is_rejected_at_once() -> None:
    many = Definition(name="many", steps=tuple(Step(name=f"s{number}", task="t") for number in range(10_001)))
    assert [text for _, text in messages(many)] == [
        "10,001 tasks; a workflow may have at most 10,000: let one task fan out with foreach, or let tasks start "
        "workflows of their own."
    ]
    names = tuple(f"s{number}" for number in range(501))
    dense = Definition(name="dense", steps=tuple(Step(name=name, task="t", depends_on=names) for name in names))
    assert [text for _, text in messages(dense)] == [
        "251,001 dependencies in depends_on; a workflow may have at most 200,000."
    ]


@pytest.mark.slow
def test_only_the_first_of_very_many_problems_are_reported() -> None:
    params = {f"p{number}": Param() for number in range(1_000)}
    steps = tuple(Step(name=f"s{n}", task="t", input={"a": f"${{params.q{n}}}"}) for n in range(5_000))
    told = [text for _, text in messages(Definition(name="wrong", params=params, steps=steps))]
    assert len(told) == 101
    assert told[0].startswith("unknown parameter 'q0'.")
    assert told[-1] == "there is more that is wrong: these are the first 100."


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_workflows_in_the_docs_are_valid(page: Path) -> None:
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        if language == "yaml" and re.search(r"^name: ", body, re.M) and re.search(r"^tasks:", body, re.M):
            loads(body)
