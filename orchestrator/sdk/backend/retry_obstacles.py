"""Why an ended task cannot be retried by itself."""

from __future__ import annotations

from orchestrator.domain.states import RunState
from orchestrator.store.runs.cancels import EndedIn


def retry_obstacle(task: str, run: EndedIn) -> str:
    """Describe why an ended task cannot be retried, and what to do instead; empty if it can."""
    if run.is_code and task == run.run:
        return (
            ": it represents a run of a workflow as code, which has ended. To run it again from the start: "
            f"orchestrator runs rerun {run.run}; to keep the work up to an event: orchestrator runs reset "
            f"{run.run} --to EVENT"
        )
    if run.is_code:
        return (
            ": the code of its run has already received its outcome. To run it again, reset the run to an "
            f"earlier event: orchestrator runs reset {run.run} --to EVENT"
        )
    if run.is_flow:
        return (
            " by itself: the flow of its run has already used its outcome. To resume a failed run at the node "
            f"that failed: orchestrator runs retry {run.run}"
        )
    if run.status == RunState.FAILED and run.is_whole:
        return (
            " by itself: its run has ended, and has timed out, has a limit of its workflow or is a step of "
            f"another run. Retry the run: orchestrator runs retry {run.run}"
        )
    hint = f"To run all of it again: orchestrator runs rerun {run.run}" if run.has_workflow else "Enqueue it again."
    if run.is_cancelled:
        return f": its run was cancelled. {hint}"
    if run.status not in (RunState.RUNNING, RunState.FAILED):
        return f": its run has ended ({run.status}) without it. {hint}"
    return ""
