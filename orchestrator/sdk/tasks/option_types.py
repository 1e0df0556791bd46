"""The types of keyword options, for type checkers and editors. The dataclasses document the options.

A dataclass cannot be unpacked into keywords, so this module repeats names and types; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from orchestrator.domain.code.commands import ClosePolicy, OnCancel
from orchestrator.domain.executors.options import ExecutorOptions
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.tasks.starts import OnConflict
from orchestrator.domain.tasks.task import DuplicatePolicy, Isolation, OnLoss
from orchestrator.sdk.tasks.options import Computed, Key
from orchestrator.sdk.tasks.retry import Retry


class OptionTypes(TypedDict, total=False):
    """Options of a task: `CallOptions`."""

    queue: str | None
    priority: int
    delay: float | timedelta
    retries: int | Retry | Sequence[float | timedelta]
    timeout: float | timedelta | None
    isolation: Isolation
    on_success: bool | Any
    on_failure: Any
    store_result: bool
    eta: datetime | None
    expires: float | timedelta | datetime | None
    unique_key: Key | Computed[Key | None] | None
    unique_for: Literal["pending", "running"] | float | timedelta
    on_duplicate: DuplicatePolicy
    idempotency_key: Key | None
    concurrency: int | None
    concurrency_key: Key | Computed[Key | None] | None
    total_concurrency: int | None
    rate: str | Rate | None
    total_rate: str | Rate | None
    weight: float | Computed[float]
    soft_timeout: float | timedelta | None
    redact: Sequence[str]
    executor: ExecutorOptions | str | None
    executor_options: Mapping[str, Any] | None
    headers: Mapping[str, str] | None
    on_loss: OnLoss
    max_starts: int | None


class WorkflowOptionTypes(TypedDict, total=False):
    """Options of `@app.workflow`: `CodeOptions`, without `name`, which there names the workflow itself."""

    timeout: float | timedelta | None
    queue: str | None
    detached: bool
    close_policy: ClosePolicy | None
    on_cancel: OnCancel


class StartOptionTypes(TypedDict, total=False):
    """Options of `workflow.starting(…)`, in addition to messages."""

    id: str | None
    on_conflict: OnConflict | None
    tags: Sequence[str]
    attributes: Mapping[str, str | int | float | bool | datetime]
    update_id: str | None
    pinned: bool | None


class RunOptionTypes(WorkflowOptionTypes, total=False):
    """Options of the runs that a variant of a workflow starts: `CodeOptions`."""

    name: str
