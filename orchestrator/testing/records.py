"""Records of tasks and runs in memory, for assertions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.limits.lane_limits import gate_bucket, gate_of, lane_bucket
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import NewTask, TaskError, TaskOptions, caller_key, parse_options
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.transport.codec import LogLine, ProgressMark


class TestedTask:
    """A task that was enqueued in a test, with its state and result."""

    __test__ = False

    def __init__(self, new: NewTask, task: Task[..., Any] | None, now: float) -> None:
        self.new = new
        """The task as it would be stored."""
        self._task = task
        self.state = TaskState.PENDING
        self.attempt = 0
        """The number of attempts so far."""
        self.failures = 0
        """The number of failed attempts."""
        self.error: TaskError | None = None
        """The error of the last failed attempt."""
        self.encoded: bytes | None = None
        self.details: bytes | None = None
        self.progress: ProgressMark | None = None
        self.lines: list[LogLine] = []
        """Lines logged with `ctx.log`."""
        self.due = now + max(0.0, new.delay)
        """The time at which the task may start, by the test's clock, in Unix seconds."""
        self.expires_at = None if new.expires is None else now + new.expires
        self.created_at = now

    @property
    def id(self) -> str:
        return to_text(self.new.id)

    @property
    def name(self) -> str:
        return self.new.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with defaults, as the task receives them."""
        arguments, keywords, *_ = decode_call(self.new.payload)
        if self._task is None:
            return {**dict(enumerate(arguments)), **keywords}
        return self._task._signature.named(*self._task._signature.restore(arguments, keywords))

    @property
    def rates(self) -> list[tuple[str, Rate]]:
        """The rate limits of the task, each with its bucket."""
        lane = self.new.lane or ""
        limits = (lane_bucket(lane), self.options.rate), (gate_bucket(gate_of(lane)), self.options.total_rate)
        return [(bucket, rate) for bucket, rate in limits if rate is not None]

    @property
    def options(self) -> TaskOptions:
        return parse_options(self.new.options)

    @property
    def result(self) -> Any:
        """The return value; None if the task has not succeeded."""
        value = None if self.encoded is None else decode_value(self.encoded)
        return value if self._task is None else self._task._signature.convert_stored(value)

    def option(self, name: str) -> Any:
        """Return an option by its name in `.options(…)`."""
        match name:
            case "queue" | "priority" | "delay" | "expires":
                return getattr(self.new, name)
            case "unique_key" | "idempotency_key":
                return None if self.new.unique is None else caller_key(self.name, self.new.unique.key)
            case "concurrency_key":
                return None if self.new.lane is None else self.new.lane.partition("|")[2] or None
            case "retries":
                return self.options.retry.max
        return getattr(self.options, name, None)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r:.100}" for name, value in self.arguments.items())
        options = "".join(
            f" {name}={value!r}"
            for name, value, default in (
                ("queue", self.new.queue, "default"),
                ("delay", self.new.delay, 0.0),
                ("priority", self.new.priority, 0),
            )
            if value != default
        )
        return f"{self.name}({arguments}){options} {self.state}"


@dataclass
class ManyTasks:
    """A run of many tasks."""

    tasks: list[TestedTask]
    cancelling: bool = False


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """A run that was started in a test: of many tasks, a composition or a workflow."""

    id: str
    """The id of the run, as in its handle."""
    name: str
    """The name of the run or of its workflow."""
    params: Mapping[str, Any]
    """The parameters, or the arguments of a code workflow by name."""
    key: str | None = None
    """The idempotency key of the run, or its id chosen by the program."""
