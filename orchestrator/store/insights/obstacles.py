"""What keeps one task, or the tasks of one run, from going on."""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.domain.tasks.obstacles import (
    NO_LEADER,
    executor_of_hold,
    key_of_hold,
    no_data_key,
    no_database,
    no_executor,
    no_worker,
    paused,
    unknown_task,
)
from orchestrator.store.insights.fleet import IS_FRESH, IS_KNOWN
from orchestrator.store.sql import Row, Statement
from orchestrator.store.tables.tasks import NOBODY, READY

_LEADS = Statement[bool]("""
SELECT /* insights.leads */ EXISTS (SELECT FROM orchestrator.leases
                WHERE shard = %(shard)s AND expires_at > clock_timestamp())
""")

_WAITING = f"(({READY}) OR (status = 'pending' AND {NOBODY})) AND created_at < now() - interval '2 seconds'"
"""What is newer may not have been looked at: the fleet is mirrored about once a second."""

# Of a run, a thousand open tasks: it may have a million, and their queues are few.
_OBSTACLES = Statement[Row](f"""
SELECT /* insights.obstacles */ DISTINCT queue, CASE WHEN {NOBODY} THEN name END AS unknown, hold,
       EXISTS (SELECT FROM orchestrator.queues AS q WHERE q.name = found.queue AND q.paused) AS paused,
       EXISTS (SELECT FROM orchestrator.workers
                WHERE state = 'live' AND {IS_FRESH} AND found.queue = ANY(queues)) AS served,
       hold = 'unknown' AND {IS_KNOWN.format(task="found")} AS handed_back
  FROM (SELECT * FROM orchestrator.tasks WHERE id = %(id)s::uuid
         UNION ALL
        (SELECT * FROM orchestrator.tasks WHERE run_id = %(id)s::uuid LIMIT 1000)) AS found
 WHERE {_WAITING}
 ORDER BY 1, 2
""")


def find_obstacles(connection: Connection, identifier: bytes, *, shard: int = 0) -> list[str]:
    """Return why a task or a run cannot go on, in words; nothing where it can, or waits for its time or for others."""
    if not _LEADS.one(connection, shard=shard):
        return [NO_LEADER]
    found: list[str] = []
    for row in _OBSTACLES(connection, id=identifier):
        if row.paused:
            found.append(paused(row.queue))
        elif not row.served:
            found.append(no_worker(row.queue))
        elif row.unknown is not None and (key := key_of_hold(row.hold)) is not None:
            found.append(no_data_key(row.queue, repr(row.unknown), key))
        elif row.unknown is not None and (wants := executor_of_hold(row.hold)) is not None:
            found.append(no_executor(row.queue, repr(row.unknown), wants))
        elif row.unknown is not None:
            found.append((no_database if row.handed_back else unknown_task)(row.queue, repr(row.unknown)))
    return list(dict.fromkeys(found))
