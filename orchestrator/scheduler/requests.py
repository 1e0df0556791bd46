"""Apply the inbox: what people and programs asked for since the last tick."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

import msgspec

from orchestrator.domain.ids import to_text
from orchestrator.domain.tasks.starts import is_start
from orchestrator.domain.tasks.task import KeyHolder, NewTask, TaskError
from orchestrator.scheduler.budget import TooSlow
from orchestrator.scheduler.code.requests import ABOUT_CODE, CODE_WISHES
from orchestrator.scheduler.code.resets import reset_runs
from orchestrator.scheduler.code.runs import ask_to_cancel, reply
from orchestrator.scheduler.isolation import isolate
from orchestrator.scheduler.runs.advance import advance_runs
from orchestrator.scheduler.runs.cancels import mark_cancelling
from orchestrator.scheduler.runs.retries import retry_run, retry_tasks
from orchestrator.scheduler.runs.triggers import Posted
from orchestrator.scheduler.tasks.creation import adopt, cancel_tasks
from orchestrator.scheduler.tasks.starts import start_runs
from orchestrator.scheduler.tick import Tick
from orchestrator.store import inbox
from orchestrator.store.code import runs as code_runs
from orchestrator.store.code.expectations import Answered
from orchestrator.store.database import said
from orchestrator.store.inbox import Wish
from orchestrator.store.limits import queues
from orchestrator.store.tasks import completions, redrive, transitions, unique
from orchestrator.store.tasks.redrive import FailedFilter
from orchestrator.transport.quarantine import Refused


def apply_inbox(tick: Tick, limit: int) -> None:
    """Apply the oldest requests in their order, neighbours of a kind at once."""
    items = inbox.read(tick.connection, min(limit, tick.budget.slice))
    for item in [item for item in items if _name(item) in tick.budget.refused]:
        _refuse(tick, item, TooSlow("It takes longer than everybody else can wait."))
        tick.budget.met.add(_name(item))
        items.remove(item)
    isolate(tick, items, lambda some: _charge(tick, some, limit), lambda item, error: _refuse(tick, item, error))


def _name(item: inbox.Item) -> bytes:
    return b"request %d" % item.id


def _charge(tick: Tick, items: Sequence[inbox.Item], limit: int) -> None:
    with tick.budget.charging(map(_name, items)):
        _apply(tick, items, limit)


def _refuse(tick: Tick, item: inbox.Item, error: Exception) -> None:
    """Forget a request that cannot be applied; whoever waits for an answer is told, and people find it set aside."""
    body = msgspec.json.encode({"kind": item.kind, "target": to_text(item.target), "body": item.body})
    tick.set_aside.append(Refused(f"inbox/{item.id}", body, f"{type(error).__name__}: {said(error)}"))
    if isinstance(item.body, dict) and isinstance(item.body.get("request"), str):
        reason = TaskError("CannotBeApplied", f"The scheduler could not do it: {type(error).__name__}: {said(error)}")
        reply(tick, [Answered(base64.b64decode(item.body["request"]), None, reason)])
    if item.kind == Wish.ENQUEUE:
        reason = TaskError("CannotBeApplied", f"The scheduler could not do it: {type(error).__name__}: {said(error)}")
        tick.key_holders[item.target] = KeyHolder(item.target, error=reason)
    inbox.remove(tick.connection, [item.id])


def _apply(tick: Tick, items: Sequence[inbox.Item], limit: int) -> None:
    unfinished: set[int] = set()
    for kind, neighbours in groupby(items, key=lambda item: item.kind):
        same = list(neighbours)
        if kind in ABOUT_CODE:
            last = code_runs.latest(tick.connection, [item.target for item in same])
            same = [item._replace(target=last[item.target]) for item in same]
        ids = [item.target for item in same]
        if kind == Wish.CANCEL_TASK:
            cancel_tasks(tick, ids)
        elif kind == Wish.CANCEL_RUN:
            mark_cancelling(tick, ids)
            ask_to_cancel(tick, ids, "somebody asked for it")
        elif kind == Wish.TERMINATE:
            mark_cancelling(tick, ids, code=True)
        elif kind == Wish.RESET:
            unfinished.update(reset_runs(tick, same))
        elif kind in CODE_WISHES:
            CODE_WISHES[kind](tick, same)
        elif kind == Wish.RETRY_TASK:
            contested = retry_tasks(tick, ids).contested
            unfinished.update(item.id for item in same if item.target in contested)
        elif kind == Wish.EVENT:
            tick.triggers.events(tick, [Posted(item.target, item.body["name"], item.body["payload"]) for item in same])
        elif kind == Wish.COMPLETE_TASK:
            complete_tasks(tick, same)
        elif kind == Wish.RETRY_RUN:
            freed = tick.backlog.free(tick, ids)
            same = [item for item in same if item.target not in freed]
            unfinished.update(item.id for item in same if not retry_run(tick, item, 10 * limit))
        elif kind == Wish.ARRIVAL:
            tick.lanes.arrive(tick, [(item.target, bool(item.body)) for item in same])
        elif kind == Wish.LANES:
            tick.lanes.read_all()
        elif kind == Wish.QUEUES:
            tick.queues_changed = True
        elif kind == Wish.PURGE:
            unfinished.update(item.id for item in same if not purge(tick, item, 5 * limit))
        elif kind == Wish.REDRIVE:
            unfinished.update(item.id for item in same if not redrive_tasks(tick, item, 5 * limit))
        elif kind == Wish.ENQUEUE:
            unfinished.update(enqueue_with_keys(tick, same))
    inbox.remove(tick.connection, [item.id for item in items if item.id not in unfinished])


def complete_tasks(tick: Tick, items: list[inbox.Item]) -> None:
    """End tasks that completed in transactions of their own; their workers' reports may have done so already."""
    completed = completions.find(tick.connection, items)
    if completed:
        results = {row.id: row.result for row in completed}
        tick.note(transitions.succeed(tick.connection, completed, tick.now), results=results, by_worker=True)


