"""What is secret of a task or a run: the patterns of `redact` of its relatives, and the values under them.

A value that a task names travels: into a follow-up, a step below, a child run, and up again as its output. So these
are relatives: the tasks that a task follows or was enqueued by, and all tasks in the trees of runs that these are in.
What these runs were given themselves counts alike: parameters, arguments, signals, answers, shared state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.code import history
from orchestrator.sealing import CALL, VALUE, reveal
from orchestrator.store.code.histories import event_of
from orchestrator.store.flow.reads import OF_FUNCTIONS, OF_OPTIONS
from orchestrator.store.insights.runs import readable_params
from orchestrator.store.sql import Row, Statement

MOST_RELATIVES = 200
"""Most tasks with patterns of their own that are read; beyond that, all values count as secret."""
_MOST_RUNS = 1_000
_MOST_BYTES = 4_000_000
_MOST_EVENTS = 20_000
_REDACTING = "$.steps[*] ? (exists (@.registered.options.redact))"
_OF_STEPS = f"$.steps[*].registered.{OF_OPTIONS}"
# Up: its parent, the task it follows, its run, the start of that run. Then down again, through child runs.
_TREE = """
WITH /* {name} */ RECURSIVE up (task, run) AS (
    SELECT %(task)s::uuid, %(run)s::uuid
     UNION
    SELECT above.task, above.run FROM up CROSS JOIN LATERAL (
           SELECT t.parent_id AS task, t.run_id AS run FROM orchestrator.tasks t WHERE t.id = up.task
            UNION ALL
           SELECT e.parent_id, e.run_id FROM orchestrator.ended_tasks e WHERE e.id = up.task
            UNION ALL
           SELECT r.parent_task, r.parent_run FROM orchestrator.runs r WHERE r.id = up.run
            UNION ALL
           SELECT NULL, r.root FROM orchestrator.runs r WHERE r.id = up.run AND r.root <> r.id) AS above
), down (id) AS (
    SELECT run FROM up WHERE run IS NOT NULL
     UNION
    SELECT r.id FROM down JOIN orchestrator.runs r ON r.parent_run = down.id
), tree AS MATERIALIZED (
    SELECT r.* FROM (SELECT id FROM down LIMIT {most}) AS first JOIN orchestrator.runs r ON r.id = first.id
)"""
_PATTERNS = Statement[str](f"""{_TREE.format(name="insights.redact.patterns", most=_MOST_RUNS)}
SELECT DISTINCT pattern FROM (
    SELECT DISTINCT workflow, version, flow FROM tree WHERE NOT code) AS known
 CROSS JOIN LATERAL (
       SELECT jsonb_path_query(w.definition, '{_OF_STEPS}') #>> '{{}}' FROM orchestrator.workflows w
        WHERE NOT known.flow AND w.name = known.workflow AND w.version = known.version
       UNION ALL
       SELECT jsonb_path_query(f.definition, '{OF_FUNCTIONS}') #>> '{{}}' FROM orchestrator.flows f
        WHERE known.flow AND f.name = known.workflow AND f.version = known.version) AS found (pattern)
