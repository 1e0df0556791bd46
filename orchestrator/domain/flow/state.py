"""The state of a flow run: the cursor, the shared state, and the work of the current node.

It does not grow with the number of steps: a loop of ten thousand leaves as much behind as a loop of ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple


@dataclass
class Frame:
    """One level of the cursor: the flow itself, or a subflow of a node in the frame above."""

    node: str
    """The key of the current node. Empty when the run has ended."""
    shared: dict[str, Any] = field(default_factory=dict)
    input: Any = None
    """For a subflow, the input of its node."""
    last_action: str = ""
    entered: float = 0.0
    """The time at which the cursor reached the node."""
    attempt: int = 1
    """The attempt of the current node, if it is a subflow."""


@dataclass
class Calls:
    """The tasks that the current node waits for."""

    input: Any
    total: int
    first: int
    """The number of its first task."""
    values: list[Any]
    """Results by position. None if missing."""
    errors: dict[int, str] = field(default_factory=dict)
    running: dict[bytes, int] = field(default_factory=dict)
    """Positions of the open tasks, by id."""
    created: int = 0
    """The number of tasks created so far."""
    kept: list[int] = field(default_factory=list)
    """Positions that had succeeded before a retry and are not called again."""
    recomputes_input: bool = False
    """The input is computed from the node's prep when needed, so that it is not stored twice."""

    @property
    def open_positions(self) -> Sequence[int]:
        """The positions to call in this visit, in order."""
        return self._positions_without_kept if self.kept else range(self.total)

    @cached_property
    def _positions_without_kept(self) -> Sequence[int]:
        kept = set(self.kept)
        return [position for position in range(self.total) if position not in kept]

    @property
    def done(self) -> list[int]:
        """The positions that have a value."""
        called = self.open_positions[: self.created]
        running = set(self.running.values())
        return [*self.kept, *(index for index in called if index not in self.errors and index not in running)]


class Kept(NamedTuple):
    """Results of the node at which a run failed, which a retry reuses."""

    path: str
    values: list[Any]
    positions: list[int]


@dataclass
class Wait:
    """The current node's wait for something other than tasks."""

    what: str
    """`timer`, `signal`, `retry` (of a subflow), or `turn` (continue in the next tick)."""
    input: Any = None
    timer: bytes | None = None
    due: float | None = None
    key: str = ""
    """The key of the signal."""


@dataclass
class FlowState:
    """The state of a run between two ticks."""

    frames: list[Frame] = field(default_factory=list)
    work: Calls | Wait | None = None
    steps: int = 0
    made: int = 0
    """The number of ids created."""
    recorded: int = 0
    """The number of node visits recorded."""
    signals: dict[str, Any] = field(default_factory=dict)
    """Signals by key. Waits in subflows read them here."""
    deciders: dict[str, tuple[str, float, str]] = field(default_factory=dict)
    """By key, the sender, time and reason of a signal."""
    closing: list[bytes] = field(default_factory=list)
    """Cancelled tasks whose end has not been reported yet."""
    is_over: bool = False
    """The flow has ended. The run ends when no task is open."""
    error: str | None = None
    """Why the flow failed."""
    kept: Kept | None = None
    queued: dict[str, list[tuple[Any, str, float, str]]] = field(default_factory=dict)
    """By key, signals that arrived before the previous one was consumed: value, sender, time, reason."""
    initial: dict[str, Any] | None = None
    """The shared state that the run was started with."""

    @property
    def shared(self) -> dict[str, Any]:
        """The shared state of the run."""
        return self.frames[0].shared if self.frames else self.initial or {}

    @property
    def cursor(self) -> str:
        """The path of the current node: its key after those of the nodes above it."""
        if len(self.frames) == 1:
            return self.frames[0].node
        return "/".join(frame.node for frame in self.frames if frame.node)

    @property
    def last_action(self) -> str:
        """The action that led to the current node."""
        return self.frames[0].last_action if self.frames else ""

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended: the flow is over and no cancelled task is open."""
        return self.is_over and not self.closing

    def to_plain(self) -> list[Any]:
        work: list[Any] | None = None
        if isinstance(self.work, Calls):
            calls = self.work
            running = [[identifier, position] for identifier, position in calls.running.items()]
            errors = [[position, error] for position, error in calls.errors.items()]
            work = ["calls", calls.input, calls.total, calls.first, calls.values, errors, running, calls.created]
            work += [calls.kept, calls.recomputes_input]
        elif isinstance(self.work, Wait):
            wait = self.work
            work = ["wait", wait.what, wait.input, wait.timer, wait.due, wait.key]
        frames = [[f.node, f.shared, f.input, f.last_action, f.entered, f.attempt] for f in self.frames]
        deciders = {key: [*who] for key, who in self.deciders.items()}
        numbers = [self.steps, self.made, self.recorded]
        kept = None if self.kept is None else [*self.kept]
        plain = [frames, work, numbers, self.signals, deciders, self.closing, self.is_over, self.error]
        if self.initial is not None:
            return [*plain, kept, self.queued, self.initial]
        return [*plain, kept, self.queued] if kept or self.queued else plain

    @classmethod
    def from_plain(cls, plain: Any) -> FlowState:
        """Return the state that `to_plain` encoded."""
        frames, work, (steps, made, recorded), signals, deciders, closing, is_over, error = plain[:8]
        kept, queued = plain[8:10] if len(plain) > 8 else (None, {})
        initial = plain[10] if len(plain) > 10 else None
        decoded: Calls | Wait | None = None
        if work is not None and work[0] == "calls":
            _, input, total, first, values, errors, running, *rest = work
            decoded = Calls(input, total, first, values, dict(errors), {bytes(id): at for id, at in running}, *rest)
        elif work is not None:
            _, what, input, timer, due, key = work
            decoded = Wait(what, input, None if timer is None else bytes(timer), due, key)
        return cls(
            frames=[Frame(*frame) for frame in frames],
            work=decoded,
            steps=steps,
            made=made,
            recorded=recorded,
            signals=signals,
            deciders={key: (who[0], who[1], who[2]) for key, who in deciders.items()},
            closing=[bytes(item) for item in closing],
            is_over=is_over,
            error=error,
            kept=None if kept is None else Kept(*kept),
            queued={key: [(item[0], item[1], item[2], item[3]) for item in items] for key, items in queued.items()},
            initial=initial,
        )
