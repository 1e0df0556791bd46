"""Names that an editor offers on public objects: all documented, and each blocking name with its async variant."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest

import orchestrator
from orchestrator import (
    Cell,
    CodeWorkflow,
    Composition,
    CompositionHandle,
    Handle,
    Orchestrator,
    Queue,
    RunHandle,
    Settings,
    Task,
    TaskContext,
    WorkflowContext,
    WorkflowHandle,
)
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.code.starting import Starting
from orchestrator.sdk.code.workflow import CodeWorkflows
from orchestrator.sdk.dag.workflows import StoredWorkflow, Workflows
from orchestrator.sdk.schedules import Backfill, Scheduled, Schedules
from orchestrator.sdk.tasks.gathering import Completions

NAMES: dict[type[Any], tuple[str, str]] = {
    Orchestrator: (
        "enqueue enqueue_many start_many post_event retry_failed close",
        "task tasks find_task workflow workflows code_workflows flows schedule schedules handle run workflow_run queue "
        "queues settings load_modules middleware resource lifespan override register_type at",
    ),
    Cell: (
        "enqueue enqueue_many start_many post_event retry_failed close",
        "find_task workflows flows handle run workflow_run queue settings",
    ),
    Task: ("enqueue delay enqueue_in", "name queue function options schedule s si map starmap chunks via"),
    Composition: ("start", ""),
    Handle: ("result open_result status progress logs parent children cancel retry", "id"),
    RunHandle: (
        "status wait_ended results iter_results outputs progress logs parent children cancel rerun retry delete",
        "id",
    ),
    CompositionHandle: (
        "result status wait_ended results iter_results outputs progress logs parent children cancel rerun retry delete",
        "id",
    ),
    WorkflowHandle: (
        "result status state attributes signal resolve reject query update start_update cancel terminate reset retry "
        "rerun history",
        "id options update_handle",
    ),
    Queue: ("pause resume limit retain purge open drain", "name"),
    Workflows: ("names apply", "get items keys values"),
    StoredWorkflow: ("definition start delete", "name options"),
    CodeWorkflow: ("start find signal_many", "name version versioning function options starting schedule via"),
    CodeWorkflows: ("", "find get items keys values"),
    Starting: ("start execute", ""),
    Schedules: ("names page apply forget set", "get items keys values"),
    Scheduled: ("status next pause resume trigger delete backfill", "key"),
    Backfill: ("progress cancel wait_ended", "id"),
    Completions: ("", ""),
    Recording: ("", "run_id events to_json from_json"),
    TaskContext: (
        "enqueue",
        "task_id task_name attempt queue run_id position workflow_name parallel_index parallel_count deadline details "
        "headers failures is_after_loss progress log heartbeat cancelled check_cancelled remaining transaction "
        "complete open_output",
    ),
    WorkflowContext: (
        "",
        "all_handlers_finished attributes clear compensate continue_as_new get info logger now patched promise query "
        "random run schedule set set_attributes should_continue_as_new signal signals sleep update uuid wait_condition",
    ),
}
"""By class: the methods that wait for Postgres or for an end, and all other names."""

PUBLIC_CLASSES = [value for value in vars(orchestrator.public).values() if inspect.isclass(value)]
BLOCKING = [(kind, name) for kind, (blocking, _) in NAMES.items() for name in blocking.split()]


def explained(kind: type[Any]) -> dict[str, str]:
    """Return the public names of a class and its instances, each with its docstring in the source."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("orchestrator"):
            found |= {name: "elsewhere" for name in vars(base) if base is not object}
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        bodies = [tree.body, *(one.body for one in tree.body if isinstance(one, ast.FunctionDef))]
        for body in bodies:
            for one, following in zip(body, [*body[1:], None], strict=True):
                text = following.value if isinstance(following, ast.Expr) else None
                said = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
                targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        found[target.attr] = said or found.get(target.attr, "")
                    elif isinstance(target, ast.Name) and body is tree.body:
                        found[target.id] = said or inspect.getdoc(getattr(base, target.id, None)) or ""
        for name, value in vars(base).items():
            if callable(value) or isinstance(value, (property, staticmethod, classmethod)) or hasattr(value, "func"):
                found[name] = found.get(name) or inspect.getdoc(value) or ""
    return {name: said for name, said in found.items() if not name.startswith("_")}


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_a_class_offers_exactly_its_public_names(kind: type[Any]) -> None:
    blocking, others = (names.split() for names in NAMES[kind])
    assert set(explained(kind)) == {*blocking, *others, *(f"a{name}" for name in blocking)}


@pytest.mark.parametrize("kind", [*NAMES, *(kind for kind in PUBLIC_CLASSES if kind not in NAMES)])
def test_every_public_name_is_documented(kind: type[Any]) -> None:
    assert inspect.getdoc(kind)
    said_of_all = " ".join(inspect.getdoc(base) or "" for base in kind.__mro__)
    found = [name for name, said in explained(kind).items() if not said.strip() and f"`{name}`" not in said_of_all]
    assert found == []


def test_instances_have_no_other_public_attributes() -> None:
    app = Orchestrator(Settings())

    @app.task
    def job() -> None: ...

    @app.workflow
    async def flow(ctx: WorkflowContext) -> None: ...

    for held in (app, job, flow, app.handle("0" * 32), app.run("0" * 32), app.workflow_run("0" * 32), app.queue("q")):
        assert {name for name in dir(held) if not name.startswith("_")} <= set(explained(type(held))), held


@pytest.mark.parametrize(("kind", "name"), BLOCKING, ids=lambda part: getattr(part, "__name__", part))
def test_every_blocking_method_has_an_async_variant_with_its_signature(kind: type[Any], name: str) -> None:
    method, async_variant = getattr(kind, name), getattr(kind, f"a{name}")

    def shape(function: Any) -> list[tuple[str, Any, Any]]:
        return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]

    assert shape(async_variant) == shape(method)
    assert inspect.iscoroutinefunction(async_variant) == (name != "iter_results")
    assert async_variant.__name__ in (f"a{name}", "aenqueue")
    assert name in async_variant.__doc__ or name == "delay"


def test_public_functions_are_documented() -> None:
    for name in orchestrator.__all__:
        assert inspect.getdoc(getattr(orchestrator, name)), name
