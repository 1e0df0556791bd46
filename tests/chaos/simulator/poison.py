"""Poisoned runs: one operation of the leader fails for them until the poison is lifted.

A poison applies to the n-th run that clients start. The product's function then fails as with a defect, a full disk
of Postgres, or a statement timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from sqlalchemy import exc

from orchestrator.domain.runs import RunChanges
from orchestrator.scheduler import requests
from orchestrator.scheduler.dag import plans as dags
from orchestrator.scheduler.dag.creation import StepCreation
from orchestrator.scheduler.dag.planned import DagRun
from orchestrator.scheduler.flow.plans import Flows
from orchestrator.scheduler.runs.triggers import Triggers
from orchestrator.store.runs import cancels
from orchestrator.store.runs import transitions as runs

if TYPE_CHECKING:
    from tests.chaos.simulator.world import World

OPERATIONS = ("begin", "advance", "expand", "stop", "reopen", "evaluate", "create", "count", "hooks", "request")
FORMS = ("defect", "refused", "timeout")


class _Cancelled(Exception):
    pgcode = "57014"


def _failure(form: str) -> Exception:
    if form == "timeout":
        return exc.OperationalError("statement", None, _Cancelled("canceling statement due to statement timeout"))
    if form == "refused":
        return exc.DataError("statement", None, Exception("value out of range"))
    return ZeroDivisionError("a defect")


class Poisons:
    """The currently poisoned runs, and all runs that a poison has hit."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._active: list[tuple[int, str, str]] = []
        self.met: set[bytes] = set()
        """Runs that a poison has hit."""

    def add(self, number: int, operation: str, form: str) -> None:
        self._active.append((number, operation, form))

    def lift(self) -> None:
        self._active.clear()

    @property
    def poisoned(self) -> set[bytes]:
        started = self._world.clients.runs
        return {started[number] for number, _, _ in self._active if number < len(started)}

    def strike(self, operation: str, ids: Iterable[bytes]) -> None:
        """Raise an error if one of these runs is poisoned for the operation."""
        started = self._world.clients.runs
        forms = {
            started[n]: form
            for n, poisoned_operation, form in self._active
            if poisoned_operation == operation and n < len(started)
        }
        for run in ids if forms else ():
            if run in forms:
                self.met.add(run)
                self._world.trace(f"poison: {operation} {run.hex()[-6:]} ({forms[run]})")
                raise _failure(forms[run])

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Patch the product's functions so that they fail for poisoned runs."""
        with ExitStack() as stack:
            for owner, name, operation, ids in (
                (DagRun, "open", "evaluate", lambda arguments: [arguments[0].id]),
                (StepCreation, "_instantiate", "create", lambda arguments: [arguments[3][0].id]),
                (Flows, "_advance", "advance", lambda arguments: [arguments[3].id]),
                (runs, "count", "count", lambda arguments: arguments[1]),
                (runs, "settle", "count", lambda arguments: arguments[1]),
                (Triggers, "runs_ended", "hooks", lambda arguments: [run.id for _, run in arguments[2]]),
                (requests, "requeue_runs", "request", lambda arguments: arguments[1]),
                (cancels, "mark_cancelling", "request", lambda arguments: arguments[1]),
                (cancels, "without_open_work", "stop", lambda arguments: arguments[1]),
            ):
                stack.enter_context(patch.object(owner, name, self._with_poison(getattr(owner, name), operation, ids)))
            stack.enter_context(patch.object(dags, "_apply_to_plan", self._plan_with_poison(dags._apply_to_plan)))
            yield

    def _with_poison(
        self, function: Callable[..., Any], operation: str, ids: Callable[[Any], Iterable[bytes]]
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.strike(operation, ids(arguments))
            return function(*arguments, **options)

        return call

    def _plan_with_poison(self, function: Callable[[Any, RunChanges], None]) -> Callable[[Any, RunChanges], None]:
        def call(run: Any, changes: RunChanges) -> None:
            self._apply_to_plan(run, changes)
            function(run, changes)

        return call

    def _apply_to_plan(self, run: Any, changes: RunChanges) -> None:
        for operation, applies in (
            ("begin", changes.begun),
            ("advance", changes.ended),
            ("expand", changes.is_expanding),
            ("reopen", changes.is_retried or changes.reopened),
        ):
            if applies:
                self.strike(operation, [run.id])