def purge(tick: Tick, item: inbox.Item, limit: int) -> bool:
    """Cancel what waited in a queue when this was asked, slice by slice of the open tasks; say whether it is done."""
    asked_at = tick.now - timedelta(seconds=item.age)
    after = bytes.fromhex(item.body.get("after", "00" * 16))
    found = queues.waiting_tasks(tick.connection, item.body["queue"], asked_at, after, limit)
    if found.waiting:
        cancel_tasks(tick, found.waiting)
        advance_runs(tick)
    if found.last is not None:
        inbox.go_on(tick.connection, item.id, msgspec.json.encode({"after": found.last.hex()}).decode())
    return found.last is None


def redrive_tasks(tick: Tick, item: inbox.Item, limit: int) -> bool:
    """Open the failed tasks again that matched when this was asked, a slice at a time; say whether it is done."""
    wanted = msgspec.convert(item.body, FailedFilter)
    asked_at = tick.now - timedelta(seconds=item.age)
    found = redrive.matching(tick.connection, wanted, asked_at, item.body.get("after"), limit)
    if retry_tasks(tick, found.tasks).contested:
        return False  # the same slice again
    if found.last is not None:
        inbox.go_on(tick.connection, item.id, msgspec.json.encode({"after": found.last}).decode())
    return found.last is None


def enqueue_with_keys(tick: Tick, items: list[inbox.Item]) -> set[int]:
    """Create the tasks that running tasks want under a key nobody has; return the requests that must be made again.

    Whoever wants one is told which task has the key. Runs are started as well.
    """
    first: dict[str, NewTask] = {}
    wanted: list[tuple[int, NewTask, str]] = []
    starts: list[NewTask] = []
    known = unique.known(tick.connection, [item.target for item in items])
    for item in items:
        task = unique.deferred(item.body)
        if is_start(task):
            starts.append(task)
        elif item.target not in known and task.unique is not None:
            first.setdefault(task.unique.key, task)
            wanted.append((item.id, task, task.unique.key))
    if starts:
        tick.key_holders.update(start_runs(tick, starts))
    taken, contested = unique.take(tick.connection, list(first.values())) if first else (set(), set())
    adopt(tick, [task for task in first.values() if task.id in taken])
    tick.contested = tick.contested or bool(contested)
    unfinished = {item for item, _, key in wanted if first[key].id in contested}
    tick.key_holders.update((task, KeyHolder(task)) for task in known | taken)
    refused = [task for item, task, _ in wanted if item not in unfinished and task.id not in taken]
    if refused:
        tick.key_holders.update(unique.holders(tick.connection, refused))
    return unfinished


def settle_ends(tick: Tick) -> None:
    """Create what was to follow the tasks that ended, and free their keys."""
    follow_ups = list(tick.follow_ups)
    tick.follow_ups.clear()
    isolate(tick, follow_ups, lambda some: adopt(tick, some), lambda task, error: _refuse_task(tick, task, error))
    if tick.keys:
        unique.free(tick.connection, tick.keys, ended=True)
        tick.keys.clear()


def _refuse_task(tick: Tick, task: NewTask, error: Exception) -> None:
    """Go on without a task that cannot be created."""
    tick.set_aside.append(Refused(f"task/{to_text(task.id)}", task.payload, f"{task.name}: {said(error)}"))
