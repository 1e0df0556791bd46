"""Apply requests to code runs: signals, promises, updates, queries."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from orchestrator.domain.code import history
from orchestrator.domain.code.activation import Query
from orchestrator.domain.code.ends import TOO_LATE
from orchestrator.domain.code.history import Fact, RunWanted
from orchestrator.domain.code.promises import Resolution
from orchestrator.domain.code.promises import resolutions as resolutions_of
from orchestrator.domain.ids import run_log_fields, to_text
from orchestrator.domain.tasks.task import TaskError
from orchestrator.scheduler.code.runs import append_facts, reply
from orchestrator.scheduler.runs.creation import create_runs
from orchestrator.scheduler.transaction import Transaction
from orchestrator.store.code import expectations, histories
from orchestrator.store.code import keys as run_keys
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import NewPromise, PromiseAnswer, StoredResolution
from orchestrator.store.inbox import Request, RequestKind
from orchestrator.store.runs.creation import NewRun
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")

_MAX_NAMES = 10
"""Open promises listed in an error, at most."""


def signal(tx: Transaction, items: Sequence[Request]) -> None:
    """Deliver signals to runs. A signal with a start that comes too late starts a run."""
    items = _once(tx, items)
    sent = [(item.target, _signal(item)) for item in items]
    # The sender may have sent other signals to a run that has since taken over the id: these must stay behind those.
    keys = {fact.otherwise.key for _, fact in sent if fact.otherwise is not None}
    holders = run_keys.holders(tx.connection, list(keys)) if keys else {}
    facts: dict[bytes, list[history.SignalReceived]] = defaultdict(list)
    passed: list[PromiseAnswer] = []
    for target, fact in sent:
        run = target if fact.otherwise is None else holders.get(fact.otherwise.key, target)
        facts[run].append(fact)
        if fact.otherwise is not None and run != target:
            passed.append(PromiseAnswer(fact.otherwise.id, run))
    delivered = append_facts(tx, facts)
    reply(tx, [answer for answer in passed if answer.result in delivered])
    named = ((_data(item.body["request"]), item.body["name"]) for item in items if "request" in item.body)
    reply(tx, [PromiseAnswer(request, msgspec.msgpack.encode(name)) for request, name in named])
    late = {run: signals for run, signals in facts.items() if run not in delivered}
    if late:
        _keep_late_signals(tx, late)
        begin_with(tx, late)


def _once(tx: Transaction, items: Sequence[Request]) -> Sequence[Request]:
    """Leave out requests with a sender's id that were applied before or occur twice."""
    ids = {item.id: _data(item.body["request"]) for item in items if "once" in item.body}
    if not ids:
        return items
    seen = histories.requested(tx.connection, {(item.target, ids[item.id]) for item in items if item.id in ids})
    fresh = []
    for item in items:
        if item.id in ids:
            if ids[item.id] in seen:
                continue
            seen.add(ids[item.id])
        fresh.append(item)
    return fresh


def _keep_late_signals(tx: Transaction, late: Mapping[bytes, Sequence[history.SignalReceived]]) -> None:
    """Add late signals to the histories of runs that ended before: the senders were told that they are accepted.

    A reset of the run delivers them, like all signals after its event.
    """
    for_themselves = {run: [item for item in signals if item.otherwise is None] for run, signals in late.items()}
    events = {run: signals for run, signals in for_themselves.items() if signals}
    if events:
        histories.append(tx.connection, events, tx.now, wake=False, late=True)


def begin_with(tx: Transaction, late: Mapping[bytes, Sequence[history.SignalReceived]]) -> None:
    """Start runs with signals that an ended run has not seen, if the sender requested that."""
    by_key: dict[str, list[tuple[RunWanted, history.SignalReceived]]] = defaultdict(list)
    for run, signals in late.items():
        for name, count in Counter(item.name for item in signals if item.otherwise is None).items():
            ids = run_log_fields(run)
            values = *ids.values(), name, count
            log.warning("run.signal_late run=%s signal=%s count=%s: the run had ended", *values, extra=ids)
        for item in signals:
            if item.otherwise is not None:
                by_key[item.otherwise.key].append((item.otherwise, item))
    if by_key:
        _deliver_or_start(tx, by_key)


