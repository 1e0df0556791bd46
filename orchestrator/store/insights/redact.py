"""The secrets of a task or a run: the `redact` patterns of its relatives, and the values that match them.

A value that a task declares as secret spreads: to callbacks, later steps, child runs, and back as an output. So the
relatives of a task are the tasks that it follows or was enqueued by, and all tasks in the run trees of these. Values
given to these runs count too: parameters, arguments, signals, answers, shared state.
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

MAX_RELATIVES = 200
"""The maximum number of tasks with patterns of their own that are read; beyond that, all values count as secret."""
_MAX_RUNS = 1_000
_MAX_BYTES = 4_000_000
_MAX_EVENTS = 20_000
_REDACTING = "$.steps[*] ? (exists (@.registered.options.redact))"
_OF_STEPS = f"$.steps[*].registered.{OF_OPTIONS}"
# Up: the parent, the followed task, the run, the run's parent. Then down again, through child runs.
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
_PATTERNS = Statement[str](f"""{_TREE.format(name="insights.redact.patterns", most=_MAX_RUNS)}
SELECT DISTINCT pattern FROM (
    SELECT DISTINCT workflow, version, flow FROM tree WHERE NOT code) AS known
 CROSS JOIN LATERAL (
       SELECT jsonb_path_query(w.definition, '{_OF_STEPS}') #>> '{{}}' FROM orchestrator.workflows w
        WHERE NOT known.flow AND w.name = known.workflow AND w.version = known.version
       UNION ALL
       SELECT jsonb_path_query(f.definition, '{OF_FUNCTIONS}') #>> '{{}}' FROM orchestrator.flows f
        WHERE known.flow AND f.name = known.workflow AND f.version = known.version) AS found (pattern)
