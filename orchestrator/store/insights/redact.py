"""What is secret of a task or a run: the patterns of `redact` of its relatives, and the values under them.

A value that a task names travels: into a follow-up, a step below, a child run, and up again as its output. So these
are relatives: the tasks that a task follows or was enqueued by, and all tasks in the trees of runs that these are in.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Connection

from orchestrator.sealing import CALL, reveal
from orchestrator.store.flow.reads import OF_FUNCTIONS
from orchestrator.store.sql import Row, Statement

MOST_RELATIVES = 200
"""Tasks with patterns of their own that are read; among more, nobody can say which values are secret."""
_MOST_RUNS = 1_000
_MOST_BYTES = 4_000_000
_REDACTING = "$.steps[*] ? (exists (@.registered.options.redact))"
_OF_STEPS = "$.steps[*].registered.options.redact[*]"
# Up: who enqueued a task, what it follows, whose run it is in, what started that. Then down again, through child runs.
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
      WHERE t.options -> 'redact' IS NOT NULL LIMIT {MOST_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM up JOIN orchestrator.ended_tasks e ON e.id = up.task
      WHERE e.options -> 'redact' IS NOT NULL LIMIT {MOST_RELATIVES + 1})
     UNION ALL
    (SELECT t.id, t.payload, NULL, t.options FROM steps JOIN orchestrator.tasks t ON t.run_id = steps.id
      WHERE (steps.is_any OR t.step = ANY(steps.names)) AND t.options -> 'redact' IS NOT NULL
      LIMIT {MOST_RELATIVES + 1})
     UNION ALL
    (SELECT e.id, e.payload, e.result, e.options FROM steps JOIN orchestrator.ended_tasks e ON e.run_id = steps.id
      WHERE (steps.is_any OR e.step = ANY(steps.names)) AND e.options -> 'redact' IS NOT NULL
      LIMIT {MOST_RELATIVES + 1})
), measured AS (
    SELECT *, sum(octet_length(payload) + coalesce(octet_length(result), 0)) OVER (ORDER BY id) AS bytes
      FROM (SELECT DISTINCT ON (id) * FROM related ORDER BY id LIMIT {MOST_RELATIVES + 1}) AS first
)
SELECT id, options -> 'redact' AS redact, CASE WHEN bytes <= {_MOST_BYTES} THEN payload END AS payload,
       CASE WHEN bytes <= {_MOST_BYTES} THEN result END AS result FROM measured
""")
_PARAMS = Statement[str](f"""{_TREE.format(name="insights.redact.params", most=_MOST_RUNS)}
SELECT params::text FROM tree WHERE params IS NOT NULL AND NOT code LIMIT {MOST_RELATIVES}
""")


_OF_WORKFLOW = Statement[str](f"""
SELECT /* insights.redact.of_workflow */ DISTINCT jsonb_path_query(definition, '{_OF_STEPS}') #>> '{{}}'
  FROM orchestrator.workflows WHERE name = %(name)s
""")


class Relative(NamedTuple):
    """A task that names what is secret of it."""

    patterns: tuple[str, ...]
    payload: bytes
    result: bytes | None


class Family(NamedTuple):
    """What a task or a run may have secrets from."""

    patterns: list[str]
    """Of all tasks in it, and of those that its definitions name; not those of arguments without names."""
    relatives: list[Relative]
    params: list[str]
    """What runs were given, as JSON."""
    is_partial: bool
    """There is more of it than was read."""


def patterns_of_workflow(connection: Connection, name: str) -> list[str]:
    """Return the patterns of the tasks of a workflow, in any version."""
    return _OF_WORKFLOW(connection, name=name)


def family_of(connection: Connection, *, task: UUID | None = None, run: UUID | None = None) -> Family:
    """Return what a task, or a run, may have secrets from: itself, and all that is related to it."""
    ids = {"task": task and task.hex, "run": run and run.hex}
    rows = _RELATIVES(connection, **ids)
    patterns = {*_PATTERNS(connection, **ids), *(pattern for row in rows for pattern in row.redact)}
    relatives = [
        Relative(tuple(row.redact), reveal(bytes(row.payload), CALL), row.result and reveal(bytes(row.result)))
        for row in rows[:MOST_RELATIVES]
        if row.payload is not None
    ]
    named = sorted(pattern for pattern in patterns if not pattern.startswith("@"))
    return Family(named, relatives, _PARAMS(connection, **ids), len(relatives) < len(rows))