def _deliver_or_start(tx: Transaction, late: Mapping[str, Sequence[tuple[RunWanted, history.SignalReceived]]]) -> None:
    """Deliver signals to the open runs with the requested ids, or start runs. Store which run got each signal.

    A sender finds the new run under the id that it gave.
    """
    holders = run_keys.holders(tx.connection, list(late))
    delivered = append_facts(tx, {run: [signal for _, signal in late[key]] for key, run in holders.items()})
    new = {key: _run_with(signals) for key, signals in late.items() if holders.get(key) not in delivered}
    handed_over = [(holders[key], run.id) for key, run in new.items() if key in holders]
    passed = run_keys.pass_to_successors(tx.connection, handed_over) if handed_over else set()
    begun = {key: run for key, run in new.items() if run.id in passed or key not in holders}
    create_runs(tx, list(begun.values()))
    receivers = {key: begun[key].id if key in begun else holders[key] for key in late if key in begun or key not in new}
    pairs = ((wanted.id, run) for key, run in receivers.items() for wanted, _ in late[key])
    reply(tx, [PromiseAnswer(wanted, run) for wanted, run in pairs if wanted != run])
    if len(receivers) < len(late):  # meanwhile, a client has started a run with one of the ids
        _deliver_or_start(tx, {key: signals for key, signals in late.items() if key not in receivers})


def _run_with(late: Sequence[tuple[RunWanted, history.SignalReceived]]) -> NewRun:
    """Return a run that starts with several signals. The first of them decides its options."""
    (wanted, first), *others = late
    started = history.RunStarted(
        *(wanted.workflow, wanted.version, wanted.payload, wanted.queue),
        attributes=wanted.attributes,
    )
    signals = [history.SignalReceived(first.name, first.value), *(signal for _, signal in others)]
    new = code_runs.new_run(wanted.id, [started, *signals], pinned=wanted.pinned)
    return new._replace(timeout=wanted.timeout, tags=wanted.tags, trace=wanted.trace, headers=wanted.headers)


def _signal(item: Request) -> history.SignalReceived:
    otherwise = item.body.get("start")
    if otherwise is not None:
        otherwise = RunWanted(**otherwise | {"id": _data(otherwise["id"]), "payload": _data(otherwise["payload"])})
    return history.SignalReceived(item.body["name"], _data(item.body["value"]), otherwise)


def settle_promises(tx: Transaction, items: Sequence[Request]) -> None:
    """Resolve or reject promises, the oldest of a name first. An answer before the first promise of a name is kept.

    A late answer gets an error. The reply to an early answer lists the promises that the run waits for.
    """
    runs = list({item.target for item in items})
    open_promises: dict[tuple[bytes, str], list[bytes]] = defaultdict(list)
    for run, promise, name in expectations.open_promises(tx.connection, runs):
        open_promises[run, name].append(promise)
    settled = {(kept.run, kept.what.name) for kept in expectations.of_runs(tx.connection, runs)}
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    gone: list[tuple[bytes, bytes]] = []
    early: dict[bytes, StoredResolution] = {}
    answers: list[PromiseAnswer] = []
    for item in items:
        request, name = _data(item.body["request"]), item.body["name"]
        waiting = open_promises[item.target, name]
        if waiting:
            promise = waiting.pop(0)
            gone.append((item.target, promise))
            facts[item.target].append(_resolution(item).of(promise))
            answers.append(PromiseAnswer(request))
        elif (item.target, name) in settled:
            answers.append(PromiseAnswer(request, None, _settled(item.target, name)))
        else:
            early[request] = StoredResolution(item.target, 1, _resolution(item))
        settled.add((item.target, name))
    if gone:
        expectations.forget_promises(tx.connection, gone)
        append_facts(tx, facts)
    stored = expectations.store_resolutions(tx.connection, list(early.values())) if early else set()
    answers += [
        PromiseAnswer(request, _open_names(open_promises, kept.run))
        if (kept.run, kept.what.name) in stored
        else PromiseAnswer(request, None, _run_ended(kept.run))
        for request, kept in early.items()
    ]
    reply(tx, answers)


def _open_names(open_promises: Mapping[tuple[bytes, str], Sequence[bytes]], run: bytes) -> bytes:
    """Return the encoded names of the first promises that a run waits for."""
    names = (name for (other, name), waiting in open_promises.items() if other == run and waiting)
    return msgspec.msgpack.encode(list(islice(names, _MAX_NAMES)))


