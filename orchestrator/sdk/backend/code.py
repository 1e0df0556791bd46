"""Runs of workflows as code: started, and all that can be done with them then."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection

from orchestrator.domain.code import history
from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.names import scoped
from orchestrator.domain.tasks.starts import OnConflict
from orchestrator.errors import Duplicate, Forbidden, Uncertain, WrongState
from orchestrator.sdk.acting import may_operate
from orchestrator.sdk.backend.code_requests import CodeRequests, add_request
from orchestrator.sealing import CALL, VALUE
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import reads, runs
from orchestrator.store.code.signals import Sent
from orchestrator.store.inbox import RequestKind
from orchestrator.store.runs import creation
from orchestrator.trace_context import current_trace


class CodeBackend(CodeRequests):
    """What a client can do with runs of code."""

    def start(
        self,
        run_id: bytes,
        started: history.RunStarted,
        *,
        timeout: float | None,
        tags: str,
        key: str | None,
        on_conflict: OnConflict,
        signal: history.SignalReceived | None,
        pinned: bool,
        repeated: bool = False,
    ) -> tuple[bytes, Sent | None]:
        """Create a run; return its id, or that of the run which has the chosen id, as `on_conflict` says.

        With a signal, a run that is open under that id is signalled instead, and one that has ended is followed by a
        new one. Should it end before the signal reaches it, the leader starts the new one: what was sent, and to whom,
        is returned as well. If this is `repeated`, the run may have been created before.
        """
        if repeated and self._is_there(run_id):
            return run_id, None
        if repeated and signal is not None:
            raise Uncertain(f"It is not known whether signal {signal.name!r} was sent to the run under the id {key!r}.")
        started = msgspec.structs.replace(started, payload=self._outgoing(CALL, started.payload, run_id))
        if signal is not None:
            signal = msgspec.structs.replace(signal, value=self._outgoing(VALUE, signal.value, run_id))
        sent: Sent | None = None
        facts: list[history.RunStarted | history.SignalReceived] = [started]
        if signal is not None:
            facts.append(signal)
        run = runs.new_run(run_id, facts, pinned=pinned)._replace(timeout=timeout, tags=tags, trace=current_trace())
        with self._connections.changing(f"run {to_text(run_id)} was stored") as connection:
            full_key = scoped(started.workflow, key or "")
            anew, in_order = signal is not None or on_conflict == "anew", signal is not None and may_operate.get()
            held = None if key is None else run_keys.take(connection, full_key, run.id, anew=anew, in_order=in_order)
            if held is None:
                creation.create(connection, [run])
            elif signal is not None:
                if not may_operate.get():
                    raise Forbidden(
                        f"Signal {signal.name!r}: a run is open under the id {key!r}, and to signal one that is there "
                        f"needs the scope operate. The scope enqueue is enough to start a run with a signal."
                    )
                start = {"key": full_key, "id": run_id, "timeout": timeout, "tags": tags, "pinned": pinned}
                start |= {name: getattr(started, name) for name in ("workflow", "version", "payload", "queue")}
                start |= {} if run.trace is None else {"trace": run.trace}
                request = add_request(
                    connection, RequestKind.SIGNAL, held[0], name=signal.name, value=signal.value, start=start
                )
                sent = Sent(held[0], run_id, request)
                self._connections.record(connection, "signal", "run", to_text(held[0]), name=signal.name)
            elif on_conflict != "return":
                raise Duplicate(
                    f"Workflow {started.workflow!r} has run {to_text(held[0])} ({held[1]}) under the id {key!r}. "
                    f"Start with on_conflict='return' to have that one, or 'anew' to start another once it has ended.",
                    to_text(held[0]),
                )
        return run.id if held is None else held[0], sent

    def rerun(self, connection: Connection, run: bytes, new: bytes, from_step: str | None = None) -> bool:
        """Start a run over, in this transaction; False if this is no run of code at all."""
        again = reads.repeated(connection, run, new)
        if again is None:
            return False
        if from_step is not None:
            raise WrongState(
                f"Run {to_text(run)} is of a workflow as code, which has no steps to begin at. To keep what was done "
                f"up to an event of its history: orchestrator runs reset {to_text(run)} --to EVENT"
            )
        creation.create(connection, [again._replace(trace=current_trace())])
        return True
