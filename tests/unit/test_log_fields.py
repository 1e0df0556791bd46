"""Log lines about one task or run have its ids as fields, for programs that read the log."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.task import Dispatch
from orchestrator.log_format import JsonFormatter
from orchestrator.workers.parent.child import _timed_out
from orchestrator.workers.parent.held import Limit
from orchestrator.workers.running.job import Bundle, Job

ROOT = Path(__file__).parents[2]
TASK, RUN = bytes(range(16)), bytes(range(1, 17))


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield each logging call in schedulers and workers, with its location."""
    for folder in (ROOT / "orchestrator" / "scheduler", ROOT / "workers"):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "log"
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.slow
def test_ids_in_log_lines_are_also_fields() -> None:
    names = {
        where: ast.unparse(call)
        for where, call in log_calls()
        if any("to_text(" in ast.unparse(given) or ".dispatch." in ast.unparse(given) for given in call.args)
    }
    assert len(names) >= 3
    assert [f"{where}: {text}" for where, text in names.items() if "extra=" not in text] == []


def test_the_log_names_a_task_killed_with_its_process(caplog: pytest.LogCaptureFixture) -> None:
    _timed_out(Limit(TASK, 3, deadline=10.0, timeout=5.0, retryable=True), now=20.0)
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["task_id"], line["attempt"]) == (to_text(TASK), 3)


def test_a_job_provides_the_fields_of_its_log_lines() -> None:
    dispatch = Dispatch(TASK, 2, "shop.charge", b"", "money", None, RUN, None, False, 0, None)
    job = Job(dispatch, Bundle("1", "money", "1-0", 1), 0, 0.0)
    record = logging.makeLogRecord({"msg": "hello", **job.fields})
    line = json.loads(JsonFormatter().format(record))
    expected = {
        "task_id": to_text(TASK),
        "task_name": "shop.charge",
        "run_id": to_text(RUN),
        "attempt": 2,
        "queue": "money",
    }
    assert {name: line[name] for name in expected} == expected