def meet_promises(tx: Transaction, created: Sequence[NewPromise]) -> None:
    """Deliver kept answers to promises that code has just created."""
    waiting: dict[tuple[bytes, str], list[StoredResolution]] = defaultdict(list)
    for kept in expectations.of_runs(tx.connection, {promise.run for promise in created}):
        if kept.number:
            waiting[kept.run, kept.what.name].append(kept)
    delivered: list[StoredResolution] = []
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    gone: list[tuple[bytes, bytes]] = []
    for promise in created:
        if found := waiting[promise.run, promise.name]:
            delivered.append(found.pop(0))
            gone.append((promise.run, promise.id))
            facts[promise.run].append(delivered[-1].what.of(promise.id))
    if delivered:
        expectations.remove(tx.connection, delivered)
        expectations.forget_promises(tx.connection, gone)
        append_facts(tx, facts)


def give_up_promises(tx: Transaction, given_up: Sequence[tuple[bytes, bytes]]) -> None:
    """Remove promises that code no longer waits for.

    A promise may have been settled after the code gave it up and before the leader knew. That answer was accepted, so
    it counts for the next promise of the name, as if it had come a moment later.
    """
    missed = set(given_up).difference(expectations.forget_promises(tx.connection, given_up))
    if not missed:
        return
    runs = list({run for run, _ in missed})
    facts = [(run, fact) for run, fact in histories.settled(tx.connection, runs) if (run, fact.id) in missed]
    created = histories.promises(tx.connection, runs)
    numbers = Counter({(kept.run, kept.what.name): kept.number for kept in expectations.of_runs(tx.connection, runs)})
    late: list[StoredResolution] = []
    for run, fact in facts:
        (what,) = resolutions_of([fact], created[run])
        numbers[run, what.name] += 1
        late.append(StoredResolution(run, numbers[run, what.name], what))
    expectations.store_resolutions(tx.connection, late)
    waiting = expectations.open_promises(tx.connection, runs)
    meet_promises(tx, [NewPromise(run, promise, name, 0) for run, promise, name in waiting])


def _resolution(item: Request) -> Resolution:
    if item.kind == RequestKind.RESOLVE:
        return Resolution(item.body["name"], _data(item.body["value"]))
    return Resolution(item.body["name"], error=TaskError("PromiseRejected", item.body["reason"]))


def _settled(run: bytes, name: str) -> TaskError:
    return TaskError(
        "WrongState",
        f"No promise {name!r} is open in run {to_text(run)}: it was resolved, rejected or abandoned before.",
    )


def _run_ended(run: bytes) -> TaskError:
    return TaskError("WrongState", f"Run {to_text(run)} has ended.")


def update(tx: Transaction, items: Sequence[Request]) -> None:
    """Deliver updates to runs, whose code answers. The sender of a late update gets an error."""
    facts: dict[bytes, list[history.UpdateRequested]] = defaultdict(list)
    for item in _once(tx, items):
        request = _data(item.body["request"])
        facts[item.target].append(history.UpdateRequested(request, item.body["name"], _data(item.body["value"])))
    delivered = append_facts(tx, facts)
    late = ((run, late_update) for run, updates in facts.items() if run not in delivered for late_update in updates)
    reply(tx, [PromiseAnswer(late_update.id, None, _came_late(run, late_update.name)) for run, late_update in late])


def _came_late(run: bytes, update: str) -> TaskError:
    text = f"Run {to_text(run)} ended before update {update!r} reached it: send the update to an open run."
    return TaskError("WrongState", text, data=msgspec.json.encode(TOO_LATE).decode())


def queries(items: Iterable[Request]) -> Iterator[tuple[bytes, Query]]:
    """Yield runs and the queries for their code."""
    for item in items:
        yield item.target, Query(_data(item.body["request"]), item.body["name"], _data(item.body["value"]))


def _data(text: str) -> bytes:
    return base64.b64decode(text)


ABOUT_CODE = frozenset(
    {
        RequestKind.SIGNAL,
        RequestKind.RESOLVE,
        RequestKind.REJECT,
        RequestKind.UPDATE,
        RequestKind.QUERY,
        RequestKind.TERMINATE,
        RequestKind.CANCEL_RUN,
    }
)
"""Requests that are passed to the latest successor of their target."""
