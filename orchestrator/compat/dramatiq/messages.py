"""Dramatiq's messages, pipelines and groups, as calls of tasks and compositions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any
from uuid import uuid4

from orchestrator.compat.coverage import DRAMATIQ, refused
from orchestrator.compat.dramatiq.errors import ResultFailure, ResultMissing, ResultTimeout
from orchestrator.errors import InvalidTask, RunFailed, TaskEnded, TaskFailed
from orchestrator.errors import ResultTimeout as NativeTimeout
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.tasks.compositions import chain, chord
from orchestrator.sdk.tasks.compositions import group as native_group
from orchestrator.sdk.tasks.retry import Retry
from orchestrator.sdk.tasks.task import Task

app = Orchestrator()

DECLARED: dict[str, Mapping[str, Any]] = {}
"""Options of the actors, by actor name."""
PIPED = "dramatiq_piped"
"""Keyword argument that makes an actor take the piped result as its last argument, where compositions pass it first."""
WAIT = 10_000
"""Milliseconds to wait for a result by default, as in Dramatiq."""


class Message:
    """A call of an actor."""

    def __init__(
        self,
        queue_name: str,
        actor_name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        message_id: str | None = None,
    ) -> None:
        self.queue_name = queue_name
        self.actor_name = actor_name
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.options = dict(options)
        self.message_id = message_id or str(uuid4())

    def __repr__(self) -> str:
        return f"<Message {self.actor_name} {self.message_id}>"

    def __or__(self, other: Message | pipeline) -> pipeline:
        return pipeline([self, other])

    def copy(self, **attributes: Any) -> Message:
        message = copy(self)
        vars(message).update(attributes)
        return message

    def task(self, delay: float | None = None) -> Task[..., Any]:
        """Return the actor's task with the options of this message."""
        own = {**self.options, **({} if delay is None else {"delay": delay})}
        chosen = native_options(own, DECLARED[self.actor_name])
        return app.find_task(self.actor_name).options(**chosen, queue=self.queue_name)

    def part(self, is_first: bool, delay: float | None = None) -> Any:
        task = self.task(delay)
        if is_first or self.options.get("pipe_ignore"):
            return task.si(*self.args, **self.kwargs)
        return task.s(*self.args, **self.kwargs, **({PIPED: True} if self.args else {}))

    def get_result(self, *, backend: Any = None, block: bool = False, timeout: int | None = None) -> Any:
        """Return the result. Raise ResultMissing if there is none, or ResultTimeout after `timeout` milliseconds."""
        handle = app.handle(self.message_id)
        if not block and handle.status() in ("pending", "dispatched", "running"):
            raise ResultMissing(repr(self))
        return waited(lambda: handle.result(timeout=_seconds(timeout)), self)


def waited(read: Callable[[], Any], subject: object) -> Any:
    """Return a result, or raise Dramatiq's equivalent of the error."""
    try:
        return read()
    except NativeTimeout as error:
        raise ResultTimeout(repr(subject)) from error
    except TaskFailed as error:
        raise ResultFailure(str(error), error.kind, str(error)) from error
    except (TaskEnded, RunFailed) as error:
        raise ResultFailure(str(error)) from error


class _Composition:
    """A composition, which can be run once and then has results."""

    def __init__(self) -> None:
        self._run: Any = None

    def _native(self, delay: float | None = None) -> Any:
        raise NotImplementedError

    def run(self, *, delay: float | None = None) -> Any:
        """Start the composition, after `delay` milliseconds."""
        self._run = self._native(delay).start()
        return self

    @property
    def _started(self) -> Any:
        if self._run is None:
            raise ResultMissing(f"{self!r} was not run.")
        return self._run

    @property
    def completed(self) -> bool:
        return self._started.status() in ("success", "failed", "cancelled")

    def _check(self, block: bool) -> None:
        if not block and not self.completed:
            raise ResultMissing(repr(self))