""")
_RELATIVES = Statement[Row](f"""{_TREE.format(name="insights.redact.relatives", most=_MAX_RUNS)},
steps AS MATERIALIZED (
    SELECT tree.id, tree.code OR tree.flow AS is_any, ARRAY(
           SELECT jsonb_path_query(w.definition, '{_REDACTING}') ->> 'name' FROM orchestrator.workflows w
            WHERE NOT tree.flow AND NOT tree.code AND w.name = tree.workflow AND w.version = tree.version) AS names
      FROM tree
), related AS (
    (SELECT t.id, t.payload, NULL::bytea AS result, t.options FROM up JOIN orchestrator.tasks t ON t.id = up.task
      WHERE %(all)s::boolean OR t.options ?| '{{redact,inherited}}' LIMIT {MAX_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM up JOIN orchestrator.ended_tasks e ON e.id = up.task
      WHERE %(all)s::boolean OR e.options ?| '{{redact,inherited}}' LIMIT {MAX_RELATIVES + 1})
     UNION ALL
    (SELECT t.id, t.payload, NULL, t.options FROM steps JOIN orchestrator.tasks t ON t.run_id = steps.id
      WHERE (steps.is_any OR t.step = ANY(steps.names)) AND t.options -> 'redact' IS NOT NULL
      LIMIT {MAX_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM steps JOIN orchestrator.ended_tasks e ON e.run_id = steps.id
      WHERE (steps.is_any OR e.step = ANY(steps.names)) AND e.options -> 'redact' IS NOT NULL
      LIMIT {MAX_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM steps JOIN orchestrator.ended_tasks e ON e.run_id = steps.id
      WHERE (%(all)s::boolean AND NOT steps.is_any OR e.options -> 'inherited' IS NOT NULL)
        AND e.options -> 'redact' IS NULL LIMIT {MAX_RELATIVES})
), measured AS (
    SELECT *, sum(octet_length(payload) + coalesce(octet_length(result), 0)) OVER (ORDER BY is_quiet, id) AS bytes
      FROM (SELECT DISTINCT ON (is_quiet, id) *
              FROM (SELECT *, options -> 'redact' IS NULL AS is_quiet FROM related) AS found
             ORDER BY is_quiet, id LIMIT {MAX_RELATIVES + 1}) AS first
)
SELECT id, coalesce(options -> 'redact', '[]') || coalesce(options -> 'inherited', '[]') AS redact, is_quiet,
       CASE WHEN bytes <= {_MAX_BYTES} THEN payload END AS payload,
       CASE WHEN bytes <= {_MAX_BYTES} THEN result END AS result FROM measured
""")
# The inputs of runs; for code also results of tasks and recorded values: everything that reached the code.
_INPUTS = Statement[Row](f"""{_TREE.format(name="insights.redact.given", most=_MAX_RUNS)}, measured AS (
    SELECT id, params::text AS params, CASE WHEN flow THEN state END AS state,
           sum(coalesce(octet_length(params::text), 0) + coalesce(octet_length(state), 0)) OVER (ORDER BY id) AS bytes
      FROM tree WHERE NOT code
)
SELECT params, state, bytes <= {_MAX_BYTES} AS is_read FROM measured
""")
_EVENTS = Statement[Row](f"""{_TREE.format(name="insights.redact.events", most=_MAX_RUNS)}, first AS (
    SELECT h.run_id, h.number, h.data
      FROM tree JOIN orchestrator.histories h ON h.run_id = tree.id AND h.kind = ANY(%(kinds)s::text[])
     WHERE tree.code LIMIT {_MAX_EVENTS + 1}
), measured AS (
    SELECT *, sum(octet_length(data)) OVER (ORDER BY run_id, number) AS bytes FROM first
)
SELECT CASE WHEN bytes <= {_MAX_BYTES} THEN data END AS data FROM measured ORDER BY run_id, number
""")
_KINDS = [
    *("run_started", "signal_received", "update_requested", "promise_created", "promise_resolved", "task_completed"),
    *("child_completed", "operation_recorded", "state_set", "run_completed"),
]


class Relative(NamedTuple):
    """A task that declares arguments as secret."""

    patterns: tuple[str, ...]
    payload: bytes
    result: bytes | None


class Family(NamedTuple):
    """The sources of secrets of a task or a run."""

    patterns: list[str]
    """Patterns of all related tasks and of tasks in their definitions, without patterns for unnamed arguments."""
    relatives: list[Relative]
    parameters: list[Any]
    """Parameters of runs of definitions, as plain data."""
    event_values: list[tuple[str, bytes]]
    """Encoded arguments and messages of runs of code, each with its name."""
    is_partial: bool
    """Whether there are more sources than were read."""


@Statement.function(f"""
SELECT /* insights.redact.of_workflow */ DISTINCT jsonb_path_query(definition, '{_OF_STEPS}') #>> '{{}}'
  FROM orchestrator.workflows WHERE name = %(name)s
""")
def patterns_of_workflow(connection: Connection, name: str) -> list[str]:
    """Return the patterns of the tasks in all versions of a workflow."""


def family_of(
    connection: Connection, *, task: UUID | None = None, run: UUID | None = None, everywhere: bool = False
) -> Family:
    """Return everything from which a task or a run may have secrets: itself, and its relatives.

    `everywhere` says that the settings have patterns, so tasks without own patterns may have secrets, too.
    """
    ids = {"task": task and task.hex, "run": run and run.hex}
    rows = _RELATIVES(connection, **ids, all=everywhere)
    patterns = {*_PATTERNS(connection, **ids), *(pattern for row in rows for pattern in row.redact)}
    relatives = [
        Relative(tuple(row.redact), reveal(bytes(row.payload), CALL), row.result and reveal(bytes(row.result)))
        for row in rows[:MAX_RELATIVES]
        if row.payload is not None
    ]
    unread = [row for row in rows[MAX_RELATIVES:] if not row.is_quiet]
    is_partial = bool(unread) or any(row.payload is None and not row.is_quiet for row in rows)
    given: list[Any] = []
    said: list[tuple[str, bytes]] = []
    if patterns or everywhere:
        inputs = _INPUTS(connection, **ids)
        events = _EVENTS(connection, **ids, kinds=_KINDS)
        given = [value for row in inputs if row.is_read for value in _plain(row)]
        said = list(_values_of_events(row.data for row in events if row.data is not None))
        is_partial |= len(events) > _MAX_EVENTS or any(row.data is None for row in events)
        is_partial |= not all(row.is_read for row in inputs)
    named = sorted(pattern for pattern in patterns if not pattern.startswith("@"))
    return Family(named, relatives, given, said, is_partial)


def _plain(row: Row) -> Iterator[Any]:
    if row.params is not None:
        yield readable_params(msgspec.json.decode(row.params))
    if row.state is not None:
        yield timezones.decode(bytes(row.state))  # includes the shared state and signals


def _values_of_events(events: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the user's values in a history, each with its name."""
    names: dict[bytes, str] = {}
    for data in events:
        event: Any = event_of(data)
        name = getattr(event, "name", "") or getattr(event, "key", "") or names.get(getattr(event, "id", b""), "")
        if isinstance(event, history.PromiseCreated):
            names[event.id] = event.name
        for field in ("payload", "value", "result"):
            if (value := getattr(event, field, None)) is not None:
                yield name, reveal(value, CALL if field == "payload" else VALUE)
