"""Workflow files: their meaning, and every error message with its line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, get_type_hints

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.domain.dag.definition import (
    Concurrency,
    Definition,
    EventTrigger,
    Hook,
    Param,
    Step,
)
from orchestrator.domain.problems import MAX_PROBLEMS
from orchestrator.domain.schedules.schedule import Schedule
from orchestrator.errors import InvalidWorkflow
from orchestrator.sdk.dag import definitions, document, fields
from orchestrator.sdk.dag.builder import Defaults, StepOptions, WorkflowOptions
from orchestrator.sdk.dag.definitions import from_data, load, loads
from orchestrator.sdk.dag.document import to_yaml
from orchestrator.sdk.schedule_declarations import Times
from tests.fuzzing import examples

NIGHTLY = """\
name: nightly
version: 3                     # left out: a new version whenever the content hash changes
params: {day: {type: date, default: today}}
schedule: {cron: "0 3 * * *", timezone: Europe/Berlin, overlap: skip, catch_up: latest, jitter: 30s}
defaults: {retries: 2, timeout: 10m}
tasks:
  discover: {task: etl.discover, input: {day: "${params.day}"}}
  process:  {task: etl.process, depends_on: [discover], foreach: discover.files, concurrency: 4}
  shards:   {task: etl.shard, depends_on: [discover], parallel: discover.count}
  report:   {task: "reports.py:build", depends_on: [process, shards], on_failure: run}
  publish:  {workflow: publish-site, depends_on: [report], when: "${report.ok}"}
  tell:     {task: mail.send, depends_on: [publish], trigger: all_ended}
"""

EVERYTHING = """\
# A workflow with every option.
name: everything
description: |
  Two lines
  of text.
params:
  customer: {type: string, description: Who pays.}
  days: {type: list, default: [1, 2]}
  since: {type: datetime, default: now}
  anything: {}
schedule:
  every: 1h30m
  params: {customer: acme, anything: "${run.fire_time}"}
  paused: true
  name: hourly
  catch_up: all(10)
timeout: 1d
concurrency: {limit: 2, key: "${params.customer}"}
tags: [billing, night]
on:
  - {workflow: nightly, state: ended, params: {customer: "${event.params.customer}", anything: 1}}
  - {event: order, filter: "${event.total > 10}", params: {customer: x, anything: null}}
on_failure: {task: mail.send}
on_success: [{webhook: "https://example.com/hook"}]
queue: billing
defaults: {priority: 5, queue: slow, trigger: none_failed}
tasks:
  first: {task: http, input: {url: "http://x/$${y}", no: no, date: 2024-01-31, n: [1, 2.5, true, null]}}
  copies: {task: t, depends_on: first, parallel: 3, input: {at: "${index} of ${count}"}}
  fixed: {task: t, foreach: [a, 1, "${params.customer}", [true]], input: {x: "${item}"}, priority: 1}
  last: &last {task: t, depends_on: [copies, fixed], on_failure: skip, when: true, timeout: 250ms, queue: fast}
  again: {<<: *last, retries: 1}
