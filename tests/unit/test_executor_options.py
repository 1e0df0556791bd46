"""A task's executor options are checked at its declaration, as in workflow files."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import Orchestrator
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.executors.record import announced, meets_requirement
from orchestrator.domain.executors.registry import call_of, find_problems
from orchestrator.errors import InvalidTask
from orchestrator.executors import Dask, Http, Kubernetes, Process, Pull, Ray, Rq

NUL = "x\0y"


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (Http(service="sum", params={"a": NUL}), "params"),
        (Http(service="sum", params={"a": [{NUL: 1}]}), "params"),
        (Pull(service="sum", params={"a": {"b": NUL}}), "params"),
        (Process(command=["/usr/bin/env"], env={"A": NUL}), "env"),
        (Process(command=["/usr/bin/env"], env={NUL: "a"}), "env"),
        (Process(command=["/usr/bin/env"], cwd=f"/{NUL}"), "cwd"),
        (Rq(function="a:b", queue=NUL), "queue"),
        (Dask(function="a:b", address=f"tcp://{NUL}:8786"), "address"),
        (Kubernetes(image="i", env={"A": NUL}), "env"),
        (Ray(function="a:b", runtime_env={"pip": [NUL]}), "runtime_env"),
    ],
)
def test_a_string_with_a_nul_character_is_rejected(options: ExecutorOptions, option: str) -> None:
    app = Orchestrator()
    with pytest.raises(InvalidTask, match=f"Option executor, {option}: it holds a NUL character"):
        app.task(name="it", executor=options)(_body)


@pytest.mark.parametrize("name", ["", "A=B", "=", "A="])
def test_an_invalid_variable_name_is_rejected(name: str) -> None:
    found = find_problems("process", {"command": ["/usr/bin/env"], "env": {name: "1"}})
    assert found == [("env", f"{name!r} cannot be set as a variable here.")]


def test_values_other_than_plain_data_are_rejected() -> None:
    with pytest.raises(InvalidTask, match="Option executor: Http holds a value that is not plain data: "):
        Orchestrator().task(name="it", executor=Http(service="sum", params={"a": object()}))(_body)


def test_numbers_that_json_lacks_are_rejected() -> None:
    found = find_problems("http", {"service": "sum", "params": {"a": float("nan")}})
    assert [option for option, _ in found] == ["params"]


@pytest.mark.parametrize(
    ("pattern", "program", "expected"),
    [
        ("*", "/opt/jobs/a", True),
        ("*", "convert", True),
        ("/opt/jobs/*", "/opt/jobs/a", True),
        ("/opt/jobs/*", "/opt/jobs/within/a", False),
        ("/opt/*/a", "/opt/jobs/a", True),
        ("/opt/*/a", "/opt/jobs/within/a", False),
        ("conv*", "convert", True),
        ("conv*", "conv/ert", False),
    ],
)
def test_a_program_pattern_does_not_match_across_a_slash(pattern: str, program: str, expected: bool) -> None:
    means = call_of(Process(command=[program])).requirement
    assert meets_requirement([announced(f"process {pattern}")], means) is expected
    assert not meets_requirement([announced(f"rq {pattern}")], means)


def _body(value: int) -> Any: ...
