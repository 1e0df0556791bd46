"""Patterns of `redact` that hold for a run: those of the tasks that it runs."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection

from orchestrator.store.flow.reads import OF_FUNCTIONS
from orchestrator.store.sql import Statement

_OF_STEPS = "$.steps[*].registered.options.redact[*]"
_OF_RUN = Statement[str](f"""
SELECT /* insights.redact.of_run */ DISTINCT pattern FROM orchestrator.runs r
 CROSS JOIN LATERAL (
       SELECT jsonb_path_query(w.definition, '{_OF_STEPS}') #>> '{{}}' FROM orchestrator.workflows w
        WHERE NOT r.flow AND NOT r.code AND w.name = r.workflow AND w.version = r.version
       UNION ALL
       SELECT jsonb_path_query(f.definition, '{OF_FUNCTIONS}') #>> '{{}}' FROM orchestrator.flows f
        WHERE r.flow AND f.name = r.workflow AND f.version = r.version
       UNION ALL
       SELECT jsonb_array_elements_text(t.options -> 'redact') FROM orchestrator.tasks t
        WHERE r.code AND t.run_id = r.id
       UNION ALL
       SELECT jsonb_array_elements_text(e.options -> 'redact') FROM orchestrator.ended_tasks e
        WHERE r.code AND e.run_id = r.id) AS found (pattern)
 WHERE r.id = %(run)s::uuid
""")


def redact_of_run(connection: Connection, run: UUID) -> list[str]:
    """Return the patterns of the tasks of a run: of a definition, all that it names; of code, those scheduled."""
    return list(_OF_RUN(connection, run=run.hex))
