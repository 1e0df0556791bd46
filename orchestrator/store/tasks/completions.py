"""Tasks that complete in a transaction of their own, together with what they wrote: the one write of a worker.

    worker   BEGIN; is the attempt current?   the task's own statements …   complete, notify the leader, COMMIT
    leader                                                                        ends the task as success

The last three are one message to Postgres: a worker that is stopped or cut off holds no lock on a task's row, for it
has sent all of them or none. A row that has a completion is never given to another attempt, nor ended otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, exc

from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.store.inbox import Request, RequestKind
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks.transitions import Success

_IDLE = "60s"
"""How long the task may leave its transaction idle, or what Postgres sends it unread: what it has locked is free then,
though its worker stands still. The latter goes for connections by TCP; behind a socket of the machine's own, the worker
stands on the same one."""
_OVER = "OR001"
"""The error code by which Postgres says that the attempt does not count."""

_ENDED = "OR002"
"""The error code by which Postgres says that the transaction is another than the one that was begun."""
_NOW = "(extract(epoch FROM transaction_timestamp()) * 1000000)::bigint"
"""When the transaction began: each has its own moment, whatever ends one and begins another."""

_COUNTS = "status IN ({}) AND completion IS NULL".format(", ".join(f"'{state}'" for state in IN_FLIGHT_STATES))

_BEGIN = Statement[Row](f"""
SELECT /* completions.begin */ set_config('idle_in_transaction_session_timeout', '{_IDLE}', true) AS idle,
       set_config('tcp_user_timeout', '{_IDLE}', true) AS unread, {_NOW} AS began, EXISTS (
       SELECT FROM orchestrator.tasks WHERE id = %(id)s::uuid AND attempt = %(attempt)s AND {_COUNTS}) AS counts
""")


class TransactionEnded(Exception):
    """The transaction that was begun has been committed or rolled back by one of the task's own statements."""


def begin(connection: Connection, task: bytes, attempt: int) -> int | None:
    """Begin the transaction of an attempt; return its moment, by which it is known, if the attempt still counts."""
    found = _BEGIN.one(connection, id=task, attempt=attempt)
    return found.began if found.counts else None


# Several statements in one message cannot have parameters, so the values stand in the text: numbers and hexadecimal.
# The driver does not see that the transaction has ended, and rolls back: it finds one in which nothing was done.
_COMMIT = Statement[None](f"""
DO /* completions.commit */ $complete$ BEGIN
    IF {_NOW} <> {{began}} THEN
        RAISE EXCEPTION 'the transaction is another' USING ERRCODE = '{_ENDED}';
    END IF;
    UPDATE orchestrator.tasks SET completion = '\\x{{result}}'
     WHERE id = '{{task}}' AND attempt = {{attempt:d}} AND {_COUNTS};
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the attempt is over' USING ERRCODE = '{_OVER}';
    END IF;
    INSERT INTO orchestrator.inbox (kind, target, body)
    VALUES ('{RequestKind.COMPLETE_TASK}', '{{task}}', to_jsonb({{duration:f}}));
END $complete$;
COMMIT AND CHAIN
""")


def commit(
    connection: Connection, task: bytes, attempt: int, result: bytes, duration: float, began: int | None = None
) -> bool:
    """Complete the task and commit what was written; False, and nothing is kept, if its attempt does not count.

    Raises `TransactionEnded`, and keeps nothing, in another transaction than the one that began at the given moment.
    """
    moment = "NULL" if began is None else f"{began:d}"
    sql = _COMMIT.sql.format(task=task.hex(), attempt=attempt, result=result.hex(), duration=duration, began=moment)
    try:
        connection.exec_driver_sql(sql)
    except exc.DBAPIError as error:
        code = getattr(error.orig, "pgcode", None) or getattr(error.orig, "sqlstate", None)
        if code == _OVER:
            return False
        if code == _ENDED:
            raise TransactionEnded from error
        raise
    return True


_FIND = Prepared[Row]("""
SELECT /* completions.find */ asked.id, found.attempt, found.completion, coalesce(found.worker, '') AS worker
  FROM unnest(%(ids)s::uuid[]) AS asked(id)
 CROSS JOIN LATERAL (
       SELECT attempt, completion, worker FROM orchestrator.tasks
        WHERE id = asked.id AND completion IS NOT NULL LIMIT 1) AS found
""")


def find(connection: Connection, items: Sequence[Request]) -> list[Success]:
    """Return the successes of these requests; none for tasks that have ended since."""
    durations = {item.target: float(item.body) for item in items}
    return [
        Success(row.id, row.attempt, row.completion, durations[row.id], row.worker)
        for row in _FIND(connection, ids=durations)
    ]
