"""Tasks whose ids stand among the open and among the ended ones.

That should never be. But earlier releases could create a task again that had ended, where a proxy repeated a request,
and people restore rows by hand. Whatever such a task comes to, a primary key refuses it, and so it runs without end.
"""

from __future__ import annotations

import re
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.store.sql import Prepared
from orchestrator.store.tasks.transitions import Moved, among

_REFUSED_BY = ("ended_tasks_pkey", "attempts_pkey", "tasks_pkey")
"""When it ends, when it is to be tried again, and when what has ended is to be opened again."""
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def named_in(error: BaseException) -> bytes | None:
    """Return the task that a primary key has refused, if that is what an error says."""
    about = getattr(getattr(error, "orig", None), "diag", None)
    if about is None or about.constraint_name not in _REFUSED_BY:
        return None
    found = _ID.search(about.message_detail or "")
    return UUID(found[0]).bytes if found else None


# Whether a task has ended is asked by a scalar subquery: EXISTS lets the planner read all that ever ended. Its run has
# counted the recorded end, and its follow-ups exist: neither happens again.
@Prepared.function(f"""
WITH /* duplicates.remove */ gone AS (
    DELETE FROM orchestrator.tasks t WHERE t.ctid = ANY (ARRAY(
           SELECT place FROM (
                  SELECT ctid AS place, id FROM orchestrator.tasks WHERE id = %(task)s::uuid
                   UNION
                  SELECT ctid, id FROM orchestrator.tasks WHERE status IN {among(IN_FLIGHT_STATES)}) AS suspect
            WHERE (SELECT true FROM orchestrator.ended_tasks WHERE id = suspect.id LIMIT 1)
            LIMIT %(limit)s))
    RETURNING t.*
)
SELECT gone.id, (SELECT status FROM orchestrator.ended_tasks e WHERE e.id = gone.id) AS state, gone.queue,
       NULL::uuid AS run_id, gone.attempt, gone.status AS before, gone.name, NULL::text AS step, gone.lane,
       gone.unique_key
  FROM gone
""")
def remove(connection: Connection, task: bytes, limit: int) -> list[Moved]:
    """Remove the open rows of this task, and of those in flight, that have ended; return them as what they ended as."""
