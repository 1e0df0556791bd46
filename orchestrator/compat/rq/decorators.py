"""RQ's `@job`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.compat.rq.job import Job
from orchestrator.compat.rq.queue import Queue


class job:
    """Adds a method `delay` to a function, which enqueues it. Calling the function runs it in the current process."""

    def __init__(self, queue: Queue | str, connection: Any = None, queue_class: Any = None, **options: Any) -> None:
        self._queue = Queue(queue) if isinstance(queue, str) else queue
        self._options = options

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:

        def delay(*args: Any, **kwargs: Any) -> Job:
            options: dict[str, Any] = {
                name: kwargs.pop(name) for name in ("depends_on", "job_id", "at_front") if name in kwargs
            }
            return self._queue.enqueue_call(f, args, kwargs, **(self._options | options))

        f.delay = f.enqueue = delay  # type: ignore[attr-defined]
        return f
