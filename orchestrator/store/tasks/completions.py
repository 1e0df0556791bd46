"""Tasks that complete in the transaction of their own writes: the only write of a worker to Postgres.

    worker   BEGIN; is the attempt current?   the task's own statements …   complete, notify the leader, COMMIT
    leader                                                                        ends the task as success

The worker sends the last three steps as one message: a worker that is stopped or cut off has sent all of them or
none, so it holds no lock on the task's row. Deferred constraints and triggers run before the task's row is locked: they
may wait for anybody, and until then the leader may end the attempt. A task with a completion is never dispatched again,
and ends only as success.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, exc

from orchestrator.domain.states import IN_FLIGHT_STATES
from orchestrator.store.inbox import Request, RequestKind
from orchestrator.store.sql import Prepared, Row, Statement
from orchestrator.store.tasks.transitions import Success

_TIMEOUT = "60s"
"""Timeout for an idle transaction and for unacknowledged data, so that a hanging worker's locks are released. The
latter applies to TCP only; with a Unix socket, the worker is on the same machine."""
_NOT_CURRENT = "OR001"
"""The SQLSTATE raised when the attempt is not current."""

_OTHER_TRANSACTION = "OR002"
"""The SQLSTATE raised when the transaction is not the one that was begun."""
_NOW = "(extract(epoch FROM transaction_timestamp()) * 1000000)::bigint"
"""The start time of the transaction; it differs between transactions, so it identifies one."""

_IS_CURRENT = "status IN ({}) AND completion IS NULL".format(", ".join(f"'{state}'" for state in IN_FLIGHT_STATES))

_BEGIN = Statement[Row](f"""
SELECT /* completions.begin */ set_config('idle_in_transaction_session_timeout', '{_TIMEOUT}', true) AS idle,
       set_config('tcp_user_timeout', '{_TIMEOUT}', true) AS unread, {_NOW} AS began, EXISTS (
       SELECT FROM orchestrator.tasks WHERE id = %(id)s::uuid AND attempt = %(attempt)s AND {_IS_CURRENT}) AS counts
""")


class TransactionEnded(Exception):
    """One of the task's own statements has committed or rolled back the transaction."""


def begin(connection: Connection, task: bytes, attempt: int) -> int | None:
    """Begin the transaction of an attempt; return its start time if the attempt is current, or else None."""
    row = _BEGIN.one(connection, id=task, attempt=attempt)
    return row.began if row.counts else None


# A message of several statements cannot have parameters, so the SQL contains the values: numbers and hexadecimal.
#
# After the COMMIT, a second transaction ends what the task may have set for its session, which the next task gets. It
# does what DISCARD ALL does, which no transaction can run; but prepared statements stay, because drivers and poolers
# rely on theirs. Psycopg2 reads dates only in the style ISO, which it sets when it connects.
#
# The driver does not notice the COMMIT and rolls back afterwards; AND CHAIN has begun an empty transaction for that.
_COMMIT = Statement[None](f"""
DO /* completions.commit */ $complete$ BEGIN
    IF {_NOW} <> {{began}} THEN
        RAISE EXCEPTION 'the transaction is another' USING ERRCODE = '{_OTHER_TRANSACTION}';
    END IF;
    SET CONSTRAINTS ALL IMMEDIATE;
    UPDATE orchestrator.tasks SET completion = '\\x{{result}}'
     WHERE id = '{{task}}' AND attempt = {{attempt:d}} AND {_IS_CURRENT};
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the attempt is over' USING ERRCODE = '{_NOT_CURRENT}';
    END IF;
    INSERT INTO orchestrator.inbox (kind, target, body)
    VALUES ('{RequestKind.COMPLETE_TASK}', '{{task}}', to_jsonb({{duration:f}}));
END $complete$;
COMMIT AND CHAIN;
CLOSE ALL;
SET SESSION AUTHORIZATION DEFAULT;
RESET ROLE;
RESET ALL;
SET datestyle = ISO;
UNLISTEN *;
SELECT pg_advisory_unlock_all();
DISCARD SEQUENCES;
DISCARD TEMP;
COMMIT AND CHAIN
""")


def commit(
    connection: Connection, task: bytes, attempt: int, result: bytes, duration: float, began: int | None = None
) -> bool:
    """Complete the task and commit its writes. Return False and roll back if the attempt is not current.

    Raise `TransactionEnded` and roll back in another transaction than the one that began at `began`.
    """
    moment = "NULL" if began is None else f"{began:d}"
    sql = _COMMIT.sql.format(task=task.hex(), attempt=attempt, result=result.hex(), duration=duration, began=moment)
    try:
        connection.exec_driver_sql(sql)
    except exc.DBAPIError as error:
        code = getattr(error.orig, "pgcode", None) or getattr(error.orig, "sqlstate", None)
        if code == _NOT_CURRENT:
            return False
        if code == _OTHER_TRANSACTION:
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
    """Return the successes of COMPLETE_TASK requests; tasks that have ended since then are missing."""
    durations = {item.target: float(item.body) for item in items}
    return [
        Success(row.id, row.attempt, row.completion, durations[row.id], row.worker)
        for row in _FIND(connection, ids=durations)
    ]
