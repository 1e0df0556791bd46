"""Result classes, at their import path in Celery."""

from __future__ import annotations

from orchestrator.compat.celery.results.many import GroupResult, ResultSet, allow_join_result, result_from_tuple
from orchestrator.compat.celery.results.single import AsyncResult, EagerResult, ResultBase

__all__ = [
    "AsyncResult",
    "EagerResult",
    "GroupResult",
    "ResultBase",
    "ResultSet",
    "allow_join_result",
    "result_from_tuple",
]