"""

SOUND = {"nightly": NIGHTLY, "everything": EVERYTHING, "small": '{"name": "a", "tasks": {"b": {"task": "c"}}}'}


def test_the_example_file_equals_its_definition() -> None:
    common: dict[str, Any] = {"retries": 2, "timeout": 600.0}
    assert loads(NIGHTLY) == Definition(
        name="nightly",
        version=3,
        params={"day": Param(type="date", default="today")},
        schedule={
            "cron": "0 3 * * *",
            "timezone": "Europe/Berlin",
            "overlap": "skip",
            "catch_up": "latest",
            "jitter": 30.0,
        },
        steps=(
            Step(name="discover", task="etl.discover", input={"day": "${params.day}"}, **common),
            Step(
                name="process",
                task="etl.process",
                depends_on=("discover",),
                foreach="discover.files",
                concurrency=4,
                **common,
            ),
            Step(name="shards", task="etl.shard", depends_on=("discover",), parallel="discover.count", **common),
            Step(
                name="report",
                task="reports.py:build",
                depends_on=("process", "shards"),
                trigger="all_ended",
                **common,
            ),
            Step(name="publish", workflow="publish-site", depends_on=("report",), when="report.ok", **common),
            Step(name="tell", task="mail.send", depends_on=("publish",), trigger="all_ended", **common),
        ),
    )


def test_every_option_is_read() -> None:
    definition = loads(EVERYTHING)
    assert definition.description == "Two lines\nof text.\n"
    assert definition.params["customer"].required
    assert definition.schedule is not None
    assert definition.schedule["every"] == 5400.0
    assert definition.timeout == 86400.0
    assert definition.concurrency == Concurrency(limit=2, key="${params.customer}")
    assert definition.tags == ("billing", "night")
    assert definition.on[0].state == "ended"
    assert definition.on[1] == EventTrigger(
        event="order", filter="event.total > 10", params={"customer": "x", "anything": None}
    )
    assert definition.on_failure == (Hook(task="mail.send"),)
    assert definition.on_success == (Hook(webhook="https://example.com/hook"),)
    first, copies, fixed, last, again = definition.steps
    assert first.task == "http"
    assert first.input == {"url": "http://x/$${y}", "no": "no", "date": "2024-01-31", "n": [1, 2.5, True, None]}
    assert (first.queue, first.priority, first.trigger) == ("slow", 5, "none_failed")
    assert (copies.depends_on, copies.parallel) == (("first",), 3)
    assert (fixed.foreach, fixed.priority) == ('["a", 1, (params.customer), [true]]', 1)
    assert (last.trigger, last.when, last.timeout, last.queue) == ("all_success", "true", 0.25, "fast")
    assert again == msgspec.structs.replace(last, name="again", retries=1)


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_definitions_survive_yaml(text: str) -> None:
    definition = loads(text)
    assert loads(to_yaml(definition)) == definition


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    "data",
    [
        {"v": "paid \U0001f600", "\U0001f600": [{"k": '\x7f\x85\u2028\ufeff "\\/ a: b, # c'}]},
        {"k" * 3_000: "after a long key", "": ["", "?", "- a"], '"?:': None},
    ],
)
def test_whatever_a_json_encoder_writes_is_read_with_its_lines(data: Any, ascii_only: bool) -> None:
    for indent in (None, 1):
        root, flaws = document.read(json.dumps(data, ensure_ascii=ascii_only, indent=indent))
        assert flaws == []
        assert root is not None
        assert root.plain() == data
        assert isinstance(root.value, dict)
        assert [entry.line for entry in root.value.values()][:2] == ([1, 1] if indent is None else [2, 3])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 5_000 + "]" * 5_000, '{"a": ' + "9" * 5_000 + "}", '{"a": "\\ud83d"}']
)
def test_json_that_cannot_be_meant_is_refused(text: str) -> None:
    assert document.read(text)[1] != []


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_json_and_plain_data_equal_yaml(text: str) -> None:
    root, _ = document.read(text)
    assert root is not None
    assert loads(json.dumps(root.plain(), indent="\t")) == loads(text)
    assert from_data(root.plain()) == loads(text)


def test_load_names_the_file_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text("\ufeff" + NIGHTLY)
    assert load(path) == load(str(path)) == loads(NIGHTLY)
    path.write_text("name: x\ntasks: 5\n")
    with pytest.raises(InvalidWorkflow, match=r"flow\.yaml:2: tasks: expected a mapping of tasks by name, found"):
        load(path)
    path.write_bytes(b"name: \xff")
    with pytest.raises(InvalidWorkflow, match=r"flow\.yaml: not UTF-8 text"):
        load(path)
    with pytest.raises(InvalidWorkflow, match=r"gone\.yaml: cannot be read: No such file"):
        load(tmp_path / "gone.yaml")


# -- messages


def error_lines(text: str) -> list[str]:
    with pytest.raises(InvalidWorkflow) as caught:
        loads(dedent(text).lstrip("\n"), "f.yaml")
    return str(caught.value).splitlines()


ONE = "tasks: {a: {task: t}}"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param(
            """
            name: x
            tasks:
              discover: {task: t}
              process:
                task: t
                depends_on: [discover]
              report:
                task: t
                depends_on:
                  - discover
                  - proces
            """,
            ["f.yaml:11: tasks.report.depends_on: unknown task 'proces'. Did you mean 'process'?"],
            id="unknown dependency",
        ),
        pytest.param(
            """
            name: x
            tasks:
              first: {task: t}
              a: {task: t, depends_on: c}
              b: {task: t, depends_on: [first, a]}
              c: {task: t, depends_on: [b]}
            """,
            [
                "f.yaml:4: tasks.a.depends_on: cycle: a → c → b → a, each depends on the next. "
                "Remove one of these dependencies."
            ],
            id="cycle",
        ),
        pytest.param(
            f"name: x\nschedule:\n  timezone: UTC\n  cron: 0 25 * * *\n{ONE}",
            ["f.yaml:4: schedule.cron: hour '25' of '0 25 * * *': expected 0 to 23; also *, lists, ranges and steps."],
            id="cron field",
        ),
        pytest.param(
            f"name: x\nschedule: {{cron: 1 2 3}}\n{ONE}",
            [
                "f.yaml:2: schedule.cron: expected 5 fields (minute, hour, day of month, month, day of week), or 6 "
                "with seconds first, found 3 in '1 2 3'."
            ],
            id="cron fields",
        ),
        pytest.param(
            f"name: x\nschedule: {{cron: 0 0 31 2 *}}\n{ONE}",
            ["f.yaml:2: schedule.cron: '0 0 31 2 *' never comes: there is no such date."],
            id="cron never",
        ),
        pytest.param(
            f"name: x\nschedule: {{cron: R * * * *}}\n{ONE}",
            ["f.yaml:2: schedule.cron: minute 'R' of 'R * * * *': expected 0 to 59; also *, lists, ranges and steps."],
            id="cron random",
        ),
        pytest.param(
            f"name: x\nschedule: {{cron: '@reboot'}}\n{ONE}",
            [
                "f.yaml:2: schedule.cron: expected one of @hourly, @daily, @midnight, @weekly, @monthly, @yearly, "
                "@annually, found '@reboot'."
            ],
            id="cron nickname",
        ),
        pytest.param(
            f"""
