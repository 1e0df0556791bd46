"""Celery's signals. Task signals without receivers cost nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger("orchestrator.compat.celery")

R = TypeVar("R", bound=Callable[..., Any])


class Signal:
    """A set of receivers, which are called with keyword arguments when an event happens."""

    def __init__(self, name: str = "", providing_args: set[str] | None = None) -> None:
        self.name = name
        self.providing_args = providing_args or set()
        self.receivers: list[tuple[Any, Callable[..., Any], Any]] = []
        """Receivers, as key, function, and the sender to which they are limited, if any."""

    def connect(self, *args: Any, **kwargs: Any) -> Any:
        """Connect a receiver; also usable as a decorator: `@task_failure.connect(sender=add)`."""

        def add(receiver: R) -> R:
            key = kwargs.get("dispatch_uid") or receiver
            sender = kwargs.get("sender")
            if not any(existing_key == key and limit == sender for existing_key, _, limit in self.receivers):
                self.receivers.append((key, receiver, sender))
            return receiver

        return add(args[0]) if args and callable(args[0]) else add

    def disconnect(self, receiver: Any = None, sender: Any = None, dispatch_uid: Any = None, **_: Any) -> bool:
        """Disconnect a receiver; return whether it was connected."""
        key = dispatch_uid or receiver
        remaining = [item for item in self.receivers if not (item[0] == key and (sender is None or item[2] == sender))]
        changed = len(remaining) != len(self.receivers)
        self.receivers = remaining
        return changed

    def has_listeners(self, sender: Any = None) -> bool:
        return any(limit is None or _is_sender(limit, sender) for _, _, limit in self.receivers)

    def send(self, sender: Any, **arguments: Any) -> list[tuple[Callable[..., Any], Any]]:
        """Call all receivers for this sender; an exception of a receiver is logged."""
        responses: list[tuple[Callable[..., Any], Any]] = []
        for _, receiver, limit in list(self.receivers):
            if limit is not None and not _is_sender(limit, sender):
                continue
            try:
                responses.append((receiver, receiver(signal=self, sender=sender, **arguments)))
            except Exception as error:
                log.exception("signal.failed signal=%s receiver=%r", self.name, receiver)
                responses.append((receiver, error))
        return responses

    send_robust = send

    def __repr__(self) -> str:
        return f"<Signal: {self.name} providing_args={self.providing_args!r}>"


def _is_sender(limit: Any, sender: Any) -> bool:
    """Return whether a sender is the one that a receiver is limited to: a task, or its name."""
    name = getattr(sender, "name", sender)
    return bool(limit == sender or getattr(limit, "name", limit) == name)


before_task_publish = Signal("before_task_publish")
after_task_publish = Signal("after_task_publish")
task_received = Signal("task_received")
task_prerun = Signal("task_prerun")
task_postrun = Signal("task_postrun")
task_success = Signal("task_success")
task_retry = Signal("task_retry")
task_failure = Signal("task_failure")
task_internal_error = Signal("task_internal_error")
task_revoked = Signal("task_revoked")
task_rejected = Signal("task_rejected")
task_unknown = Signal("task_unknown")
celeryd_init = Signal("celeryd_init")
celeryd_after_setup = Signal("celeryd_after_setup")
import_modules = Signal("import_modules")
worker_init = Signal("worker_init")
worker_before_create_process = Signal("worker_before_create_process")
worker_process_init = Signal("worker_process_init")
worker_process_shutdown = Signal("worker_process_shutdown")
worker_ready = Signal("worker_ready")
worker_shutting_down = Signal("worker_shutting_down")
worker_shutdown = Signal("worker_shutdown")
beat_init = Signal("beat_init")
beat_embedded_init = Signal("beat_embedded_init")
heartbeat_sent = Signal("heartbeat_sent")
setup_logging = Signal("setup_logging")
after_setup_logger = Signal("after_setup_logger")
after_setup_task_logger = Signal("after_setup_task_logger")
user_preload_options = Signal("user_preload_options")
NEVER_SENT = {
    "task_received": "Connect task_prerun.",
    "task_unknown": "A task that no worker knows is held; `orchestrator tasks list` shows it.",
    "task_internal_error": "See the log of the worker.",
    "worker_before_create_process": "Connect worker_process_init.",
    "heartbeat_sent": "`orchestrator workers` shows heartbeats.",
    "user_preload_options": "Read the environment.",
}
"""Signals that exist only so that imports work, with their alternatives."""
