"""What people and programs want of runs of code: signals, promises, updates, queries."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from orchestrator.domain import history
from orchestrator.domain.activation import Query
from orchestrator.domain.history import Fact
from orchestrator.domain.ids import to_text
from orchestrator.domain.task import TaskError
from orchestrator.scheduler.code import reply, tell
from orchestrator.scheduler.tick import Tick
from orchestrator.store import code_runs, expectations, run_keys
from orchestrator.store.code_runs import NewCodeRun
from orchestrator.store.expectations import Answered
from orchestrator.store.inbox import Item, Wish
from orchestrator.telemetry import get_logger

log = get_logger("scheduler")


def signal(tick: Tick, items: Sequence[Item]) -> None:
    """Hand signals to runs. Those that were to start a run if there is none, and came too late, start one."""
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for item in items:
        facts[item.target].append(_signal(item))
    heard = tell(tick, facts)
    late: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        if item.target in heard:
            continue
        if item.body.get("start") is None:
            log.warning("run %s has ended before signal %s reached it", to_text(item.target), item.body["name"])
        else:
            late[item.body["start"]["key"]].append(item)
    if late:
        _start_with(tick, late)


def pass_on_signals(tick: Tick, signals: Sequence[tuple[bytes, history.SignalReceived]]) -> None:
    """Hand signals that runs send each other to those in which their targets go on now."""
    latest = code_runs.latest(tick.connection, {run for run, _ in signals})
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for run, fact in signals:
        facts[latest[run]].append(fact)
    heard = tell(tick, facts)
    for run, fact in signals:
        if latest[run] not in heard:
            log.warning("run %s has ended, or never was, and signal %s does not reach it", to_text(run), fact.name)


def _start_with(tick: Tick, late: Mapping[str, Sequence[Item]]) -> None:
    """Give signals to the runs that have the chosen ids by now, or begin runs with them; leave word of where they went.

    Those who sent a signal find a run that begins with it under the id that they gave.
    """
    holders = run_keys.holders(tick.connection, list(late))
    heard = tell(tick, {run: [_signal(item) for item in late[key]] for key, run in holders.items()})
    new = {key: _run_with(items) for key, items in late.items() if holders.get(key) not in heard}
    over = [(holders[key], run.id) for key, run in new.items() if key in holders]
    passed = run_keys.pass_on(tick.connection, over) if over else set()
    begun = {key: run for key, run in new.items() if run.id in passed or key not in holders}
    if begun:
        code_runs.start(tick.connection, list(begun.values()), tick.now)
        tick.delayed = tick.delayed or any(run.timeout is not None for run in begun.values())
    went = {key: begun[key].id if key in begun else holders[key] for key in late if key in begun or key not in new}
    pairs = ((_new_id(item), run) for key, run in went.items() for item in late[key])
    reply(tick, [Answered(wanted, run) for wanted, run in pairs if wanted != run])
    if len(went) < len(late):  # while this waited, a client has given an id to a run of its own
        _start_with(tick, {key: items for key, items in late.items() if key not in went})


def _run_with(items: Sequence[Item]) -> NewCodeRun:
    """Return the run that begins with signals, as the first of them wants it."""
    start = items[0].body["start"]
    started = history.RunStarted(start["workflow"], start["version"], _data(start["payload"]), start["queue"])
    signals = [_signal(item) for item in items]
    return NewCodeRun(
        _new_id(items[0]), [started, *signals], start["timeout"], tags=start["tags"], pinned=start["pinned"]
    )


def _new_id(item: Item) -> bytes:
    return _data(item.body["start"]["id"])


def _signal(item: Item) -> history.SignalReceived:
    return history.SignalReceived(item.body["name"], _data(item.body["value"]))


def settle_promises(tick: Tick, items: Sequence[Item]) -> None:
    """Resolve or reject promises: of those of a name, the oldest; whoever comes too late is told so."""
    open_promises: dict[tuple[bytes, str], list[bytes]] = defaultdict(list)
    for run, promise, name in expectations.open_promises(tick.connection, list({item.target for item in items})):
        open_promises[run, name].append(promise)
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    settled: list[tuple[bytes, bytes]] = []
    answers: list[Answered] = []
    for item in items:
        request, name = _data(item.body["request"]), item.body["name"]
        waiting = open_promises[item.target, name]
        if not waiting:
            answers.append(Answered(request, None, _no_promise(item.target, name)))
            continue
        promise = waiting.pop(0)
        settled.append((item.target, promise))
        answers.append(Answered(request))
        facts[item.target].append(
            history.PromiseResolved(promise, _data(item.body["value"]))
            if item.kind == Wish.RESOLVE
            else history.PromiseRejected(promise, TaskError("PromiseRejected", item.body["reason"]))
        )
    if settled:
        expectations.forget_promises(tick.connection, settled)
        tell(tick, facts)
    reply(tick, answers)


def _no_promise(run: bytes, name: str) -> TaskError:
    return TaskError(
        "WrongState",
        f"No promise {name!r} is open in run {to_text(run)}: it was resolved or rejected before, or the code does not "
        f"wait for it yet.",
    )


def update(tick: Tick, items: Sequence[Item]) -> None:
    """Hand updates to runs; their code answers."""
    facts: dict[bytes, list[Fact]] = defaultdict(list)
    for item in items:
        request = _data(item.body["request"])
        facts[item.target].append(history.UpdateRequested(request, item.body["name"], _data(item.body["value"])))
    tell(tick, facts)  # who asked a run that has ended meanwhile sees that it has


def query(tick: Tick, items: Sequence[Item]) -> None:
    """Have the code of runs asked."""
    tick.code.ask(
        tick,
        [
            (item.target, Query(_data(item.body["request"]), item.body["name"], _data(item.body["value"])))
            for item in items
        ],
    )


def _data(text: str) -> bytes:
    return base64.b64decode(text)


ABOUT_CODE = frozenset(
    {Wish.SIGNAL, Wish.RESOLVE, Wish.REJECT, Wish.UPDATE, Wish.QUERY, Wish.TERMINATE, Wish.CANCEL_RUN}
)
"""What goes to the run in which its target goes on."""
CODE_WISHES: dict[str, Callable[[Tick, Sequence[Item]], None]] = {
    Wish.SIGNAL: signal,
    Wish.RESOLVE: settle_promises,
    Wish.REJECT: settle_promises,
    Wish.UPDATE: update,
    Wish.QUERY: query,
}
