"""Events that a flow's planner handles, and the commands that it returns for the leader to apply."""

from __future__ import annotations

from typing import Any, NamedTuple

from orchestrator.domain.flow.definition import Exec, Node

# -- events


class Begun(NamedTuple):
    """The run started."""


class CallEnded(NamedTuple):
    """A task of the run ended."""

    id: bytes
    value: Any = None
    error: str | None = None
    """The error message. None if the task succeeded."""


class TimerFired(NamedTuple):
    """A timer is due."""

    id: bytes


class Signalled(NamedTuple):
    """A signal arrived."""

    key: str
    value: Any
    by: str = ""
    why: str = ""


class Retried(NamedTuple):
    """A user retries a failed run."""


Event = Begun | CallEnded | TimerFired | Signalled | Retried

# -- commands


class Call(NamedTuple):
    """Create a task for a worker."""

    id: bytes
    path: str
    """The node's path: its key after those of the nodes above it."""
    node: Node
    exec: Exec
    """The executor: that of the branch or item, else that of the node."""
    position: int
    """The index of the branch or item."""
    of: int | None
    """The number of branches or items. None if the node is a single call."""
    input: Any
    params: dict[str, Any]


class CancelCalls(NamedTuple):
    """Cancel tasks whose results are no longer needed."""

    ids: list[bytes]


class StartTimer(NamedTuple):
    """Notify the run at the time `due`."""

    id: bytes
    due: float


class CancelTimer(NamedTuple):
    id: bytes


class NodeRun(NamedTuple):
    """Record one visit to a node, for display."""

    number: int
    path: str
    kind: str
    status: str
    """success, failed or cancelled."""
    attempt: int
    action: str
    error: str | None
    input: Any
    output: Any
    first_call: int
    """The number of the visit's first task."""
    calls: int
    """The number of tasks."""
    started: float


class End(NamedTuple):
    error: str | None
    """The error message. None if the run succeeded."""


Command = Call | CancelCalls | StartTimer | CancelTimer | NodeRun | End
