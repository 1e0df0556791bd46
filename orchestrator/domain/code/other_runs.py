"""What runs of code say to other runs, and learn of them: signals, cancels, queries and ends.

A wait for the end of a run is a promise whose name says which run; the leader settles it. A cancel is a signal of a
reserved name, and so is a query. All these names have a space, which no name of a user's has. What became of a signal,
or the answer to a query, is told like what became of a promise. So histories hold nothing here that the previous
release could not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from orchestrator.domain.code import history
from orchestrator.domain.code.ends import NOTHING
from orchestrator.domain.code.history import PromiseSettled
from orchestrator.domain.ids import to_text
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import NotFound, OrchestratorError, RunFailed, UnknownHandler, WrongState

CANCEL = "cancel run"
"""The name of a signal that asks a run to cancel itself."""
QUERY = "query "
"""Begins the name of a signal that is a query; the name of that follows."""
WAIT = "run "
"""Begins the name of a promise that the end of a run settles."""
REFUSED = "refused"
"""The phase of an error that says that there is no such run, that it has ended, or takes no such signal."""
_REFUSALS: Mapping[str, type[OrchestratorError]] = {"NotFound": NotFound, "UnknownHandler": UnknownHandler}
_NO_RUN = bytes(16)


class Target(NamedTuple):
    """Another run, by its id or by the one that a client has chosen, as `run_keys` has it."""

    run: bytes = _NO_RUN
    key: str = ""

    def __str__(self) -> str:
        return self.key or to_text(self.run)

    @property
    def wait(self) -> str:
        """The name of the promise that its end settles."""
        return f"{WAIT}{self}"

    @classmethod
    def of_wait(cls, name: str) -> Target:
        """Return the run that a wait is for."""
        text = name.removeprefix(WAIT)
        try:
            return cls(UUID(text).bytes)
        except ValueError:  # a chosen id stands behind the name of its workflow
            return cls(key=text)


def is_wait(name: str) -> bool:
    """Say whether a promise is a wait for the end of a run."""
    return name.startswith(WAIT)


def settled(id: bytes, problem: TaskError | None, value: bytes = NOTHING) -> PromiseSettled:
    """Return what the code learns of a signal, or of the end of a run."""
    return history.PromiseResolved(id, value) if problem is None else history.PromiseRejected(id, problem)


def not_found(target: Target) -> TaskError:
    """Say that there is no such run."""
    return TaskError("NotFound", str(NotFound.by_id("run", str(target))), phase=REFUSED)


def wrong_state(verb: str, target: Target, why: str) -> TaskError:
    """Say why a run cannot be signalled or cancelled."""
    return TaskError("WrongState", f"Cannot {verb} run {target}: {why}.", phase=REFUSED)


def has_ended(verb: str, target: Target, state: str) -> TaskError:
    """Say that a run has ended before."""
    return wrong_state(verb, target, f"it is in state {str(state)!r}")


def unknown(problem: str) -> TaskError:
    """Say that the workflow of a run takes no such signal."""
    return TaskError("UnknownHandler", problem, phase=REFUSED)


def failure(state: str, error: TaskError | None) -> TaskError | None:
    """Return the error of a run that ended in a state; None if it succeeded."""
    if state == RunState.SUCCESS:
        return None
    return error or TaskError(state.title(), f"The run was {state}." if state != RunState.FAILED else "The run failed.")


def raised(what: str, error: TaskError) -> OrchestratorError:
    """Return the exception that the code gets for it."""
    if error.phase == REFUSED:
        return _REFUSALS.get(error.kind, WrongState)(error.message)
    if error.kind == RunState.CANCELLED.title():
        return RunFailed(f"{what} was cancelled.")
    return RunFailed(f"{what} failed: {error.kind}: {error.message}", kind=error.kind, data=error.attributes)
