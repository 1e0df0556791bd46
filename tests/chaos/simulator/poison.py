"""Runs with which the leader fails, in one operation or another, until the poison is lifted.

What is poisoned is the run with a number, in the order in which clients start them. The product's functions are asked
to do something with it, and fail as a defect, a full disk of Postgres's or a statement that takes too long would.
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
    """Which runs are poisoned at the moment, and which have been met."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._active: list[tuple[int, str, str]] = []
        self.met: set[bytes] = set()
        """Runs with which the leader has failed."""

    def add(self, number: int, operation: str, form: str) -> None:
        self._active.append((number, operation, form))

    def lift(self) -> None:
        self._active.clear()

    @property
    def poisoned(self) -> set[bytes]:
        started = self._world.clients.runs
        return {started[number] for number, _, _ in self._active if number < len(started)}

    def strike(self, operation: str, ids: Iterable[bytes]) -> None:
        """Fail if one of these runs is poisoned for this operation."""
        started = self._world.clients.runs
        wanted = {started[n]: form for n, what, form in self._active if what == operation and n < len(started)}
        for run in ids if wanted else ():
            if run in wanted:
                self.met.add(run)
                self._world.trace(f"poison: {operation} {run.hex()[-6:]} ({wanted[run]})")
                raise _failure(wanted[run])

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Let the product's own functions meet the poison."""
        with ExitStack() as stack:
            for owner, name, operation, ids in (
                (DagRun, "open", "evaluate", lambda given: [given[0].id]),
                (StepCreation, "_instantiate", "create", lambda given: [given[3][0].id]),
                (Flows, "_advance", "advance", lambda given: [given[3].id]),
                (runs, "count", "count", lambda given: given[1]),
                (runs, "settle", "count", lambda given: given[1]),
                (Triggers, "runs_ended", "hooks", lambda given: [run.id for _, run in given[2]]),
                (requests, "requeue_runs", "request", lambda given: given[1]),
                (cancels, "mark_cancelling", "request", lambda given: given[1]),
                (cancels, "without_open_work", "stop", lambda given: given[1]),
            ):
                stack.enter_context(patch.object(owner, name, self._around(getattr(owner, name), operation, ids)))
            stack.enter_context(patch.object(dags, "_apply_to_plan", self._around_plan(dags._apply_to_plan)))
            yield

    def _around(
        self, function: Callable[..., Any], operation: str, ids: Callable[[Any], Iterable[bytes]]
    ) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            self.strike(operation, ids(given))
            return function(*given, **options)

        return call

    def _around_plan(self, function: Callable[[Any, RunChanges], None]) -> Callable[[Any, RunChanges], None]:
        def call(run: Any, changes: RunChanges) -> None:
            self._apply_to_plan(run, changes)
            function(run, changes)

        return call

    def _apply_to_plan(self, run: Any, changes: RunChanges) -> None:
        for operation, is_so in (
            ("begin", changes.begun),
            ("advance", changes.ended),
            ("expand", changes.is_expanding),
            ("reopen", changes.is_retried or changes.reopened),
        ):
            if is_so:
                self.strike(operation, [run.id])
