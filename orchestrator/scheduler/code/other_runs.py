"""What runs of code say to others, and learn of them: signals, cancels, queries and ends, all of a tick at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Query
from orchestrator.domain.code.commands import SignalRun
from orchestrator.domain.code.ends import ASKED, NOTHING
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
    unknown,
    wrong_state,
)
from orchestrator.domain.ids import about_run
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
"""Waits of earlier leaders that are looked at in one tick."""


def send(tx: Transaction, code: CodeRuns, sent: Sequence[tuple[bytes, SignalRun]], ending: Container[bytes]) -> None:
    """Hand signals, cancels and queries that runs send each other to those in which their targets go on now.

    Tell the senders that wait for it what became of them; those that are `ending` do not.
    """
    if queries := [(sender, one) for sender, one in sent if one.name.startswith(QUERY)]:
        _ask(tx, code, [(sender, one) for sender, one in queries if sender not in ending])
        sent = [(sender, one) for sender, one in sent if not one.name.startswith(QUERY)]
    found = _found(tx, {Target(one.run, one.key) for _, one in sent})
    named = {(run, one.name) for _, one in sent if one.name != CANCEL and (run := found.get(Target(one.run, one.key)))}
    unfit = unknown_signals(tx.connection, named) if named else {}
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for _, one in sent:
        run = found.get(Target(one.run, one.key))
        if run is not None and (run, one.name) not in unfit:
            facts[run].append(
                history.RunCancelRequested(ASKED) if one.name == CANCEL else history.SignalReceived(one.name, one.value)
            )
    heard = append_facts(tx, facts)
    away = shards.open_elsewhere(tx.connection, tx.shard, [*facts.keys() - heard]) if tx.shard is not None else {}
    known = reads.outcomes(tx.connection, set(found.values()) - heard)
    told: dict[bytes, list[Fact]] = defaultdict(list)
    cancelled: list[inbox.NewRequest] = []
    for sender, one in sent:
        target = Target(one.run, one.key)
        run = found.get(target)
        refused = unfit.get((run or b"", one.name))
        if run in away and refused is None:
            _send_away(tx, away[run], run, one)
        if refused is not None:
            problem: TaskError | None = unknown(refused)
        else:
            problem = None if run in heard or run in away else _problem(target, known.get(run or b""), one.name)
        if problem is None and run is not None and run not in heard and run not in away:  # of a DAG or a flow
            cancelled.append(inbox.NewRequest(run, "{}"))
        if one.id is not None and sender not in ending:
            told[sender].append(settled(one.id, problem))
        elif problem is not None:
            _warn(run or one.run, one.name, refused)
    if cancelled:
        inbox.add_all(tx.connection, RequestKind.CANCEL_RUN, cancelled)
        tx.result.wake.requests = True
    append_facts(tx, told)


def _ask(tx: Transaction, code: CodeRuns, sent: Sequence[tuple[bytes, SignalRun]]) -> None:
    """Have the queries of runs answered by others, ended or not."""
    found = _found(tx, {Target(one.run, one.key) for _, one in sent})
    runs = [*set(found.values())]
    of_code, known = code_runs.of_code(tx.connection, runs), reads.outcomes(tx.connection, runs)
    away = shards.open_elsewhere(tx.connection, tx.shard, runs) if tx.shard is not None else {}
    asked: list[tuple[bytes, Query]] = []
    told: dict[bytes, list[Fact]] = defaultdict(list)
    for sender, one in sent:
        target = Target(one.run, one.key)
        run = found.get(target, b"")
        assert one.id is not None
        if run in away:
            problem = wrong_state("query", target, "it is in another shard, and to ask that needs one shard for now")
        elif run not in known:
            problem = not_found(target)
        elif run not in of_code:
            problem = wrong_state("query", target, "it is no run of a workflow as code")
        else:
            code.queries.askers[one.id] = sender
            asked.append((run, Query(one.id, one.name.removeprefix(QUERY), one.value)))
            continue
        told[sender].append(settled(one.id, problem))
    append_facts(tx, told)
    code.ask(tx, asked)


def _send_away(tx: Transaction, shard: int, run: bytes, one: SignalRun) -> None:
    """Leave a message to the leader of another shard."""
    is_cancel = one.name == CANCEL
    body = {} if is_cancel else {"name": one.name, "value": one.value}
    kind = RequestKind.CANCEL_RUN if is_cancel else RequestKind.SIGNAL
    shards.send(tx.connection, shard, kind, run, msgspec.json.encode(body).decode())


def _problem(target: Target, known: CodeRunOutcome | None, name: str) -> TaskError | None:
    """Say why a run does not get a message; None if it does, or was cancelled before."""
    if known is None:
        return not_found(target)
    verb = "cancel" if name == CANCEL else "signal"
    if known.status in ENDED_RUN_STATES:
        is_done = name == CANCEL and known.status == RunState.CANCELLED
        return None if is_done else has_ended(verb, target, known.status)
    return None if name == CANCEL else wrong_state(verb, target, "it is no run of a workflow as code")


def _warn(run: bytes, name: str, refused: str | None) -> None:
    whose = about_run(run)
    if refused is not None:
        log.warning("run.signal_unknown run=%s signal=%s: %s", *whose.values(), name, refused, extra=whose)
    else:
        log.warning(
            "run.signal_late run=%s signal=%s: the run has ended or does not exist", *whose.values(), name, extra=whose
        )


def _found(tx: Transaction, targets: Iterable[Target]) -> dict[Target, bytes]:
    """Return the runs in which targets go on now; nothing of a chosen id that no run has."""
    targets = list(targets)
    keys = [target.key for target in targets if target.key]
    holders = run_keys.holders(tx.connection, keys) if keys else {}
    runs = {target: holders.get(target.key) if target.key else target.run for target in targets}
    latest = code_runs.latest(tx.connection, {run for run in runs.values() if run is not None})
    return {target: latest[run] for target, run in runs.items() if run is not None}


# -- waits for ends


def wait(tx: Transaction, code: CodeRuns, waits: Sequence[NewPromise]) -> None:
    """Let runs wait for the ends of others; of those that have ended, they learn at once."""
    code.has_waits = True
    expectations.create_promises(tx.connection, _open(tx, waits))


def ended(tx: Transaction, runs: Sequence[bytes]) -> None:
    """Tell the runs that wait for the ends of these; of one that goes on in another, they wait for that one."""
    if found := expectations.waits(tx.connection, [Target(run).wait for run in runs]):
        _go_on(tx, found)


def look_after(tx: Transaction, code: CodeRuns) -> None:
    """Tell runs of ends that a leader of the previous release did not look for; each wait is looked at once."""
    assert code.looked_to is not None
    found = expectations.waits_after(tx.connection, *code.looked_to, _PAGE)
    code.has_waits |= bool(found)
    if found:
        _go_on(tx, found)
    tx.result.code.looked_to = (found[-1].name, found[-1].id) if len(found) == _PAGE else ("", b"")


def _go_on(tx: Transaction, waits: Sequence[NewPromise]) -> None:
    still = {(one.run, one.id): one for one in _open(tx, waits)}
    over = [(one.run, one.id) for one in waits if (one.run, one.id) not in still]
    if over:
        expectations.forget_promises(tx.connection, over)
    if renamed := [one for one in still.values() if one not in waits]:
        expectations.rename_waits(tx.connection, renamed)


def _open(tx: Transaction, waits: Sequence[NewPromise]) -> list[NewPromise]:
    """Tell runs of the ends that have come; return the other waits, for the runs in which their targets go on."""
    targets = {one.name: Target.of_wait(one.name) for one in waits}
    found = _found(tx, set(targets.values()))
    known = reads.outcomes(tx.connection, set(found.values()))
    away = shards.open_elsewhere(tx.connection, tx.shard, [*found.values()]) if tx.shard is not None else {}
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    left: list[NewPromise] = []
    for one in waits:
        target = targets[one.name]
        run = found.get(target, b"")
        end = known.get(run)
        if end is not None and end.status in ENDED_RUN_STATES:
            facts[one.run].append(settled(one.id, failure(end.status, end.error), end.result or NOTHING))
        elif run in away:
            why = "it is in another shard, and to wait for that needs one shard for now"
            facts[one.run].append(settled(one.id, wrong_state("wait for", target, why)))
        elif end is not None or (run != target.run and not target.key):  # of a reset run, the next is about to begin
            left.append(one._replace(name=Target(run).wait))
        else:
            facts[one.run].append(settled(one.id, not_found(target)))
    append_facts(tx, facts)
    return left


def split(promises: Sequence[NewPromise]) -> tuple[list[NewPromise], list[NewPromise]]:
    """Return promises for people to settle, and waits for the ends of runs."""
    return [one for one in promises if not is_wait(one.name)], [one for one in promises if is_wait(one.name)]
