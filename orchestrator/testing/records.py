"""What a test sees of tasks and runs in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.domain.ids import to_text
from orchestrator.domain.limits.buckets import Rate
from orchestrator.domain.limits.lane_limits import gate_bucket, gate_of, lane_bucket
from orchestrator.domain.states import TaskState
from orchestrator.domain.tasks.task import NewTask, TaskError, TaskOptions, given_key, parse_options
from orchestrator.sdk.tasks.task import Task
from orchestrator.sdk.values.payload import decode_call, decode_value
from orchestrator.transport.codec import LogLine, ProgressMark


class TestedTask:
    """A task that was enqueued in a test, and what became of it."""

    __test__ = False

    def __init__(self, new: NewTask, task: Task[..., Any] | None, now: float) -> None:
        self.new = new
        """The call as it travels."""
        self._task = task
        self.state = TaskState.PENDING
        self.attempt = 0
        """How often it was handed to a worker."""
        self.failures = 0
        """How often it has failed."""
        self.error: TaskError | None = None
        """Why it failed, or failed last."""
        self.encoded: bytes | None = None
        self.details: bytes | None = None
        self.progress: ProgressMark | None = None
        self.lines: list[LogLine] = []
        """What it said with `ctx.log`."""
        self.due = now + max(0.0, new.delay)
        """When it may start, by the clock of the test, in Unix seconds."""
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
        """The arguments by name, with defaults, as the task is given them."""
        arguments, keywords, *_ = decode_call(self.new.payload)
        if self._task is None:
            return {**dict(enumerate(arguments)), **keywords}
        return self._task._signature.named(*self._task._signature.restore(arguments, keywords))

    @property
    def rates(self) -> list[tuple[str, Rate]]:
        """The rates that it counts against, each with its bucket."""
        lane = self.new.lane or ""
        found = (lane_bucket(lane), self.options.rate), (gate_bucket(gate_of(lane)), self.options.total_rate)
        return [(bucket, rate) for bucket, rate in found if rate is not None]

    @property
    def options(self) -> TaskOptions:
        return parse_options(self.new.options)

    @property
    def result(self) -> Any:
        """What it has returned; None if it has not."""
        value = None if self.encoded is None else decode_value(self.encoded)
        return value if self._task is None else self._task._signature.restore_kept(value)

    def option(self, name: str) -> Any:
        """Return an option by the name that it has in `.options(…)`."""
        match name:
            case "queue" | "priority" | "delay" | "expires":
                return getattr(self.new, name)
            case "unique_key" | "idempotency_key":
                return None if self.new.unique is None else given_key(self.name, self.new.unique.key)
            case "concurrency_key":
                return None if self.new.lane is None else self.new.lane.partition("|")[2] or None
            case "retries":
                return self.options.retry.max
        return getattr(self.options, name, None)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r:.100}" for name, value in self.arguments.items())
        placed = "".join(
            f" {name}={value!r}"
            for name, value, usual in (
                ("queue", self.new.queue, "default"),
                ("delay", self.new.delay, 0.0),
                ("priority", self.new.priority, 0),
            )
            if value != usual
        )
        return f"{self.name}({given}){placed} {self.state}"


@dataclass
class ManyTasks:
    """A run of many tasks."""

    tasks: list[TestedTask]
    cancelling: bool = False


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """A run that was started in a test: of many tasks, of a composition, or of a workflow."""

    id: str
    """The id that its handle has."""
    name: str
    """What the run, or its workflow, is called."""
    params: Mapping[str, Any]
    """Parameters, or the arguments of a workflow as code by name."""
    key: str | None = None
    """Its idempotency key, or the id of the program's own."""