class pipeline(_Composition):
    """Messages that run one after another. Each gets the previous result as its last argument."""

    def __init__(self, children: Iterable[Message | pipeline], *, broker: Any = None) -> None:
        super().__init__()
        self.messages: list[Message] = []
        for child in children:
            self.messages += child.messages if isinstance(child, pipeline) else [child]

    def __len__(self) -> int:
        return len(self.messages)

    def __or__(self, other: Message | pipeline) -> pipeline:
        return pipeline([self, other])

    def _native(self, delay: float | None = None) -> Any:
        first, *rest = self.messages
        return chain(first.part(True, delay), *(message.part(False) for message in rest))

    def get_result(self, *, block: bool = False, timeout: int | None = None) -> Any:
        self._check(block)
        return waited(lambda: self._started.result(timeout=_seconds(timeout)), self)


class group(_Composition):
    """Messages and pipelines that run concurrently."""

    def __init__(self, children: Iterable[Message | pipeline], *, broker: Any = None) -> None:
        super().__init__()
        self.children = list(children)
        self._callbacks: list[Message] = []

    def __len__(self) -> int:
        return len(self.children)

    def add_completion_callback(self, message: Message) -> None:
        self._callbacks.append(message)

    def _native(self, delay: float | None = None) -> Any:
        parts = [one._native(delay) if isinstance(one, pipeline) else one.part(True, delay) for one in self.children]
        if not self._callbacks:
            return native_group(parts)
        return chord(native_group(parts), native_group(callback.part(True) for callback in self._callbacks))

    def get_results(self, *, block: bool = False, timeout: int | None = None) -> Iterator[Any]:
        """Yield the results in order. Not available for a group with completion callbacks."""
        self._check(block)
        if self._callbacks:
            raise InvalidTask(
                "get_results of a group with completion callbacks is not covered: keep results in the actors."
            )
        yield from waited(lambda: self._started.results(timeout=_seconds(timeout)), self)

    def wait(self, *, timeout: int | None = None) -> None:
        waited(lambda: self._started.wait_ended(timeout=_seconds(timeout)), self)


def _seconds(timeout: int | None) -> float:
    return (WAIT if timeout is None else timeout) / 1_000


DEFAULTS: Mapping[str, Any] = {
    "max_retries": 20,
    "min_backoff": 15_000,
    "max_backoff": 7 * 86_400_000,
    "time_limit": 600_000,
}
"""Default options of actors, from Dramatiq's middleware."""
_REFUSED = refused(DRAMATIQ.calls["actor"])
_RETRIES = ("max_retries", "min_backoff", "max_backoff", "throws")
_SECONDS = {"time_limit": "timeout", "max_age": "expires", "delay": "delay"}
_NO_EFFECT = ("store_results", "result_ttl", "pipe_target", "pipe_ignore")
_MAX_PRIORITY = 100
"""The highest priority of a task."""


def native_options(options: Mapping[str, Any], declared: Mapping[str, Any] = DEFAULTS) -> dict[str, Any]:
    """Convert options of an actor or message into task options. `declared` are the actor's own options."""
    native: dict[str, Any] = {}
    for name, value in options.items():
        if name in _REFUSED and value is not None:
            raise InvalidTask(f"Option {name} of Dramatiq is not covered: {_REFUSED[name]}.")
        if name in _SECONDS:
            if value is not None and value != float("inf"):
                native[_SECONDS[name]] = value / 1_000
        elif name == "priority":
            native["priority"] = max(-_MAX_PRIORITY, min(_MAX_PRIORITY, -value))
        elif name not in (*_RETRIES, *_NO_EFFECT, *_REFUSED):
            raise InvalidTask(f"Unknown option {name!r} of Dramatiq.")
    if any(name in options for name in _RETRIES):
        merged = {**DEFAULTS, **declared, **options}
        native["retries"] = Retry(
            max=1_000_000 if merged["max_retries"] is None else merged["max_retries"],
            base=max(0.001, merged["min_backoff"] / 1_000),
            cap=max(0.001, merged["max_backoff"] / 1_000),
            give_up_on=merged.get("throws") or (),
        )
    return native
