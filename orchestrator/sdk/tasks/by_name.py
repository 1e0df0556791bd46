"""Calls of tasks that only the workers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.domain.tasks.task import NewTask
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.options import CallOptions, check_name, with_options
from orchestrator.sdk.values.payload import encode_call
from orchestrator.settings import Settings


def call_by_name(
    settings: Settings,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    queue: str,
) -> NewTask:
    """Check a call as far as that goes without its function, and return it as data; `queue` is where none is given."""
    chosen = with_options(CallOptions(), options)
    placed = chosen.placed(check_name("task", name), {}, settings.idempotency_period)
    return NewTask(
        id=new_id(),
        name=name,
        queue=chosen.queue or queue,
        payload=encode_call(name, args, kwargs, settings.max_payload),
        priority=chosen.priority,
        delay=chosen.delay_seconds,
        options=placed.options,
        lane=placed.lane,
        expires=chosen.expiry_seconds,
        unique=placed.unique,
    )
