"""What the steps of runs came to, as the expressions of other steps may name it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection

from orchestrator.domain import zoned
from orchestrator.domain.dag import StepState, step_output
from orchestrator.domain.scope import Budget, Scope
from orchestrator.domain.steps import StepProgram
from orchestrator.scheduler.planned import DagRun
from orchestrator.scheduler.recent import Recent
from orchestrator.store import dags
from orchestrator.store.dags import Key

_MOST_OUTPUTS = 200_000
"""Values that the steps of a run may read at once."""
_KEPT_BYTES = 16_000_000
"""Of outputs that are kept in memory for fan-outs that read them again and again."""
_decode = zoned.decode


class Outputs:
    """Reads outputs, and keeps those that are read again when more tasks of a fan-out are created."""

    def __init__(self, max_payload: int) -> None:
        self._max_payload = max_payload
        self._kept: Recent[Key, Any] = Recent(_KEPT_BYTES)

    def forget(self) -> None:
        """A tick failed: what ended in it may end otherwise."""
        self._kept.clear()

    def names(
        self,
        connection: Connection,
        wanted: Iterable[tuple[DagRun, int]],
        needs: Callable[[StepProgram], Iterable[int]] | None = None,
    ) -> dict[bytes, Scope]:
        """Return, by run, what expressions of these steps may name, as far as it `needs`; one query for all of them.

        Without `needs`, these steps themselves are named.
        """
        needed: dict[Key, tuple[DagRun, int]] = {}
        again: set[Key] = set()
        names: dict[bytes, Scope] = {}
        rooms: dict[bytes, int] = defaultdict(lambda: _MOST_OUTPUTS)
        for run, place in wanted:
            if run.id not in names:
                names[run.id] = Scope({"params": run.params, "run": run.info}, Budget(self._max_payload))
            for other in [place] if needs is None else needs(run.compiled.programs[place]):
                key = run.id, run.compiled.graph.steps[other].name
                if needs is not None and run.plan.fan(place) is not None:
                    again.add(key)
                if key in needed:
                    continue
                fan = run.plan.fan(other)
                number = fan.total if fan is not None else 1
                if number > rooms[run.id]:
                    names[run.id].unreadable[key[1]] = (
                        f"it has {number:,} values, and {_MOST_OUTPUTS:,} are the most that one step can read. "
                        f"Let its tasks keep their results elsewhere, or combine them in several steps"
                    )
                    continue
                rooms[run.id] -= number
                needed[key] = (run, other)
        self._read(connection, needed, again, names)
        return names

    def _read(
        self,
        connection: Connection,
        needed: dict[Key, tuple[DagRun, int]],
        again: set[Key],
        names: dict[bytes, Scope],
    ) -> None:
        of_tasks: list[Key] = []
        of_runs: list[Key] = []
        for key, (run, place) in needed.items():
            if key in self._kept:
                names[run.id][key[1]] = self._kept.get(key)
            else:
                (of_tasks if run.compiled.graph.steps[place].workflow is None else of_runs).append(key)
        found = dags.outputs(connection, of_tasks) if of_tasks else {}
        found |= dags.child_outputs(connection, of_runs) if of_runs else {}
        for key, results in found.items():
            run, place = needed[key]
            state = run.plan.step_state(place)
            try:
                value = step_output(state, run.plan.fan(place), results, _decode)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                names[run.id].unreadable[key[1]] = str(error)
                continue
            names[run.id][key[1]] = value
            if key in again and state is StepState.SUCCESS:
                self._kept.put(key, value, sum(len(result or b"") for _, result in results))
