"""The public names, and the cost of importing them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

import orchestrator
import orchestrator.testing

PUBLIC = [
    "AttemptEnd",
    "AttemptOver",
    "Cell",
    "CodeWorkflow",
    "Composition",
    "CompositionHandle",
    "ConfigurationError",
    "Depends",
    "DeterminismViolation",
    "Duplicate",
    "EnqueueCall",
    "ExpressionError",
    "FlowGraph",
    "FlowHandle",
    "Forbidden",
    "GiveUp",
    "Handle",
    "HandlerError",
    "HandlerFailed",
    "InvalidArguments",
    "InvalidTask",
    "InvalidWorkflow",
    "LogEntry",
    "Middleware",
    "NotDeterministic",
    "NotFound",
    "OperationFailed",
    "Orchestrator",
    "OrchestratorError",
    "Payload",
    "PayloadError",
    "Progress",
    "PromiseRejected",
    "Queue",
    "Rate",
    "ResultTimeout",
    "Retry",
    "RetryLater",
    "RunFailed",
    "RunHandle",
    "RunInfo",
    "SchemaError",
    "Settings",
    "Signals",
    "SoftTimeout",
    "StateTooLarge",
    "Task",
    "TaskAborted",
    "TaskCancelled",
    "TaskContext",
    "TaskEnded",
    "TaskFailed",
    "TaskFailure",
    "TaskProgress",
    "TaskSkipped",
    "TaskTimeout",
    "TurnContext",
    "Unavailable",
    "Uncertain",
    "UnknownHandler",
    "UnknownOption",
    "UnknownTask",
    "UpdateHandle",
    "UpdateRefused",
    "Workflow",
    "WorkflowContext",
    "WorkflowFailed",
    "WorkflowHandle",
    "WrongState",
    "agather",
    "as_completed",
    "chain",
    "chord",
    "current_task",
    "gather",
    "group",
    "unguarded",
    "workflow",
]


def test_the_exported_names_are_the_public_names() -> None:
    assert orchestrator.__all__ == PUBLIC
    present = {
        name
        for name, value in vars(orchestrator.public).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert present == {*PUBLIC} - {"workflow"}
    assert orchestrator.workflow.__all__ == ["query", "run", "signal", "update"]
    assert set(PUBLIC) < set(dir(orchestrator))  # for tab completion
    assert set(orchestrator.testing.__all__) < set(dir(orchestrator.testing))


def test_importing_a_part_does_not_load_the_rest() -> None:
    """Pytest imports the plugin in every session."""
    code = "import sys, pytest; before = set(sys.modules); import orchestrator.testing.pytest_plugin; " + (
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    parts = ["orchestrator", "orchestrator.lazy_names", "orchestrator.testing", "orchestrator.testing.pytest_plugin"]
    assert done.stdout.strip() == str(parts)


def test_every_error_is_exported_and_has_the_same_root() -> None:
    tree = [value for value in vars(orchestrator.errors).values() if isinstance(value, type)]
    errors = [kind for kind in tree if issubclass(kind, Exception)]
    assert {kind.__name__ for kind in errors} <= set(PUBLIC)
    assert all(issubclass(kind, orchestrator.OrchestratorError) for kind in errors)


def test_the_reference_lists_every_public_name() -> None:
    shown = (Path(__file__).parents[2] / "docs" / "reference.md").read_text().splitlines()
    others = [name for name in PUBLIC if not hasattr(orchestrator.errors, name)]
    assert [name for name in others if f"::: orchestrator.{name}" not in shown] == []


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert orchestrator.__version__ == project["version"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["orchestrator", "orchestrator.workers.parent.supervisor", "orchestrator.workers.running.isolated"]
)
def test_workers_and_clients_load_no_database_driver(module: str) -> None:
    """A driver costs 20 MB a process; the SDK loads drivers on first use."""
    heavy = "('sqlalchemy', 'psycopg2', 'alembic', 'click', 'rich', 'pydantic', 'orchestrator.store')"
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", [orchestrator.Retry, orchestrator.Rate])
def test_option_classes_expose_only_their_fields(kind: type) -> None:
    """Editors suggest every public name."""
    assert {name for name in dir(kind) if not name.startswith("_")} <= kind.__annotations__.keys()


def test_the_package_ships_its_types() -> None:
    assert files("orchestrator").joinpath("py.typed").is_file()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["orchestrator"]
