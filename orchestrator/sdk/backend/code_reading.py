"""Read calls about runs of workflows as code: their state, history and end.

The chain of a run is the run itself and all runs in which its workflow has continued as new or was repeated by a reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.activation import NO_HANDLER
from orchestrator.domain.ids import successor_id, to_text
from orchestrator.domain.limits.lane_limits import scoped
from orchestrator.domain.runs import CONTINUATION_REASONS, TERMINATED
from orchestrator.domain.sealed import reveal_error, reveal_event
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.errors import NotFound, Unavailable, WrongState
from orchestrator.sdk.backend.part import GOING_ON, Part, cannot_be_asked, overdue, reading
from orchestrator.sdk.backend.waiting import FindEnd
from orchestrator.sdk.calls.code import CodeWork
from orchestrator.sdk.calls.waits import MISSING
from orchestrator.sdk.code.recording import Recording
from orchestrator.sdk.waiting.steps import Steps
from orchestrator.sealing import reveal, reveal_text
from orchestrator.store.code import histories, reads, runs
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code.keys import Sent
from orchestrator.store.code.reads import CodeRunOutcome
from orchestrator.store.runs import stuck
from orchestrator.store.tasks import results
from orchestrator.time_limits import TimeLimit
from orchestrator.transport.codec import Ended


class CodeReading(Part, CodeWork):
    """Read calls about runs of code."""

    reached = reading(run_keys.reached)
    known = reading(runs.runs_of_workflow)

    def status(self, run: bytes) -> str:
        _, outcome = self._last(run)
        return "stuck" if outcome.stuck is not None else named(outcome)

    def state(self, run: bytes) -> bytes:
        last, _ = self._last(run)
        with self._reading() as connection:
            commands = histories.events_by_code(connection, last, with_timers=False)
        state: dict[str, msgspec.Raw] = {}
        for command in commands:
            if isinstance(command, history.StateSet) and not command.attribute:
                state[command.key] = msgspec.Raw(reveal(command.value))
            elif isinstance(command, history.StateCleared) and not command.is_attribute:
                state.pop(command.key, None)
        return msgspec.msgpack.encode(state)

    def attributes(self, run: bytes) -> bytes:
        last, _ = self._last(run)
        with self._reading() as connection:
            return msgspec.msgpack.encode(reads.attributes(connection, last))

    def _stuck(self, run: bytes) -> dict[str, Any] | None:
        """Return why the newest run of a chain is stuck; None if it is not stuck, or Postgres is unavailable."""
        try:
            with self._reading() as connection:
                return stuck.reason(connection, runs.latest(connection, [run]).get(run, run))
        except Unavailable:
            return None

    def overdue(self, run: bytes, update: str | None = None) -> str:
        """Describe why the newest run of a chain has not ended or answered in time.

        For an update, say if the code has no handler for it.
        """
        try:
            with self._reading() as connection:
                last = runs.latest(connection, [run])[run]
                reason, waiting = stuck.reason(connection, last), reads.waiting(connection, last)
        except Unavailable:
            return cannot_be_asked()
        if reason is not None:
            return f"It is stuck: {reason['kind']}: {reveal_text(reason['message'])}".removesuffix(".")
        waiting_updates: list[str] = waiting.get("updates", [])
        unhandled = next((text for text in waiting_updates if text.startswith(f"{update}{NO_HANDLER}")), None)
        if unhandled is not None:
            return f"It has received update {unhandled}"
        why = overdue(self._connections, last)
        return why if update is None or why != GOING_ON else self._unanswered(last)

    def _unanswered(self, run: bytes) -> str:
        """Describe which workers could answer a request to a run that has no known obstacle."""
        with self._reading() as connection:
            answering = reads.answering_workers(connection, run)
        if answering is None:
            return GOING_ON
        subject = f"This needs a worker of queue {answering.queue!r} that has workflow {answering.workflow!r}:"
        if not answering.workers:
            return f"{subject} none is live. Start one: orchestrator worker --app module:app --queues {answering.queue}"
        return (
            f"{subject} none of the {answering.workers} live ones has answered: they are busy, or were lost a "
            "moment ago. Try again"
        )

    def find(self, workflow: str, key: str) -> bytes | None:
        full = scoped(workflow, key)
        with self._reading() as connection:
            return run_keys.holders(connection, [full]).get(full)

    def history(self, run: bytes) -> Recording:
        self._outcome(run)
        with self._reading() as connection:
            return Recording(run, [reveal_event(event) for event in histories.read(connection, run)])

    # -- a run, or the newest run of its chain

    def _exists(self, run: bytes) -> bool:
        with self._reading() as connection:
            return bool(results.run_states(connection, [run]))

    def _outcome(self, run: bytes) -> CodeRunOutcome:
        with self._reading() as connection:
            outcome = reads.outcome(connection, run)
            exists = outcome is not None or results.progress(connection, run) is not None
        if not exists:
            raise NotFound.by_id("run", to_text(run))
        if outcome is None:
            raise NotFound(
                f"Run {to_text(run)} is not a run of a workflow as code: only those have a history, and accept "
                f"messages and resets. To see its steps or tasks: orchestrator runs show {to_text(run)}. To run "
                f"steps again: orchestrator runs rerun {to_text(run)} --from STEP"
            )
        return outcome

    def _last(self, run: bytes) -> tuple[bytes, CodeRunOutcome]:
        """Return the newest run of the chain of a run, and the outcome of that run."""
        outcome = self._outcome(run)
        while outcome.reason in CONTINUATION_REASONS:
            with self._reading() as connection:
                run = runs.latest(connection, [run])[run]
            outcome = self._outcome(run)
        return run, outcome

    def _open(self, run: bytes, verb: str) -> bytes:
        """Return the newest run of a chain. Raise WrongState if it has ended; `verb` is for the message."""
        run, outcome = self._last(run)
        if outcome.status in ENDED_RUN_STATES:
            raise WrongState(f"Cannot {verb} run {to_text(run)}: it is in state {named(outcome)!r}.")
        return run

    # -- ends

    def wait(self, run: bytes, limit: TimeLimit, sent: Sent | None = None) -> Steps[Ended | None]:
        """Wait until the last run of a chain has ended, and return its end; None on timeout.

        If the run had ended before the signal `sent` arrived, the chain continues with the run that received it.
        """
        while True:
            ended = yield from self._waiting.wait(run, self._end_finder(run, sent), limit)
            with limit:
                following = None if ended is None else self._following(run, ended, sent)
            if following is None:
                return ended
            run, sent = following

    def _following(self, run: bytes, ended: Ended, sent: Sent | None) -> tuple[bytes, Sent | None] | None:
        """Return the run to wait for after the end of a run; None if the chain has ended."""
        if ended.state == RunState.SUCCESS and ended.error is not None:
            return successor_id(run), sent
        if sent is None:
            return None
        try:
            reached = self.reached(sent)
        except Unavailable:
            reached = None
        if reached is None:
            return run, sent  # not decided yet: wait again
        return None if reached == sent.run else (reached, None)

    def _end_finder(self, run: bytes, sent: Sent | None) -> FindEnd:
        def find_end() -> Ended | None:
            outcome = self._outcome(run)
            if outcome.status not in ENDED_RUN_STATES or (sent is not None and self.reached(sent) is None):
                return None
            if outcome.reason in CONTINUATION_REASONS:
                return Ended(run, RunState.SUCCESS, None, TaskError("Continued", "It continued as another run."))
            error = outcome.error and reveal_error(outcome.error)
            return Ended(run, outcome.status, reveal(outcome.result), error)

        return find_end

    def find_ends(self, runs: Sequence[bytes]) -> list[Ended]:
        """Return the ends of runs that have ended, continue in another run, or (with an error) are no runs of code."""
        with self._reading() as connection:
            states = results.run_states(connection, runs)
        ends = []
        for run in runs:
            if run in states and states[run] not in ENDED_RUN_STATES:
                continue
            try:
                ended = self._end_finder(run, None)()
            except NotFound as error:
                ended = Ended(run, MISSING, None, TaskError(type(error).__name__, str(error)))
            if ended is not None:
                ends.append(ended)
        return ends


def named(outcome: CodeRunOutcome) -> str:
    """Return the state of a run. A terminated run is stored as cancelled."""
    was_terminated = outcome.status == RunState.CANCELLED and outcome.reason == TERMINATED
    return TERMINATED if was_terminated else outcome.status
