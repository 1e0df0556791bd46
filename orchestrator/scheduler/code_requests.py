"""What people and programs want of runs of code: signals, promises, updates, queries."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Sequence

from orchestrator.domain import history
from orchestrator.domain.activation import Query
from orchestrator.domain.history import Fact
from orchestrator.domain.ids import to_text
from orchestrator.domain.task import TaskError
from orchestrator.scheduler.code import reply, tell
from orchestrator.scheduler.tick import Tick
from orchestrator.store import code_runs, expectations
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
    for item in items:
        if item.target in heard:
            continue
        if item.body.get("start") is None:
            log.warning("run %s has ended before signal %s reached it", to_text(item.target), item.body["name"])
        else:
            _start_with(tick, item)


def _start_with(tick: Tick, item: Item) -> None:
    """Give a signal to the run that has the chosen id by now, or begin one with it."""
    start = item.body["start"]
    holder = code_runs.holder_of_key(tick.connection, start["key"])
    if holder is not None and tell(tick, {holder: [_signal(item)]}):
        return
    started = history.RunStarted(start["workflow"], start["version"], _data(start["payload"]), start["queue"])
    run = NewCodeRun(_data(start["id"]), [started, _signal(item)], start["timeout"], tags=start["tags"])
    code_runs.start(tick.connection, [run._replace(pinned=start["pinned"])], tick.now)
    if holder is not None:
        code_runs.pass_keys(tick.connection, [(holder, run.id)])
    tick.delayed = tick.delayed or run.timeout is not None


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
