"""The trace of what comes of a run."""

from __future__ import annotations


def span_of_run(identifier: str) -> str:
    """Return an expression: the traceparent of what comes of a run with this id, null where that is not traced.

    Where the leader `has_spans` of runs, that is the span of the run, whose id is the second half of the run's own
    (`orchestrator/trace_context.py`); else it is the span that the run came of.
    """
    own = "overlay(run.trace PLACING right(replace(run.id::text, '-', ''), 16) FROM 37 FOR 16)"
    return f"""(SELECT CASE WHEN %(has_spans)s::boolean THEN {own} ELSE run.trace END
              FROM orchestrator.runs run WHERE run.id = {identifier} LIMIT 1)"""
