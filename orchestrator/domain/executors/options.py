"""What a task may say to each executor: one type each, checked where a task is declared or a workflow is applied."""

from __future__ import annotations

from typing import ClassVar

import msgspec

OUTPUT_VARIABLE = "TASK_OUTPUT_PATH"
"""The variable that tells a container in which folder it leaves its output."""
_LATER = 10.0
"""Seconds; the worker that watches goes first, and says why."""


class ExecutorOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a task says to its executor. Constants: what differs from task to task is input."""

    executor: ClassVar[str]
    """The name under which files and tasks ask for it."""
    is_local: ClassVar[bool] = False
    """The work is done on the machine of whoever starts it, and only a worker there can watch it."""

    @property
    def wants(self) -> str:
        """What a worker must have: the executor itself, and perhaps something that only some workers have."""
        return self.executor

    @staticmethod
    def backstop(limit: float | None) -> float | None:
        """Return after how many seconds the other side may end the work by itself, if nobody of us has by then."""
        return None if limit is None else limit + _LATER

    def problems(self) -> list[tuple[str, str]]:
        """Return what types cannot say: the option, and what is wrong with it."""
        return []