name: x
schedule:
  every: 0s
  at: noon
  timezone: Europe/Berlni
  overlap: never
  catch_up: all(0)
  jitter: -1
  paused: yes
  corn: x
{ONE}
""",
            [
                "f.yaml:2: schedule: expected exactly one of cron, every and at, found every and at.",
                "f.yaml:3: schedule.every: expected at least 1 second, found 0.",
                "f.yaml:4: schedule.at: expected a time such as 2024-01-31T09:30:00, found the string 'noon'.",
                "f.yaml:5: schedule.timezone: unknown time zone 'Europe/Berlni'. Did you mean 'Europe/Berlin'?",
                "f.yaml:6: schedule.overlap: expected one of skip, queue, allow, cancel_previous, found the string "
                "'never'.",
                "f.yaml:7: schedule.catch_up: expected one of none, latest, all and all(limit), found the string "
                "'all(0)'.",
                "f.yaml:8: schedule.jitter: expected 0 seconds or more, found -1.",
                "f.yaml:9: schedule.paused: expected true or false, found the string 'yes'.",
                "f.yaml:10: schedule.corn: unknown key. Did you mean 'cron'?",
            ],
            id="schedule",
        ),
        pytest.param(
            f"name: x\nschedule: {{timezone: UTC}}\n{ONE}",
            ["f.yaml:2: schedule: expected exactly one of cron, every and at, found none of them."],
            id="schedule without a time",
        ),
        pytest.param(
            """
            name: x
            tasks:
              a:
                task: t
                dependson: []
                zzz: 1
            step: {}
            """,
            [
                "f.yaml:5: tasks.a.dependson: unknown key. Did you mean 'depends_on'?",
                "f.yaml:6: tasks.a.zzz: unknown key. Known: task, workflow, executor, with, depends_on, input, "
                "foreach, parallel, concurrency, trigger, when, retries, timeout, queue, priority, concurrency_key, "
                "on_failure.",
                "f.yaml:7: step: unknown key. Known: name, version, description, params, schedule, timeout, "
                "concurrency, tags, on, on_failure, on_success, queue, defaults, tasks.",
            ],
            id="unknown keys",
        ),
        pytest.param(
            """
            name: 5
            version: two
            params:
              p: string
              q: {type: text}
            concurrency: {key: x}
            tags: 7
            on: workflow
            tasks:
              a: {task: t, retries: "3", timeout: soon, queue: [q]}
              b: {task: t, depends_on: {a: 1}, input: [1], when: 1, foreach: 3}
              c: {task: t, parallel: 1.5, trigger: all_sucess, on_failure: runs}
              d: etl.load
              e: {task: 5}
            """,
            [
                "f.yaml:1: name: expected a string, found the number 5.",
                "f.yaml:2: version: expected a whole number, found the string 'two'.",
                "f.yaml:4: params.p: expected a mapping such as {type: date, default: today}, found the "
                "string 'string'.",
                "f.yaml:5: params.q.type: expected one of string, integer, number, boolean, date, datetime, list, "
                "object, any, found the string 'text'.",
                "f.yaml:6: concurrency: limit is missing: the number of runs that may run at once.",
                "f.yaml:7: tags: expected a name or a list of names, found the number 7.",
                "f.yaml:8: on: expected a mapping with workflow or event, or a list of such, found the string "
                "'workflow'.",
                "f.yaml:10: tasks.a.retries: expected a whole number, found the string '3'.",
                "f.yaml:10: tasks.a.timeout: expected a duration such as 250ms, 30s, 10m, 1h30m or 2d, or a number of "
                "seconds, found the string 'soon'.",
                "f.yaml:10: tasks.a.queue: expected a string, found a list of 1.",
                "f.yaml:11: tasks.b.depends_on: expected a name or a list of names, found an object with a.",
                "f.yaml:11: tasks.b.input: expected a mapping, found a list of 1.",
                "f.yaml:11: tasks.b.when: expected an expression such as report.ok, or true or false, found the "
                "number 1.",
                "f.yaml:11: tasks.b.foreach: expected an expression such as discover.files, or a list, found the "
                "number 3.",
                "f.yaml:12: tasks.c.parallel: expected a whole number, or an expression such as discover.count, found "
                "the number 1.5.",
                "f.yaml:12: tasks.c.trigger: expected one of all_success, all_ended, any_success, any_failed, "
                "none_failed, found the string 'all_sucess'. Did you mean 'all_success'?",
                "f.yaml:12: tasks.c.on_failure: expected one of run, skip, found the string 'runs'. Did you mean "
                "'run'?",
                "f.yaml:13: tasks.d: expected a mapping such as {task: etl.discover}, found the string 'etl.load'.",
                "f.yaml:14: tasks.e.task: expected a string, found the number 5.",
            ],
            id="types",
        ),
        pytest.param(
            """
            name: x
            params:
              day: {type: date, default: tomorrow}
            tasks:
              a:
                task: t
                input:
                  list:
                    - "${params.day}"
                    - "${params.dya}"
                  text: "on ${params.day +} it"
              b:
                task: t
                when: "${a.ok} and ${a.fine}"
              c: {task: t, foreach: a.files}
            """,
            [
                "f.yaml:3: params.day.default: expected a date such as 2024-01-31, or today, found the string "
                "'tomorrow'.",
                "f.yaml:10: tasks.a.input.list: unknown parameter 'dya'. Did you mean 'day'?",
                "f.yaml:11: tasks.a.input.text: Expression 'params.day +': expected a value at character 13, found the "
                "end.",
                "f.yaml:14: tasks.b.when: Expression '${a.ok} and ${a.fine}': unexpected '$' at character 1: write the "
                "whole expression in one ${...}, with no ${} inside it.",
                "f.yaml:15: tasks.c.foreach: 'a' may not have ended by then: add it to depends_on.",
            ],
            id="expressions",
        ),
        pytest.param(
            """
            name: x
            defaults:
              retries: -1
              timeout: 0
              retrys: 3
            tasks:
              a: {task: t}
              b: {task: t, retries: -2}
            """,
            [
                "f.yaml:3: defaults.retries: expected 0 or more, up to a million, found -1.",
                "f.yaml:4: defaults.timeout: expected more than 0 seconds and at most a hundred years, found 0.",
                "f.yaml:5: defaults.retrys: unknown key. Did you mean 'retries'?",
                "f.yaml:8: tasks.b.retries: expected 0 or more, up to a million, found -2.",
            ],
            id="defaults",
        ),
        pytest.param(
            "name: x\ntasks:\n  a: {task: t, on_failure: run,\n      trigger: all_success}\n",
            [
                "f.yaml:3: tasks.a.on_failure: on_failure: run means trigger: all_ended, but trigger is all_success: "
                "keep one of them."
            ],
            id="trigger twice",
        ),
        pytest.param(
            "name: x\nname: y\ntasks:\n  a: {task: t}\n  b: {task: t, task: u}\n  a: {task: v}\n",
            [
                "f.yaml:2: duplicate key 'name', first used in line 1.",
                "f.yaml:5: duplicate key 'task', first used in line 5.",
                "f.yaml:6: duplicate key 'a', first used in line 4.",
            ],
            id="duplicate keys",
        ),
        pytest.param("tasks: {a: {task: t}}", ["f.yaml:1: name: is missing: every workflow has a name."], id="no name"),
        pytest.param("name: x", ["f.yaml:1: tasks: a workflow needs at least one task."], id="no tasks"),
        pytest.param("", ["f.yaml:1: expected a workflow, found nothing."], id="nothing"),
        pytest.param(
            "- a",
            ["f.yaml:1: expected a workflow: a mapping with name and tasks, found a list of 1."],
            id="not a mapping",
        ),
        pytest.param(
            "name: x\ntasks: {a: {task: t}\nqueue: b\n",
            [
                "f.yaml:3: not readable as YAML: did not find expected ',' or '}' while parsing a flow mapping.",
            ],
            id="syntax",
        ),
        pytest.param("name: x\n---\nname: y\n", ["f.yaml:2: a second document: a file holds one workflow."], id="two"),
        pytest.param(
            "name: !!python/object/apply:os.system [x]",
            [
                "f.yaml:1: tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed: a workflow is plain "
                "data."
            ],
            id="tag",
        ),
        pytest.param(
            f"name: x\ndescription: *later\n{ONE}",
            ["f.yaml:2: no anchor &later is defined before this alias."],
            id="alias without anchor",
        ),
        pytest.param(
            "name: x\ntasks: &all {a: *all}",
            ["f.yaml:2: alias *all is used inside its own anchor."],
            id="alias of itself",
        ),
        pytest.param(
            "name: x\nversion: 99999999999999999999999\n" + ONE,
            [
                "f.yaml:2: 99999999999999999999999 is not a finite number of at most 64 bits.",
                "f.yaml:2: version: expected 1 or more, found 0.",
            ],
            id="number",
        ),
        pytest.param(
            "name: x\ntasks:\n  a: {task: t, foreach: [{b: 1}]}",
            [
                "f.yaml:3: tasks.a.foreach: expected a string, a number, true, false, null or a list, found an object "
                "with b."
            ],
            id="foreach over objects",
        ),
        pytest.param("name: x\ntasks: {? [a] : {task: t}}", ["f.yaml:2: a key must be a string."], id="key"),
    ],
)
def test_each_error_message_names_its_line(text: str, lines: list[str]) -> None:
    assert error_lines(text) == lines


def test_a_yaml_bomb_is_rejected() -> None:
    lines = ["name: x", "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert error_lines("\n".join(lines)) == [
        "f.yaml:7: more than 1,000,000 parts, each alias counted with all that it refers to."
    ]


@pytest.mark.slow
def test_depth_and_length_are_bounded() -> None:
    assert error_lines("[" * 100_000) == ["f.yaml:1: nested more than 64 levels deep."]
    assert error_lines("#" * 10_000_001) == ["f.yaml:1: 10,000,001 characters, and at most 10,000,000 are allowed."]
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidWorkflow, match="data: nested more than 64 levels deep"):
        from_data({"name": "x", "description": deep}, "data")


def test_very_many_problems_are_cut_off() -> None:
    lines = error_lines("name: x\ntasks:\n" + "".join(f"  a{n}: {{task: t, depends_on: [b]}}\n" for n in range(100)))
    assert len(lines) == 51
    assert lines[-1] == "… and 50 more."


def test_suggestions_are_sought_only_for_the_first_unknown_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def looking(name: str, _: object) -> str:
        looked.append(name)
        return ""

    monkeypatch.setattr(fields, "did_you_mean", looking)
    lines = error_lines("name: x\ntasks: {a: {task: t}}\n" + "".join(f"k{n}: 1\n" for n in range(1_000)))
    assert lines[-1] == "… and 950 more."
    assert len(looked) <= MAX_PROBLEMS


def test_the_parser_in_python_gives_the_same_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = [document.read(text) for text in SOUND.values()]
    monkeypatch.setattr(document, "_Loader", yaml.SafeLoader)
    slow = [document.read(text) for text in SOUND.values()]
    assert [_lines(root) for root, _ in fast] == [_lines(root) for root, _ in slow]
    assert error_lines("name: x\nname: y\n" + ONE) == ["f.yaml:2: duplicate key 'name', first used in line 1."]


def _lines(node: document.Node | None) -> Any:
    assert node is not None
    if isinstance(node.value, dict):
        return node.line, {key: (entry.line, _lines(entry.node)) for key, entry in node.value.items()}
    if isinstance(node.value, list):
        return node.line, [_lines(item) for item in node.value]
    return node.line, node.value


# -- the schema for editors


@cache
def schema() -> Any:
    from jsonschema import Draft202012Validator  # takes seconds, in each process that collects the tests

    content = json.loads(msgspec.json.encode(definitions.schema()))
    Draft202012Validator.check_schema(content)
    return Draft202012Validator(content)


@pytest.mark.slow
@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_valid_files_match_the_schema(text: str) -> None:
    for file in (text, to_yaml(loads(text))):
        root, _ = document.read(file)
        assert root is not None
        schema().validate(root.plain())


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "name: x",
        "name: x\ntasks: {}",
        "name: x\ntasks: {a: {}}",
        "name: x\ntasks: {a: {task: t, workflow: w}}",
        "name: x\ntasks: {a: {executor: process}}",
        "name: x\ntasks: {a: {executor: process, with: {command: ls}}}",
        "name: x\ntasks: {a: {executor: process, with: {comand: [ls]}}}",
        "name: x\ntasks: {a: {task: t, with: {command: [ls]}}}",
        "name: x\ntasks: {a: {task: t, retries: -1}}",
        "name: x\ntasks: {a: {task: t, foreach: b, parallel: 2}}",
        "name: x\ntasks: {a: {task: t, concurrency: 2}}",
        "name: x\ntasks: {a: {task: t, timeout: soon}}",
        "name: x\ntasks: {item: {task: t}}",
        "name: x\ntasks: {a b: {task: t}}",
        "name: x\nschedule: {every: 1h, cron: '* * * * *'}\ntasks: {a: {task: t}}",
        "name: x\nsteps: {}\ntasks: {a: {task: t}}",
    ],
)
def test_files_that_violate_the_schema_are_rejected(text: str) -> None:
    root, _ = document.read(text)
    assert root is not None
    assert not schema().is_valid(root.plain())
    with pytest.raises(InvalidWorkflow):
        loads(text)


def test_structs_files_and_the_builder_have_the_same_keys() -> None:
    properties = definitions.schema()["properties"]
    step = set(properties["tasks"]["additionalProperties"]["properties"])

    assert step == set(Step.__struct_fields__) - {"name", "registered", "with_"} | {"on_failure", "with"}
    assert set(get_type_hints(StepOptions)) == step - {"task", "workflow", "executor", "with"}
    assert set(get_type_hints(Defaults)) == set(properties["defaults"]["properties"])
    assert set(properties) == set(Definition.__struct_fields__) - {"steps"} | {"tasks", "defaults"}
    assert set(get_type_hints(WorkflowOptions)) == set(properties) - {"name", "params", "defaults", "tasks"}
    assert set(properties["schedule"]["properties"]) == set(Schedule.__struct_fields__)
    assert set(get_type_hints(Times)) == set(Schedule.__struct_fields__) - {"name", "params"}


def test_the_schema_describes_each_key_and_its_values() -> None:
    properties = definitions.schema()["properties"]
    step = properties["tasks"]["additionalProperties"]["properties"]

    assert step["retries"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 1_000_000,
        "description": "Attempts after the first.",
    }
    assert properties["schedule"]["properties"]["overlap"] == {
        "enum": ["skip", "queue", "allow", "cancel_previous"],
        "default": "skip",
        "description": "What happens when the previous run has not ended.",
    }


# -- arbitrary input


_WORDS = st.sampled_from(
    ["no", "1e5", "0o17", "2024-01-31", "~", "", " x ", "a: b", "# c", "é\n", "$${x}", "<<", "=", "1_0"]
)
_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_WORDS.filter(lambda key: key != "<<"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), _PLAIN), _WORDS, st.floats(0.001, 1e9), st.integers(1, 99))
@pytest.mark.slow
def test_any_definition_can_be_written_and_read(
    data: dict[str, Any], description: str, timeout: float, version: int
) -> None:
    definition = Definition(
        name="1e5",
        version=version,
        description=description,
        timeout=timeout,
        params={"no": Param(default=data)},
        steps=(Step(name="yes", task="on", input=data), Step(name="no-1", task="off", depends_on=("yes",))),
    )
    assert loads(to_yaml(definition)) == definition


@given(st.data())
@examples(100)
@pytest.mark.slow
def test_any_text_is_read_or_rejected(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([NIGHTLY, EVERYTHING]) | st.text())
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 10))
        new = data.draw(
            st.text(max_size=3) | st.sampled_from(["&a ", "*a", "<<: ", "\n", "  ", ": ", "${", "}", "- ", "0"])
        )
        text = text[:place] + new + text[place + gone :]
    try:
        definition = loads(text)
    except InvalidWorkflow as error:
        assert all(line.startswith(("<text>:", "…")) for line in str(error).split("\n"))
    else:
        assert loads(to_yaml(definition)) == definition


def test_a_name_that_is_too_long_is_rejected_and_shortened_in_the_message() -> None:
    with pytest.raises(
        InvalidWorkflow, match=r"^f\.yaml:4: tasks\.'x{128}…': a name has 1 to 128 characters"
    ) as caught:
        loads(f"name: x\ntasks:\n  a: {{task: t}}\n  {'x' * 600}: {{task: t}}\n", "f.yaml")
    assert len(str(caught.value)) < 500
