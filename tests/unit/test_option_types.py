"""Type checkers and editors know the options of tasks, workflows and schedules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from orchestrator import InvalidTask, InvalidWorkflow, Orchestrator, UnknownOption
from orchestrator.sdk.code.options import CodeOptions
from orchestrator.sdk.tasks.option_types import OptionTypes, RunOptionTypes
from orchestrator.sdk.tasks.options import OPTION_NAMES, CallOptions

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
NOT_IN_THE_TABLE = {"executor", "executor_options"}  # docs/executors.md describes them
PROGRAMS = [Path(__file__).with_name(name) for name in ("typed_program.py", "typed_messages.py")]


def wrong_lines() -> set[tuple[str, int]]:
    """Return the lines that a type checker has to reject."""
    return {
        (program.name, number)
        for program in PROGRAMS
        for number, line in enumerate(program.read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith("# wrong")
    }


def check(*command: str) -> str:
    words = [sys.executable, "-m", *command, *map(str, PROGRAMS)]
    return subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False).stdout


@pytest.mark.long  # pyright rejects the same lines in each build
def test_mypy_rejects_exactly_the_wrong_lines() -> None:
    # Uses the cache of `scripts/check`: without a cache, mypy reads all imports of the programs, which takes a minute.
    said = check("mypy", "--strict", "--cache-dir", str(REPOSITORY / ".mypy_cache"))
    found = {(name, int(line)) for name, line in re.findall(r"(\w+\.py):(\d+): error", said)}

    assert found == wrong_lines(), said


def test_pyright_rejects_exactly_the_wrong_lines() -> None:
    said = check("basedpyright", "--level", "error", "--outputjson")
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in json.loads(said)["generalDiagnostics"]
        if one["severity"] == "error"
    }

    assert found == wrong_lines(), said


def test_the_guide_names_every_option() -> None:
    guide = (REPOSITORY / "docs/tasks.md").read_text(encoding="utf-8")
    first_cells = " ".join(re.findall(r"^\| (`[^|]*) \|", guide, re.MULTILINE))
    assert {*OPTION_NAMES} - {*re.findall(r"`(\w+)`", first_cells)} == NOT_IN_THE_TABLE


def test_the_typed_options_match_the_accepted_options() -> None:
    known = {name: hint for name, hint in get_type_hints(CallOptions).items() if name in OPTION_NAMES}
    assert get_type_hints(OptionTypes) == known
    assert get_type_hints(RunOptionTypes) == get_type_hints(CodeOptions)
    assert list(get_type_hints(OptionTypes)) == list(OPTION_NAMES)


def test_unknown_options_raise_type_errors_with_a_suggestion() -> None:
    app = Orchestrator()
    with pytest.raises(TypeError, match="Unknown task option 'retires'. Did you mean 'retries'") as refused:
        app.task(retires=3)  # type: ignore[call-overload]
    assert isinstance(refused.value, UnknownOption)
    assert isinstance(refused.value, InvalidTask)
    with pytest.raises(TypeError, match="Unknown workflow option 'timeot'. Did you mean 'timeout'") as refused:
        app.workflow(timeot=3)  # type: ignore[call-overload]
    assert isinstance(refused.value, InvalidWorkflow)
