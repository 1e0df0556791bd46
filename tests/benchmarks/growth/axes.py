"""The axes of the growth benchmark: what grows, the work that is measured, and its unit."""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from orchestrator.domain.dag.definition import Definition, Step
from orchestrator.domain.schedules.schedule import Schedule
from orchestrator.store.dag import workflows
from orchestrator.store.schedules import definitions as schedules
from tests.benchmarks.growth.fleet import queue_names
from tests.benchmarks.growth.stand import TIMEOUT, Stand
from tests.benchmarks.growth.tasks import app, keyed, noop, sized, stepping
from tests.benchmarks.peers.queue import effects

WORK = 5_000
"""Tasks run per measurement."""
SECONDS, RATE = 10, 200
"""Duration of the load in seconds and its rate in tasks per second, for measurements of the fleet."""
Point = tuple[dict[str, float], float]
"""The usage during a measurement, and the number of units of work."""
Measure = Callable[[Stand, int], Point]

_SEED = """
INSERT INTO orchestrator.tasks (id, name, queue, payload, wake_at)
SELECT gen_random_uuid(), t.name, replace(:queue, '{}', n::text), t.payload,
       now() + CAST(:delay AS double precision) * interval '1 second'
  FROM generate_series(CAST(:first AS int), :last) AS n
 CROSS JOIN (SELECT name, payload FROM orchestrator.ended_tasks LIMIT 1) AS t
"""
# Six days of work with one failure in fifty tasks; like real ids, these are in the order of time.
_FINISHED = """
INSERT INTO orchestrator.ended_tasks (id, seq, name, queue, priority, status, attempt, failures, losses, payload,
                                      result, error, worker, created_at, started_at, ended_at)
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3)
        || '8' || substr(md5(n::text), 4, 15))::uuid,
       n, t.name, 'default', 0, CASE WHEN n % 50 = 0 THEN 'failed' ELSE 'success' END, 1, 0, 0, t.payload,
       CASE WHEN n % 50 <> 0 THEN t.result END,
       CASE WHEN n % 50 = 0 THEN jsonb_build_object('kind', 'ValueError', 'message', 'no', 'traceback', '…') END,
       'host-1-0123456789abcdef', at, at, at
  FROM generate_series(CAST(:first AS int), :last) AS n
 CROSS JOIN LATERAL (SELECT now() - interval '6 days' + n * (interval '6 days' / :last)) AS task(at)
 CROSS JOIN (SELECT name, payload, result FROM orchestrator.ended_tasks LIMIT 1) AS t
"""
_SCHEDULES = """
INSERT INTO orchestrator.schedules (workflow, name, definition, declared, paused, next_fire, due_at)
SELECT s.workflow, 's' || n, s.definition || jsonb_build_object('name', 's' || n), false, false, s.next_fire, s.due_at
  FROM generate_series(CAST(:first AS int), :last) AS n CROSS JOIN orchestrator.schedules s WHERE s.name = 's0'
"""
_DUE = "UPDATE orchestrator.schedules SET next_fire = date_trunc('minute', now()), due_at = now()"
_DUE_LEFT = "SELECT EXISTS (SELECT FROM orchestrator.schedules WHERE due_at <= now() AND NOT paused)"
_IN_FLIGHT = "SELECT EXISTS (SELECT FROM orchestrator.tasks WHERE status IN ('dispatched', 'running'))"


def _next_to(fill: Callable[[Stand, int, int], None]) -> Measure:
    """Return an axis on which a worker runs a fixed number of tasks next to the inserted data.

    The data of one size stay for the next: `fill` gets the number of existing rows and the number of rows to reach.
    """
    last = 0

    def measure(stand: Stand, size: int) -> Point:
        nonlocal last
        stand.work()
        queue = app.queue("default")
        queue.pause()
        fill(stand, last, size)
        last = size
        _fill_queues(stand, 0, WORK)
        return _drained(stand, WORK)

    return measure


def _drained(stand: Stand, work: int) -> Point:
    """Run about `work` tasks of a queue that is paused before and afterwards."""
    stand.sql("VACUUM ANALYZE")
    queue = app.queue("default")
    with stand.measured() as found:
        before = effects()
        queue.resume()
        stand.wait(lambda: effects() - before >= work)
        queue.pause()
        stand.wait(lambda: not stand.sql(_IN_FLIGHT))
    return found, effects() - before


def _fill_queues(stand: Stand, first: int, last: int, *, queue: str = "default", delay: float | None = None) -> None:
    """Insert copies of the first ended task; `{}` in the queue's name is replaced by a number."""
    stand.sql(_SEED, first=first + 1, last=last, queue=queue, delay=delay)


def _fill_finished(stand: Stand, first: int, last: int) -> None:
    stand.sql(_FINISHED, first=first + 1, last=last)


def _fill_schedules(stand: Stand, first: int, last: int) -> None:
    """Insert schedules that are due in a year."""
    if not first:
        with stand.engine.connect() as connection:
            step = Step(name="task", task=noop.name)
            workflows.apply(connection, Definition(name="scheduled", steps=(step,), queue="fired"))
            schedules.put(connection, "scheduled", Schedule(name="s0", cron="0 0 1 1 *"), datetime.now(UTC))
    stand.sql(_SCHEDULES, first=max(first, 1), last=last - 1)


def _keys(stand: Stand, size: int) -> Point:
    """Run tasks with `size` concurrency keys in rotation, each with a limit."""
    stand.work()
    app.queue("default").pause()
    work = max(size, WORK)
    app.enqueue_many(keyed, [(number % size,) for number in range(work)])
    return _drained(stand, work)


