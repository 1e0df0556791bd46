"""Events of a run of a flow, and the commands of its planner. Both are data, and the leader applies the commands."""

from __future__ import annotations

from typing import Any, NamedTuple

from orchestrator.domain.flow.definition import Exec, Node

# -- what happens


class Begun(NamedTuple):
    """The run begins."""


class CallEnded(NamedTuple):
    """A task of the run has ended."""

    id: bytes
    value: Any = None
    error: str | None = None
    """Why it has no value; None if it has."""


class TimerFired(NamedTuple):
    """A timer came due."""

    id: bytes


class Signalled(NamedTuple):
    """A signal arrived."""

    key: str
    value: Any
    by: str = ""
    why: str = ""


class Retried(NamedTuple):
    """A person lets a run go on that has failed."""


Event = Begun | CallEnded | TimerFired | Signalled | Retried

# -- what is to be done


class Call(NamedTuple):
    """Have a worker run something: a task."""

    id: bytes
    path: str
    """The node: its key, behind those of the nodes above it."""
    node: Node
    exec: Exec
    """Its executor: that of the branch or item, else that of the node."""
    position: int
    """Which branch or item it is."""
    of: int | None
    """Of how many; None where the node is only one."""
    input: Any
    params: dict[str, Any]


class CancelCalls(NamedTuple):
    """Cancel tasks whose results are not needed."""

    ids: list[bytes]


class StartTimer(NamedTuple):
    """Notify the run at this time."""

    id: bytes
    due: float


class CancelTimer(NamedTuple):
    id: bytes


class NodeRun(NamedTuple):
    """Keep for people what became of one visit to a node."""

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
    """The number of the first of its tasks."""
    calls: int
    """How many it had."""
    started: float


class End(NamedTuple):
    error: str | None
    """Why it failed; None if it succeeded."""


Command = Call | CancelCalls | StartTimer | CancelTimer | NodeRun | End
