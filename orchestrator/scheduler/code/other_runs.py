"""Messages between code runs: signals, cancellations, queries and awaited ends, all runs of a tick together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Query
from orchestrator.domain.code.commands import SignalRun
from orchestrator.domain.code.ends import ENCODED_NONE, REQUESTED
from orchestrator.domain.code.history import Fact
from orchestrator.domain.code.other_runs import (
    CANCEL,
    QUERY,
    Target,
    failure,
    has_ended,
    is_wait,
    not_found,
    settled,
    unknown_signal,
    wrong_state,
)
from orchestrator.domain.ids import run_log_fields
from orchestrator.domain.states import ENDED_RUN_STATES, RunState
from orchestrator.domain.tasks.task import TaskError
from orchestrator.scheduler.code.runs import CodeRuns, append_facts
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store import inbox, shards
from orchestrator.store.code import expectations, reads
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import NewPromise
from orchestrator.store.code.reads import CodeRunOutcome
from orchestrator.store.fleet import unknown_signals
from orchestrator.store.inbox import RequestKind
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")


_PAGE = 1_000
"""Waits of earlier leaders checked in one tick."""


def send(tx: Transaction, code: CodeRuns, sent: Sequence[tuple[bytes, SignalRun]], ending: Container[bytes]) -> None:
    """Deliver signals, cancellations and queries between runs, to the latest successors of their targets.

    Report the outcome to senders that wait for it, except those that are `ending`.
    """
    if queries := [(sender, message) for sender, message in sent if message.name.startswith(QUERY)]:
        _send_queries(tx, code, [(sender, message) for sender, message in queries if sender not in ending])
        sent = [(sender, message) for sender, message in sent if not message.name.startswith(QUERY)]
    runs = _latest_runs(tx, {Target(message.run, message.key) for _, message in sent})
    named = {
        (run, message.name)
        for _, message in sent
        if message.name != CANCEL and (run := runs.get(Target(message.run, message.key)))
    }
    unfit = unknown_signals(tx.connection, named) if named else {}
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for _, message in sent:
        run = runs.get(Target(message.run, message.key))
        if run is not None and (run, message.name) not in unfit:
            facts[run].append(
                history.RunCancelRequested(REQUESTED)
                if message.name == CANCEL
                else history.SignalReceived(message.name, message.value)
            )
    delivered = append_facts(tx, facts)
    elsewhere = (
        shards.open_elsewhere(tx.connection, tx.shard, [*facts.keys() - delivered]) if tx.shard is not None else {}
    )
    outcomes = reads.outcomes(tx.connection, set(runs.values()) - delivered)
    replies: dict[bytes, list[Fact]] = defaultdict(list)
    cancelled: list[inbox.NewRequest] = []
    for sender, message in sent:
        target = Target(message.run, message.key)
        run = runs.get(target)
        refused = unfit.get((run or b"", message.name))
        if run in elsewhere and refused is None:
            _send_to_shard(tx, elsewhere[run], run, message)
        if refused is not None:
            refusal: TaskError | None = unknown_signal(refused)
        else:
            refusal = (
                None
                if run in delivered or run in elsewhere
                else _refusal(target, outcomes.get(run or b""), message.name)
            )
        if refusal is None and run is not None and run not in delivered and run not in elsewhere:  # a DAG or a flow
            cancelled.append(inbox.NewRequest(run, "{}"))
        if message.id is not None and sender not in ending:
            replies[sender].append(settled(message.id, refusal))
        elif refusal is not None:
            _warn(run or message.run, message.name, refused)
    if cancelled:
        inbox.add_all(tx.connection, RequestKind.CANCEL_RUN, cancelled)
        tx.result.wake.requests = True
    append_facts(tx, replies)


def _send_queries(tx: Transaction, code: CodeRuns, sent: Sequence[tuple[bytes, SignalRun]]) -> None:
    """Forward the queries of runs to the code of other runs, ended or not."""
    found = _latest_runs(tx, {Target(query.run, query.key) for _, query in sent})
    runs = [*set(found.values())]
    of_code, outcomes = code_runs.of_code(tx.connection, runs), reads.outcomes(tx.connection, runs)
    elsewhere = shards.open_elsewhere(tx.connection, tx.shard, runs) if tx.shard is not None else {}
    forwarded: list[tuple[bytes, Query]] = []
    replies: dict[bytes, list[Fact]] = defaultdict(list)
    for sender, query in sent:
        target = Target(query.run, query.key)
        run = found.get(target, b"")
        assert query.id is not None
        if run in elsewhere:
            refusal = wrong_state(
                "query", target, "it is in another shard; requests between shards are not supported yet"
            )
        elif run not in outcomes:
            refusal = not_found(target)
        elif run not in of_code:
            refusal = wrong_state("query", target, "it is not a run of a workflow as code")
        else:
            code.queries.askers[query.id] = sender
            forwarded.append((run, Query(query.id, query.name.removeprefix(QUERY), query.value)))
            continue
        replies[sender].append(settled(query.id, refusal))
    append_facts(tx, replies)
    code.ask(tx, forwarded)


def _send_to_shard(tx: Transaction, shard: int, run: bytes, message: SignalRun) -> None:
    is_cancel = message.name == CANCEL
    body = {} if is_cancel else {"name": message.name, "value": message.value}
    kind = RequestKind.CANCEL_RUN if is_cancel else RequestKind.SIGNAL
    shards.send(tx.connection, shard, kind, run, msgspec.json.encode(body).decode())


def _refusal(target: Target, outcome: CodeRunOutcome | None, name: str) -> TaskError | None:
    """Return why a run cannot receive a message; None if it can, or if a run to cancel is already cancelled."""
    if outcome is None:
        return not_found(target)
    verb = "cancel" if name == CANCEL else "signal"
    if outcome.status in ENDED_RUN_STATES:
        is_done = name == CANCEL and outcome.status == RunState.CANCELLED
        return None if is_done else has_ended(verb, target, outcome.status)
    return None if name == CANCEL else wrong_state(verb, target, "it is not a run of a workflow as code")


def _warn(run: bytes, name: str, refused: str | None) -> None:
    ids = run_log_fields(run)
    if refused is not None:
        log.warning("run.signal_unknown run=%s signal=%s: %s", *ids.values(), name, refused, extra=ids)
    else:
        log.warning(
            "run.signal_late run=%s signal=%s: the run has ended or does not exist", *ids.values(), name, extra=ids
        )


def _latest_runs(tx: Transaction, targets: Iterable[Target]) -> dict[Target, bytes]:
    """Return the latest successors of targets. Ids that no run has are left out."""
    targets = list(targets)
    keys = [target.key for target in targets if target.key]
    holders = run_keys.holders(tx.connection, keys) if keys else {}
    runs = {target: holders.get(target.key) if target.key else target.run for target in targets}
    latest = code_runs.latest(tx.connection, {run for run in runs.values() if run is not None})
    return {target: latest[run] for target, run in runs.items() if run is not None}


# -- waiting for the ends of runs


def wait(tx: Transaction, code: CodeRuns, waits: Sequence[NewPromise]) -> None:
    """Make runs wait for the ends of other runs. Ends that have already come are delivered at once."""
    code.has_waits = True
    expectations.create_promises(tx.connection, _open(tx, waits))


def ended(tx: Transaction, runs: Sequence[bytes]) -> None:
    """Deliver ends to the runs that wait for these runs. A wait for a run that continues moves to its successor."""
    if found := expectations.waits(tx.connection, [Target(run).wait for run in runs]):
        _update_waits(tx, found)


def look_after(tx: Transaction, code: CodeRuns) -> None:
    """Deliver ends that a leader of the previous release missed. Each wait is checked once."""
    assert code.waits_checked_to is not None
    found = expectations.waits_after(tx.connection, *code.waits_checked_to, _PAGE)
    code.has_waits |= bool(found)
    if found:
        _update_waits(tx, found)
    tx.result.code.waits_checked_to = (found[-1].name, found[-1].id) if len(found) == _PAGE else ("", b"")


def _update_waits(tx: Transaction, waits: Sequence[NewPromise]) -> None:
    open_waits = {(wait.run, wait.id): wait for wait in _open(tx, waits)}
    ended_waits = [(wait.run, wait.id) for wait in waits if (wait.run, wait.id) not in open_waits]
    if ended_waits:
        expectations.forget_promises(tx.connection, ended_waits)
    if renamed := [wait for wait in open_waits.values() if wait not in waits]:
        expectations.rename_waits(tx.connection, renamed)


def _open(tx: Transaction, waits: Sequence[NewPromise]) -> list[NewPromise]:
    """Deliver the ends that have come. Return the remaining waits, moved to the latest successors of their targets."""
    targets = {wait.name: Target.of_wait(wait.name) for wait in waits}
    found = _latest_runs(tx, set(targets.values()))
    outcomes = reads.outcomes(tx.connection, set(found.values()))
    elsewhere = shards.open_elsewhere(tx.connection, tx.shard, [*found.values()]) if tx.shard is not None else {}
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    remaining: list[NewPromise] = []
    for wait in waits:
        target = targets[wait.name]
        run = found.get(target, b"")
        end = outcomes.get(run)
        if end is not None and end.status in ENDED_RUN_STATES:
            facts[wait.run].append(settled(wait.id, failure(end.status, end.error), end.result or ENCODED_NONE))
        elif run in elsewhere:
            why = "it is in another shard; waiting for a run in another shard is not supported yet"
            facts[wait.run].append(settled(wait.id, wrong_state("wait for", target, why)))
        elif end is not None or (run != target.run and not target.key):  # a reset run: the next begins soon
            remaining.append(wait._replace(name=Target(run).wait))
        else:
            facts[wait.run].append(settled(wait.id, not_found(target)))
    append_facts(tx, facts)
    return remaining


def split(promises: Sequence[NewPromise]) -> tuple[list[NewPromise], list[NewPromise]]:
    """Split promises into those that people settle and waits for the ends of runs."""
    return [wait for wait in promises if not is_wait(wait.name)], [wait for wait in promises if is_wait(wait.name)]