def _fires(stand: Stand, size: int) -> Point:
    """Make all schedules due at once; no worker runs the started tasks."""
    _fill_schedules(stand, stand.sql("SELECT count(*) FROM orchestrator.schedules"), size)
    stand.sql("TRUNCATE orchestrator.tasks, orchestrator.runs")  # a schedule does not fire while its last run is open
    stand.sql("VACUUM ANALYZE")
    with stand.measured() as found:
        stand.sql(_DUE)
        stand.wait(lambda: not stand.sql(_DUE_LEFT))
        stand.wait(lambda: stand.sql("SELECT count(*) FROM orchestrator.tasks") == size)
    return found, size


def _fleet(stand: Stand, workers: int, queues: int) -> Point:
    """Enqueue tasks steadily to all queues, with many workers."""
    names = queue_names(queues)
    calls = [noop.options(queue=names[number * len(names) // RATE]) for number in range(RATE)]
    stand.fleet(workers, queues)
    before = effects()
    for call in calls[:20]:
        call.enqueue()
    stand.wait(lambda: effects() - before >= 20)
    with stand.measured() as found:
        begun, before = time.monotonic(), effects()
        for number in range(SECONDS * RATE):
            time.sleep(max(0.0, begun + number / RATE - time.monotonic()))
            calls[number % RATE].enqueue()
        stand.wait(lambda: effects() - before >= SECONDS * RATE)
    return found, SECONDS * RATE


def _queues(stand: Stand, size: int) -> Point:
    """Use workers with a thousand queues each, the maximum for a worker."""
    return _fleet(stand, max(1, size // 1_000), size)


def _workers(stand: Stand, size: int) -> Point:
    return _fleet(stand, size, 1)


def _runs(stand: Stand, size: int) -> Point:
    """Start as many runs as give the same number of tasks, at least one."""
    stand.work()
    runs = max(1, WORK // size)
    with stand.measured() as found:
        handles = [app.start_many(noop, [()] * size) for _ in range(runs)]
        for handle in handles:
            handle.wait_ended(TIMEOUT)
    return found, runs * size


def _histories(stand: Stand, size: int) -> Point:
    """Let a run with `size` events in its history take a hundred more steps."""
    stand.work()
    before = effects()
    handle = stepping.start(size, 100)
    stepping.signal_many("more", [(handle, 1)] * size)
    stand.wait(lambda: effects() - before == 1)
    with stand.measured() as found:
        handle.signal("go", 1)
        handle.result(TIMEOUT)
    return found, 100


def _payloads(stand: Stand, size: int) -> Point:
    """Run tasks with arguments of `size` bytes, with twenty million bytes in total at most."""
    stand.work()
    tasks = max(20, min(WORK, 20_000_000 // size))
    data = b64encode(os.urandom(size))[: size - 50].decode()  # incompressible
    with stand.measured() as found:
        before = effects()
        for first in range(0, tasks, 1_000):
            app.enqueue_many(sized, [(data,)] * min(1_000, tasks - first))
        stand.wait(lambda: effects() - before == tasks)
    return found, tasks


def _definitions(stand: Stand, size: int) -> Point:
    """Run one DAG at a time with ten parallel chains of steps: step n depends on step n - 10."""
    stand.work()
    steps = tuple(
        Step(name=f"s{number}", task=noop.name, depends_on=(f"s{number - 10}",) if number >= 10 else ())
        for number in range(size)
    )
    with stand.engine.connect() as connection:
        workflows.apply(connection, Definition(name=f"of-{size}", steps=steps))
    runs = max(1, 300 // size)
    with stand.measured() as found:
        for _ in range(runs):
            app.workflows[f"of-{size}"].start().wait_ended(TIMEOUT)
    return found, runs * size


class Axis(NamedTuple):
    """What grows, its sizes, and the measurement."""

    title: str
    unit: str
    """The unit of work to which costs refer."""
    sizes: Sequence[int]
    measure: Measure


def _ten_to(first: int, last: int) -> list[int]:
    return [10**power for power in range(first, last + 1)]


AXES = {
    "pending": Axis("tasks pending", "task", _ten_to(3, 6), _next_to(_fill_queues)),
    "delayed": Axis("tasks delayed", "task", _ten_to(3, 6), _next_to(partial(_fill_queues, delay=90 * 86_400.0))),
    "finished": Axis("tasks finished", "task", [1, *_ten_to(4, 6), 5_000_000], _next_to(_fill_finished)),
    "keys": Axis("keys with a limit", "task", _ten_to(0, 5), _keys),
    "unserved": Axis(
        "queues without a worker", "task", _ten_to(0, 5), _next_to(partial(_fill_queues, queue="away-{}"))
    ),
    "queues": Axis("queues with a worker", "task", _ten_to(0, 5), _queues),
    "workers": Axis("worker processes", "task", [1, 10, 100, 500, 2_000], _workers),
    "schedules": Axis("schedules, none due", "task", _ten_to(0, 5), _next_to(_fill_schedules)),
    "fires": Axis("schedules due at once", "fire", _ten_to(2, 5), _fires),
    "runs": Axis("tasks of a run", "task", _ten_to(1, 5), _runs),
    "histories": Axis("events in a history", "step", _ten_to(1, 5), _histories),
    "definitions": Axis("steps of a workflow", "step", _ten_to(1, 4), _definitions),
    "payloads": Axis("bytes of arguments", "task", _ten_to(2, 6), _payloads),
}
