"""What names stand for: tasks that live workers have registered, and workflows and flows, which are no tasks."""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.store.insights.fleet import IS_FRESH
from orchestrator.store.sql import Row, Statement

# A schedule of a task is a workflow of its name, with that task as its step. Workers say `name@1` of code, and `name`.
_KINDS = Statement[Row](f"""
WITH /* insights.names.kinds */ announced AS (
    SELECT DISTINCT known AS name FROM (
        SELECT DISTINCT names FROM orchestrator.workers WHERE state = 'live' AND {IS_FRESH}) AS live
     CROSS JOIN LATERAL unnest(names) AS known
)
SELECT name, 'flow' AS kind FROM (SELECT DISTINCT name FROM orchestrator.flows) AS published
 UNION ALL
SELECT name, 'workflow' FROM (
    SELECT DISTINCT ON (name) name, definition FROM orchestrator.workflows ORDER BY name, version DESC) AS latest
 WHERE NOT jsonb_path_exists(definition, '$.steps[*] ? (@.task == $name)', jsonb_build_object('name', name))
 UNION ALL
SELECT name, 'task' FROM announced
 UNION ALL
SELECT regexp_replace(name, '@[0-9]{{1,9}}$', ''), 'code' FROM announced WHERE name ~ '@[0-9]{{1,9}}$'
""")


def kinds_of_names(connection: Connection) -> dict[str, str]:
    """Return what each name stands for that is known: `task`, `code`, `workflow` or `flow`; a task goes before the last
    two, which may have the name of one.
    """
    return {row.name: row.kind for row in _KINDS(connection)}
