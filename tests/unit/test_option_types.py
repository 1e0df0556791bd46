"""What a type checker and an editor know of the options of tasks, workflows and schedules."""

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
PROGRAMS = [Path(__file__).with_name(name) for name in ("typed_program.py", "typed_messages.py")]
every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)


def wrong_lines(program: Path) -> set[int]:
    lines = program.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


@every_program
def test_mypy_refuses_the_wrong_lines_of_a_program_and_no_other(program: Path) -> None:
    # The cache is that of `scripts/check`: without one, all that the program imports is read, which takes a minute.
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(REPOSITORY / ".mypy_cache"), str(program)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    found = re.findall(rf"{program.name}:(\d+): error", said.stdout)

    assert {int(number) for number in found} == wrong_lines(program), said.stdout + said.stderr


def test_pyright_refuses_the_wrong_lines_of_programs_and_no_other() -> None:
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--outputjson", *map(str, PROGRAMS)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in json.loads(said.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    }

    wrong = {(program.name, line) for program in PROGRAMS for line in wrong_lines(program)}
    assert found == wrong, said.stdout + said.stderr


def test_what_a_checker_knows_is_what_counts() -> None:
    known = {name: hint for name, hint in get_type_hints(CallOptions).items() if name in OPTION_NAMES}
    assert get_type_hints(OptionTypes) == known
    assert get_type_hints(RunOptionTypes) == get_type_hints(CodeOptions)
    assert list(get_type_hints(OptionTypes)) == list(OPTION_NAMES)


def test_unknown_options_are_type_errors_that_name_the_nearest() -> None:
    app = Orchestrator()
    with pytest.raises(TypeError, match="Unknown task option 'retires'. Did you mean 'retries'") as refused:
        app.task(retires=3)  # type: ignore[call-overload]
    assert isinstance(refused.value, UnknownOption)
    assert isinstance(refused.value, InvalidTask)
    with pytest.raises(TypeError, match="Unknown workflow option 'timeot'. Did you mean 'timeout'") as refused:
        app.workflow(timeot=3)  # type: ignore[call-overload]
    assert isinstance(refused.value, InvalidWorkflow)
