"""The state of a run of a flow: its cursor, the shared state, and what the current node waits for.

It does not grow with the steps that a run has taken: a loop of ten thousand leaves as much behind as one of ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple


@dataclass
class Frame:
    """A flow that a run is in: its own, or one that stands in a node of the frame above."""

    node: str
    """Where the cursor stands; empty when the run has ended."""
    shared: dict[str, Any] = field(default_factory=dict)
    input: Any = None
    """Of a subflow: what its node took in."""
    last_action: str = ""
    entered: float = 0.0
    """When the cursor came to its node."""
    attempt: int = 1
    """Of a subflow in this node: the how many-th try."""


@dataclass
class Calls:
    """Tasks that the present node waits for."""

    input: Any
    total: int
    first: int
    """The number of the first of them."""
    values: list[Any]
    """By position; None where there is none."""
    errors: dict[int, str] = field(default_factory=dict)
    running: dict[bytes, int] = field(default_factory=dict)
    """By id, the positions of those that are open."""
    created: int = 0
    """How many there have been."""
    kept: list[int] = field(default_factory=list)
    """Positions that had ended well before the node was retried; they are not called again."""
    is_looked_up: bool = False
    """Whether the input is what the node's prep leads to, so that it need not be kept twice."""

    @property
    def open_positions(self) -> Sequence[int]:
        """Return the positions that are called in this visit, in order."""
        return self._positions_but_kept if self.kept else range(self.total)

    @cached_property
    def _positions_but_kept(self) -> Sequence[int]:
        kept = set(self.kept)
        return [position for position in range(self.total) if position not in kept]

    @property
    def done(self) -> list[int]:
        """Return the positions that have a value."""
        called = self.open_positions[: self.created]
        running = set(self.running.values())
        return [*self.kept, *(one for one in called if one not in self.errors and one not in running)]


class Kept(NamedTuple):
    """Results of the node at which a run has failed: a retry does not repeat them."""

    path: str
    values: list[Any]
    positions: list[int]


@dataclass
class Wait:
    """What the current node waits for beside tasks."""

    what: str
    """`timer`, `signal`, `retry` (of a subflow), or `turn`: it goes on in the next tick."""
    input: Any = None
    timer: bytes | None = None
    due: float | None = None
    key: str = ""
    """Of a signal: what it is called."""


@dataclass
class FlowState:
    """All that is remembered between two ticks."""

    frames: list[Frame] = field(default_factory=list)
    work: Calls | Wait | None = None
    steps: int = 0
    made: int = 0
    """Ids that were given out."""
    recorded: int = 0
    """Visits to nodes that were recorded."""
    signals: dict[str, Any] = field(default_factory=dict)
    """By key, the signals; waits in subflows find them here."""
    deciders: dict[str, tuple[str, float, str]] = field(default_factory=dict)
    """By key, who sent that, when, and why."""
    closing: list[bytes] = field(default_factory=list)
    """Tasks that were cancelled, and whose ends are pending."""
    is_over: bool = False
    """The flow has ended; the run ends when nothing of it is open."""
    error: str | None = None
    """Why it failed."""
    kept: Kept | None = None
    queued: dict[str, list[tuple[Any, str, float, str]]] = field(default_factory=dict)
    """By key, the signals that came after one that was not taken yet: value, sender, time, reason."""
    initial: dict[str, Any] | None = None
    """The shared state that the run was started with."""

    @property
    def shared(self) -> dict[str, Any]:
        """Return the shared state of the run."""
        return self.frames[0].shared if self.frames else self.initial or {}

    @property
    def cursor(self) -> str:
        """Return where the cursor stands: the key of a node, behind those of the nodes above it."""
        if len(self.frames) == 1:
            return self.frames[0].node
        return "/".join(frame.node for frame in self.frames if frame.node)

    @property
    def last_action(self) -> str:
        """Return the action that brought the cursor there."""
        return self.frames[0].last_action if self.frames else ""

    @property
    def has_ended(self) -> bool:
        """Say whether nothing is waited for any more, and the run has ended with it."""
        return self.is_over and not self.closing

    def to_plain(self) -> list[Any]:
        work: list[Any] | None = None
        if isinstance(self.work, Calls):
            calls = self.work
            running = [[identifier, position] for identifier, position in calls.running.items()]
            errors = [[position, error] for position, error in calls.errors.items()]
            work = ["calls", calls.input, calls.total, calls.first, calls.values, errors, running, calls.created]
            work += [calls.kept, calls.is_looked_up]
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
        """Return it as `to_plain` has written it."""
        frames, work, (steps, made, recorded), signals, deciders, closing, is_over, error = plain[:8]
        kept, queued = plain[8:10] if len(plain) > 8 else (None, {})
        initial = plain[10] if len(plain) > 10 else None
        found: Calls | Wait | None = None
        if work is not None and work[0] == "calls":
            _, given, total, first, values, errors, running, *rest = work
            found = Calls(given, total, first, values, dict(errors), {bytes(one): at for one, at in running}, *rest)
        elif work is not None:
            _, what, given, timer, due, key = work
            found = Wait(what, given, None if timer is None else bytes(timer), due, key)
        return cls(
            frames=[Frame(*frame) for frame in frames],
            work=found,
            steps=steps,
            made=made,
            recorded=recorded,
            signals=signals,
            deciders={key: (who[0], who[1], who[2]) for key, who in deciders.items()},
            closing=[bytes(one) for one in closing],
            is_over=is_over,
            error=error,
            kept=None if kept is None else Kept(*kept),
            queued={key: [(one[0], one[1], one[2], one[3]) for one in some] for key, some in queued.items()},
            initial=initial,
        )
