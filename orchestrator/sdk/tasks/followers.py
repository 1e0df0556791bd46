"""Callbacks: tasks that run after the end of another task, set with the options `on_success` and `on_failure`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import msgspec

from orchestrator.domain import redaction
from orchestrator.domain.tasks.callbacks import Callback, Callbacks
from orchestrator.domain.tasks.task import with_inherited
from orchestrator.errors import InvalidTask
from orchestrator.sdk.client import Client
from orchestrator.sdk.tasks.compositions import Parts
from orchestrator.sdk.tasks.options import CallOptions, Placed
from orchestrator.sdk.tasks.signature import Signature


class Followed(Protocol):
    """The attributes of a task that its callbacks use."""

    name: str
    _client: Client
    _call_options: CallOptions
    _signature: Signature
    _after_success: tuple[Any, ...]
    _after_failure: tuple[Any, ...]

    @property
    def queue(self) -> str: ...
    def _place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Placed: ...


def followers_of(task: Followed, option: str, value: object) -> tuple[Any, ...]:
    """Return the tasks in the value of an `on_success` or `on_failure` option: none, one or several."""
    if value is None or isinstance(value, bool):
        return ()
    followers = value if isinstance(value, (list, tuple)) else (value,)
    for follower in followers:
        if not isinstance(follower, Parts):
            raise InvalidTask(f"Option {option}: expected a task, or a list of tasks, found {follower!r}.")
        task._client.refuse_other(f"Option {option}: task {task.name!r}", follower)
    return tuple(followers)


def queues_of(task: Followed) -> Iterator[str]:
    yield task.queue
    for follower in (*task._after_success, *task._after_failure):
        yield from queues_of(follower)


def callbacks_of(task: Followed, inherited: tuple[str, ...]) -> str | None:
    """Return the callbacks of a task as JSON. They redact what the tasks before them redact (`inherited`)."""
    success, failure = task._after_success, task._after_failure
    if not success and not failure:
        return None
    hidden = tuple(dict.fromkeys((*inherited, *redaction.inheritable_patterns(task._call_options.redact))))
    callbacks = Callbacks(
        task.name,
        tuple(_callback(follower, hidden) for follower in success),
        tuple(_callback(follower, hidden) for follower in failure),
    )
    return msgspec.json.encode(callbacks).decode()


def _callback(task: Followed, inherited: tuple[str, ...]) -> Callback:
    """Return a task as a callback, which receives the result of another task and inherits its redaction."""
    options = task._call_options
    if options.is_computed or options.unique_key is not None or options.idempotency_key is not None:
        raise InvalidTask(
            f"Task {task.name!r} cannot follow another: its keys are unique or depend on its arguments, which "
            "are known only when the other task ends."
        )
    if options.eta is not None or isinstance(options.expires, datetime):
        raise InvalidTask(
            f"Task {task.name!r} cannot follow another: its eta or expires is a fixed moment, but the other task "
            "may end at any time. Give seconds."
        )
    placed = task._place((), {})
    return Callback(
        name=task.name,
        queue=task.queue,
        priority=options.priority,
        delay=options.delay_seconds,
        options=with_inherited(placed.options, inherited),
        lane=placed.lane,
        expires=options.expiry_seconds,
        callbacks=callbacks_of(task, inherited),
    )


def check_followers(task: Followed) -> None:
    """Refuse `store_result=False` if a success callback needs the result."""
    for follower in task._after_success:
        try:
            follower._signature.restore([None], {})
        except InvalidTask as error:
            raise InvalidTask(
                f"Task {task.name!r} keeps no result (store_result=False), so {follower.name!r}, which follows its "
                f"success, would be given None: {error} Keep the result, or let the follower take None."
            ) from error
