"""Calls of tasks that only the workers have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from orchestrator.domain.tasks.task import NewTask
from orchestrator.sdk.checks import check_name
from orchestrator.sdk.ids import new_id
from orchestrator.sdk.tasks.options import CallOptions, Placed, once, with_options
from orchestrator.sdk.values.payload import encode_call
from orchestrator.sdk.values.sealing import outgoing_task
from orchestrator.settings import Settings
from orchestrator.trace_context import current_trace


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
    period = settings.idempotency_period
    key = options.get(_ONCE)
    if key is None or options.get("unique_key") is not None:
        chosen, placed = _placed(name, options, period)
    else:  # all but this is the same for many calls
        chosen, placed = _placed(name, {option: options[option] for option in options if option != _ONCE}, period)
        placed = placed._replace(unique=once(name, key, period))
    stays = placed.unique is not None and placed.unique.same_call
    task = NewTask(
        id=new_id(),
        name=name,
        queue=chosen.queue or queue,
        payload=encode_call(name, args, kwargs, settings.max_payload if stays else settings.largest_value),
        priority=chosen.priority,
        delay=chosen.delay_seconds,
        options=placed.options,
        lane=placed.lane,
        expires=chosen.expiry_seconds,
        unique=placed.unique,
        trace=current_trace(),
    )
    return outgoing_task(task, settings)


def _placed(name: str, options: Mapping[str, Any], period: float) -> tuple[CallOptions, Placed]:
    """Return the options of a call, checked, and where it is placed by them; what was checked lately is known."""
    given = tuple((option, type(value), value) for option, value in options.items())  # True is 1, but no priority
    try:
        return _known(name, given, period)
    except TypeError:  # a list, which cannot be looked up
        return _known.__wrapped__(name, given, period)


@lru_cache(maxsize=1024)
def _known(name: str, given: Iterable[tuple[str, type, Any]], period: float) -> tuple[CallOptions, Placed]:
    chosen = with_options(_DEFAULTS, {option: value for option, _, value in given})
    return chosen, chosen.placed(check_name("task", name), {}, period)


_DEFAULTS = CallOptions()
_ONCE = "idempotency_key"
