"""Which workflow's code is running in this thread, if any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.sdk.code.inside import running

if TYPE_CHECKING:
    from orchestrator.sdk.code.flow import Flow


def current_flow() -> Flow | None:
    """Return the workflow whose code is running here."""
    flow: Flow | None = running.flow
    return flow


def enter_flow(flow: Flow | None) -> Flow | None:
    """Make this the workflow whose code is running here; return which one it was before."""
    before: Flow | None = running.flow
    running.flow = flow
    return before
