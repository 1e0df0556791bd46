"""Messages between code runs: signals, cancels, queries and ends.

To wait for the end of a run, the code creates a promise whose name contains the run, and the leader settles it. Cancels
and queries are signals with reserved names. All these names contain a space, which no user-defined name may contain.
The outcome of a signal and the answer to a query are reported like settled promises. So histories contain nothing that
the previous release cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from orchestrator.domain.code import history
from orchestrator.domain.code.ends import ENCODED_NONE
from orchestrator.domain.code.history import PromiseSettled
from orchestrator.domain.ids import to_text
from orchestrator.domain.states import RunState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import NotFound, OrchestratorError, RunFailed, UnknownHandler, WrongState

CANCEL = "cancel run"
"""The name of a signal that asks a run to cancel itself."""
QUERY = "query "
"""The prefix of the name of a signal that is a query. The query's name follows."""
WAIT = "run "
"""The prefix of the name of a promise that the end of a run settles."""
REFUSED = "refused"
"""The error phase for a run that does not exist, has ended, or does not take such a signal."""
_REFUSALS: Mapping[str, type[OrchestratorError]] = {"NotFound": NotFound, "UnknownHandler": UnknownHandler}
_NO_RUN = bytes(16)


class Target(NamedTuple):
    """Another run, by its id or by its chosen id, as in `run_keys`."""

    run: bytes = _NO_RUN
    key: str = ""

    def __str__(self) -> str:
        return self.key or to_text(self.run)

    @property
    def wait(self) -> str:
        """The name of the promise that the run's end settles."""
        return f"{WAIT}{self}"

    @classmethod
    def of_wait(cls, name: str) -> Target:
        """Return the run in the name of a wait."""
        text = name.removeprefix(WAIT)
        try:
            return cls(UUID(text).bytes)
        except ValueError:  # a chosen id, after the name of its workflow
            return cls(key=text)


def is_wait(name: str) -> bool:
    """Return whether a promise waits for the end of a run."""
    return name.startswith(WAIT)


def settled(id: bytes, problem: TaskError | None, value: bytes = ENCODED_NONE) -> PromiseSettled:
    """Return the event that reports the outcome of a signal or the end of a run."""
    return history.PromiseResolved(id, value) if problem is None else history.PromiseRejected(id, problem)


def not_found(target: Target) -> TaskError:
    """Return the error that there is no such run."""
    return TaskError("NotFound", str(NotFound.by_id("run", str(target))), phase=REFUSED)


def wrong_state(verb: str, target: Target, why: str) -> TaskError:
    """Return the error that a run cannot be signaled or cancelled."""
    return TaskError("WrongState", f"Cannot {verb} run {target}: {why}.", phase=REFUSED)


def has_ended(verb: str, target: Target, state: str) -> TaskError:
    """Return the error that a run has already ended."""
    return wrong_state(verb, target, f"it is in state {str(state)!r}")


def unknown_signal(problem: str) -> TaskError:
    """Return the error that the run's workflow does not take such a signal."""
    return TaskError("UnknownHandler", problem, phase=REFUSED)


def failure(state: str, error: TaskError | None) -> TaskError | None:
    """Return the error of a run that ended in a state, or None if it succeeded."""
    if state == RunState.SUCCESS:
        return None
    return error or TaskError(state.title(), f"The run was {state}." if state != RunState.FAILED else "The run failed.")


def raised(what: str, error: TaskError) -> OrchestratorError:
    """Return the exception that the code gets for an error."""
    if error.phase == REFUSED:
        return _REFUSALS.get(error.kind, WrongState)(error.message)
    if error.kind == RunState.CANCELLED.title():
        return RunFailed(f"{what} was cancelled.")
    return RunFailed(f"{what} failed: {error.kind}: {error.message}", kind=error.kind, data=error.attributes)
