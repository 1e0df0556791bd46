"""Start the runs that running tasks request (`domain/tasks/starts.py`), and answer with the runs or the errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from orchestrator.domain.code.history import HistoryItem, RunWanted, SignalReceived
from orchestrator.domain.dag.definition import Definition, resolve_params
from orchestrator.domain.ids import run_log_fields, to_text
from orchestrator.domain.plain import REFUSALS, stored_json
from orchestrator.domain.tasks.headers import headers_of
from orchestrator.domain.tasks.starts import StartCode, StartMany, StartSteps, of_task
from orchestrator.domain.tasks.task import KeyHolder, NewTask, TaskError
from orchestrator.errors import Duplicate, InvalidWorkflow, NotFound, PayloadError
from orchestrator.scheduler.code.runs import append_facts
from orchestrator.scheduler.runs.creation import create_runs
from orchestrator.scheduler.tasks.creation import create_tasks
from orchestrator.scheduler.transaction import Transaction
from orchestrator.sealing import open_json
from orchestrator.store import shards
from orchestrator.store.code import expectations
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import PromiseAnswer
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag import workflows
from orchestrator.store.dag.workflows import Stored
from orchestrator.store.flow import runs as flow_runs
from orchestrator.store.runs.creation import NewRun
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_REFUSED = (InvalidWorkflow, NotFound, PayloadError, Duplicate, *REFUSALS)


def start_runs(tx: Transaction, tasks: Sequence[NewTask]) -> dict[bytes, KeyHolder]:
    """Start runs. Return for each request the run that exists now. A repeated request starts nothing."""
    steps: list[tuple[NewRun, StartSteps]] = []
    code: list[NewRun] = []
    answers: dict[bytes, KeyHolder] = {}
    definitions: dict[str, Stored] = {}
    for task in tasks:
        try:
            start = of_task(task)
            if isinstance(start, StartSteps):
                steps.append((_of_task(_run_of_steps(tx, task.id, start, definitions), task), start))
                continue
            if isinstance(start, StartMany):
                _start_many(tx, task, start)
                answers[task.id] = KeyHolder(task.id)
                continue
            answers[task.id] = KeyHolder(_holder(tx, task, start))
            if answers[task.id].id == task.id:
                code.append(_of_task(_run_of_code(task.id, start), task))
        except _REFUSED as error:
            answers[task.id] = _refused(task.id, error)
    if steps:
        answers |= _start_steps(tx, steps)
    create_runs(tx, code)
    return answers


def _of_task(run: NewRun, task: NewTask) -> NewRun:
    """Return a run with the task that starts it, its trace, and the headers of the request."""
    return run._replace(trace=task.trace, parent_task=task.parent, headers=_headers(task))


def _headers(task: NewTask) -> str | None:
    headers = headers_of(task.options)
    return stored_json(headers) if headers else None


def _start_many(tx: Transaction, task: NewTask, start: StartMany) -> None:
    if create_runs(tx, [_of_task(NewRun(task.id, start.name, len(start.tasks)), task)]):
        create_tasks(tx, [msgspec.structs.replace(item, parent=task.parent) for item in start.tasks])


def _run_of_flow(tx: Transaction, run: bytes, start: StartSteps) -> NewRun:
    name, version = start.workflow, start.version
    found = flow_runs.latest(tx.connection, name) if version is None else flow_runs.read(tx.connection, name, version)
    if found is None:
        which = f"flow {name!r}" if version is None else f"version {version} of flow {name!r}"
        raise NotFound(f"There is no {which}. Publish it with `orchestrator flows publish FILE`.")
    return flow_runs.new_run(name, found.version, run, _params_of(start), start.tags)._replace(key=start.key)


def _run_of_steps(tx: Transaction, run: bytes, start: StartSteps, definitions: dict[str, Stored]) -> NewRun:
    if start.flow:
        return _run_of_flow(tx, run, start)
    stored = definitions.get(start.workflow) or workflows.latest(tx.connection, start.workflow)
    if stored is None and start.definitions:
        workflows.compose(tx.connection, [msgspec.json.decode(item, type=Definition) for item in start.definitions])
        stored = workflows.latest(tx.connection, start.workflow)
    if stored is None:
        raise NotFound(f"There is no workflow {start.workflow!r}. Apply it with `orchestrator workflows apply FILE`.")
    definitions[start.workflow] = stored
    params = resolve_params(stored.definition, _params_of(start), tx.now)
    new = dags.new_run(stored.definition, stored.version, run, params, start.tags)
    return new._replace(key=start.key, name=start.name or new.name)


def _params_of(start: StartSteps) -> Any:
    params = open_json(msgspec.json.decode(start.params))
    if isinstance(params, msgspec.msgpack.Ext):
        raise PayloadError(
            f"The parameters of workflow {start.workflow!r} are sealed, but the scheduler has no data key for them "
            f"(setting data_keys)."
        )
    return params


def _start_steps(tx: Transaction, steps: Sequence[tuple[NewRun, StartSteps]]) -> dict[bytes, KeyHolder]:
    answers: dict[bytes, KeyHolder] = {}
    if tx.shard is not None:
        for run, _ in steps:
            if run.key and (other := shards.run_of_key(tx.connection, tx.shard, run.workflow or "", run.key)):
                answers[run.id] = KeyHolder(other)
        steps = [item for item in steps if item[0].id not in answers]
    started = create_runs(tx, [run for run, _ in steps])
    for run, start in steps:
        answers[run.id] = KeyHolder(run.id)
        if run.id not in started and run.key is not None:
            try:
                other = dags.find_same(tx.connection, run, _params_of(start))
            except Duplicate as error:
                answers[run.id] = _refused(run.id, error)
            else:
                answers[run.id] = KeyHolder(other or run.id)
    return answers


def _refused(run: bytes, error: Exception) -> KeyHolder:
    log.warning("run.not_started run=%s error=%s", to_text(run), error, extra=run_log_fields(run))
    return KeyHolder(run, error=TaskError(type(error).__name__, str(error)))


def _holder(tx: Transaction, task: NewTask, start: StartCode) -> bytes:
    """Return the run that holds the requested id: the new run itself, unless the id is taken."""
    run = task.id
    if start.key is None:
        return run
    anew = start.signal is not None or start.on_conflict == "anew"
    if tx.shard is not None and (other := _open_elsewhere(tx, tx.shard, start)) is not None:
        return other
    holder = run_keys.take(tx.connection, start.key, run, anew=anew)
    if holder is None or holder[0] == run:
        return run
    if start.signal is not None:
        if expectations.find_answer(tx.connection, run) is None:  # otherwise a repeated request: the run has the signal
            append_facts(tx, {holder[0]: [_signal_or(task, start, start.key)]})
            expectations.answer(tx.connection, [PromiseAnswer(run, holder[0])], tx.now)
    elif start.on_conflict != "return":
        raise Duplicate(
            f"Workflow {start.started.workflow!r} has run {to_text(holder[0])} ({holder[1]}) under this id. Start with "
            f"on_conflict='return' to get that run, or 'anew' to start a new one once it has ended.",
            to_text(holder[0]),
        )
    return holder[0]


def _open_elsewhere(tx: Transaction, shard: int, start: StartCode) -> bytes | None:
    """Return the open run of another shard with the requested id, or raise Duplicate, as the request demands."""
    holders = list(run_keys.holders(tx.connection, [start.key or ""]).values())
    for run in shards.open_elsewhere(tx.connection, shard, holders):
        if start.signal is None and start.on_conflict == "return":
            return run
        raise Duplicate(
            f"Run {to_text(run)} has this id, in another shard. Inside a task, only on_conflict='return' works across "
            f"shards; otherwise start the run from outside, or use one shard.",
            to_text(run),
        )
    return None


def _signal_or(task: NewTask, start: StartCode, key: str) -> SignalReceived:
    """Return the signal for the run that holds the id, with the run to start if that one ends without seeing it."""
    assert start.signal is not None
    of, signal = start.started, start.signal
    options = (start.timeout, start.tags, start.pinned, task.trace, _headers(task))
    fallback = RunWanted(task.id, key, of.workflow, of.version, of.payload, of.queue, *options, of.attributes)
    return SignalReceived(signal.name, signal.value, fallback)


def _run_of_code(run: bytes, start: StartCode) -> NewRun:
    facts: list[HistoryItem] = [start.started]
    if start.signal is not None:
        facts.append(start.signal)
    return code_runs.new_run(run, facts, pinned=start.pinned)._replace(timeout=start.timeout, tags=start.tags)