""")
_RELATIVES = Statement[Row](f"""{_TREE.format(name="insights.redact.relatives", most=_MOST_RUNS)},
steps AS MATERIALIZED (
    SELECT tree.id, tree.code OR tree.flow AS is_any, ARRAY(
           SELECT jsonb_path_query(w.definition, '{_REDACTING}') ->> 'name' FROM orchestrator.workflows w
            WHERE NOT tree.flow AND NOT tree.code AND w.name = tree.workflow AND w.version = tree.version) AS names
      FROM tree
), related AS (
    (SELECT t.id, t.payload, NULL::bytea AS result, t.options FROM up JOIN orchestrator.tasks t ON t.id = up.task
      WHERE %(all)s::boolean OR t.options ?| '{{redact,inherited}}' LIMIT {MOST_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM up JOIN orchestrator.ended_tasks e ON e.id = up.task
      WHERE %(all)s::boolean OR e.options ?| '{{redact,inherited}}' LIMIT {MOST_RELATIVES + 1})
     UNION ALL
    (SELECT t.id, t.payload, NULL, t.options FROM steps JOIN orchestrator.tasks t ON t.run_id = steps.id
      WHERE (steps.is_any OR t.step = ANY(steps.names)) AND t.options -> 'redact' IS NOT NULL
      LIMIT {MOST_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM steps JOIN orchestrator.ended_tasks e ON e.run_id = steps.id
      WHERE (steps.is_any OR e.step = ANY(steps.names)) AND e.options -> 'redact' IS NOT NULL
      LIMIT {MOST_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM steps JOIN orchestrator.ended_tasks e ON e.run_id = steps.id
      WHERE (%(all)s::boolean AND NOT steps.is_any OR e.options -> 'inherited' IS NOT NULL)
        AND e.options -> 'redact' IS NULL LIMIT {MOST_RELATIVES})
), measured AS (
    SELECT *, sum(octet_length(payload) + coalesce(octet_length(result), 0)) OVER (ORDER BY is_quiet, id) AS bytes
      FROM (SELECT DISTINCT ON (is_quiet, id) *
              FROM (SELECT *, options -> 'redact' IS NULL AS is_quiet FROM related) AS found
             ORDER BY is_quiet, id LIMIT {MOST_RELATIVES + 1}) AS first
)
SELECT id, coalesce(options -> 'redact', '[]') || coalesce(options -> 'inherited', '[]') AS redact, is_quiet,
       CASE WHEN bytes <= {_MOST_BYTES} THEN payload END AS payload,
       CASE WHEN bytes <= {_MOST_BYTES} THEN result END AS result FROM measured
""")
# What runs were given, and of code also what its tasks have returned and it has noted: all that has gone into it.
_GIVEN = Statement[Row](f"""{_TREE.format(name="insights.redact.given", most=_MOST_RUNS)}, measured AS (
    SELECT id, params::text AS params, CASE WHEN flow THEN state END AS state,
           sum(coalesce(octet_length(params::text), 0) + coalesce(octet_length(state), 0)) OVER (ORDER BY id) AS bytes
      FROM tree WHERE NOT code
)
SELECT params, state, bytes <= {_MOST_BYTES} AS is_read FROM measured
""")
_EVENTS = Statement[Row](f"""{_TREE.format(name="insights.redact.events", most=_MOST_RUNS)}, first AS (
    SELECT h.run_id, h.number, h.data
      FROM tree JOIN orchestrator.histories h ON h.run_id = tree.id AND h.kind = ANY(%(kinds)s::text[])
     WHERE tree.code LIMIT {_MOST_EVENTS + 1}
), measured AS (
    SELECT *, sum(octet_length(data)) OVER (ORDER BY run_id, number) AS bytes FROM first
)
SELECT CASE WHEN bytes <= {_MOST_BYTES} THEN data END AS data FROM measured ORDER BY run_id, number
""")
_KINDS = [
    *("run_started", "signal_received", "update_requested", "promise_created", "promise_resolved", "task_completed"),
    *("child_completed", "operation_recorded", "state_set", "run_completed"),
]


class Relative(NamedTuple):
    """A task that names what is secret of it."""

    patterns: tuple[str, ...]
    payload: bytes
    result: bytes | None


class Family(NamedTuple):
    """The sources of secrets of a task or a run."""

    patterns: list[str]
    """Of all tasks in it, and of those that its definitions name; not those of arguments without names."""
    relatives: list[Relative]
    given: list[Any]
    """Parameters of runs of definitions, as plain data."""
    said: list[tuple[str, bytes]]
    """Arguments and messages of runs of code, each by its name, encoded."""
    is_partial: bool
    """There is more of it than was read."""


@Statement.function(f"""
SELECT /* insights.redact.of_workflow */ DISTINCT jsonb_path_query(definition, '{_OF_STEPS}') #>> '{{}}'
  FROM orchestrator.workflows WHERE name = %(name)s
""")
def patterns_of_workflow(connection: Connection, name: str) -> list[str]:
    """Return the patterns of the tasks of a workflow, in any version."""


def family_of(
    connection: Connection, *, task: UUID | None = None, run: UUID | None = None, everywhere: bool = False
) -> Family:
    """Return what a task, or a run, may have secrets from: itself, and all that is related to it.

    `everywhere` says that the settings name something, so that what has no patterns of its own may have secrets, too.
    """
    ids = {"task": task and task.hex, "run": run and run.hex}
    rows = _RELATIVES(connection, **ids, all=everywhere)
    patterns = {*_PATTERNS(connection, **ids), *(pattern for row in rows for pattern in row.redact)}
    relatives = [
        Relative(tuple(row.redact), reveal(bytes(row.payload), CALL), row.result and reveal(bytes(row.result)))
        for row in rows[:MOST_RELATIVES]
        if row.payload is not None
    ]
    left = [row for row in rows[MOST_RELATIVES:] if not row.is_quiet]
    is_partial = bool(left) or any(row.payload is None and not row.is_quiet for row in rows)
    given: list[Any] = []
    said: list[tuple[str, bytes]] = []
    if patterns or everywhere:
        of_runs = _GIVEN(connection, **ids)
        events = _EVENTS(connection, **ids, kinds=_KINDS)
        given = [value for row in of_runs if row.is_read for value in _plain(row)]
        said = list(_said(row.data for row in events if row.data is not None))
        is_partial |= len(events) > _MOST_EVENTS or any(row.data is None for row in events)
        is_partial |= not all(row.is_read for row in of_runs)
    named = sorted(pattern for pattern in patterns if not pattern.startswith("@"))
    return Family(named, relatives, given, said, is_partial)


def _plain(row: Row) -> Iterator[Any]:
    if row.params is not None:
        yield readable_params(msgspec.json.decode(row.params))
    if row.state is not None:
        yield timezones.decode(bytes(row.state))  # the shared state is a part of it, and so are signals


def _said(events: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield values in a history, each with the name under which it stands; nothing else in it is a value of users'."""
    names: dict[bytes, str] = {}
    for data in events:
        what: Any = event_of(data)
        name = getattr(what, "name", "") or getattr(what, "key", "") or names.get(getattr(what, "id", b""), "")
        if isinstance(what, history.PromiseCreated):
            names[what.id] = what.name
        for field in ("payload", "value", "result"):
            if (value := getattr(what, field, None)) is not None:
                yield name, reveal(value, CALL if field == "payload" else VALUE)
