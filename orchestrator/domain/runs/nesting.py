"""How far runs may start runs."""

from __future__ import annotations

from typing import NamedTuple


class Nesting(NamedTuple):
    """The limits of a tree of runs that start each other."""

    depth: int = 100
    """Runs above a run."""
    descendants: int = 100_000
    """Runs below the first."""

    def too_deep(self, workflow: str, depth: int) -> str:
        """Say why a run of a workflow is not started."""
        return (
            f"A run of workflow {workflow!r} would be {depth:,} runs below the first, and at most {self.depth:,} are "
            f"allowed. Does it start itself without end? Else raise the setting max_depth."
        )

    def too_many(self, workflow: str) -> str:
        """Say why runs of a workflow are not started."""
        return (
            f"Runs of workflow {workflow!r} are not started: at most {self.descendants:,} are allowed below one run. "
            f"Does it start itself without end? Else raise the setting max_descendants."
        )
