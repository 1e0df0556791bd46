"""Outputs of steps, as the expressions of other steps may name them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Connection

from orchestrator.domain import timezones
from orchestrator.domain.dag.scope import EvaluationBudget, Scope
from orchestrator.domain.dag.state import StepState, step_output
from orchestrator.domain.dag.steps import StepProgram
from orchestrator.scheduler.dag.planned import DagRun
from orchestrator.scheduler.runs.kinds import LruCache
from orchestrator.sealing import Sealed
from orchestrator.store.dag import plans as dags
from orchestrator.store.dag.plans import Key, Results


class KeptOutputs(LruCache[Key, Any]):
    """Outputs of which some are kept until all that waits for them has started, and others as long as their run."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._passing: dict[bytes, dict[str, bool]] = {}
        """By run, the steps whose outputs are kept, and which of them only until no step of the run waits."""

    def keep(self, key: Key, value: Any, weight: int, *, is_passing: bool) -> None:
        """Keep an output that weighs so much."""
        self.put(key, value, weight)
        self._passing.setdefault(key[0], {})[key[1]] = is_passing

    def keep_longer(self, key: Key) -> None:
        """Keep an output that is kept already as long as its run."""
        self._passing[key[0]][key[1]] = False

    def drop_passing(self, run: bytes) -> None:
        """No step of a run waits any more: forget what was kept for that."""
        for step in [step for step, is_passing in self._passing.get(run, {}).items() if is_passing]:
            self.drop((run, step))

    def drop_run(self, run: bytes) -> None:
        for step in list(self._passing.get(run, ())):
            self.drop((run, step))

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._passing.clear()

    def _dropped(self, key: Key) -> None:
        steps = self._passing.get(key[0])
        if steps is not None:
            steps.pop(key[1], None)
            if not steps:
                del self._passing[key[0]]


_MOST_OUTPUTS = 100_000
"""Values that the steps of a run may read at once."""
_MOST_PAYLOADS = 20
"""Of the largest size, how much is read at once."""
_MOST_NAMED = 200_000
"""How often outputs are named by all steps that read at once, whether they name the same ones or others."""
_KEPT_BYTES = 16_000_000
"""Of outputs that are kept in memory, because they are read again and again; or as much as can be read at once."""
_decode = timezones.decode


RunStep = tuple[DagRun, int]
"""A step of a run."""


@dataclass
class StepOutputs:
    """Outputs that expressions of steps may name, by run, as far as they can be read at once."""

    names: dict[bytes, Scope]
    readable: list[RunStep] = field(default_factory=list)
    late: list[RunStep] = field(default_factory=list)
    """Steps for which there is no room now."""
    refused: list[tuple[RunStep, str]] = field(default_factory=list)
    """Steps that want more than can ever be read at once, and why not."""


class Outputs:
    """Reads outputs, and keeps those that are read again.

    A fan-out reads when more of its tasks are created, so what it reads is kept. A step reads when its condition is
    evaluated, when its task is created, and again in the next tick if there is no room for it in this one; so what it
    reads is kept until no step of the run waits for that.
    """

    def __init__(self, max_payload: int) -> None:
        self._max_payload = max_payload
        self._most_bytes = _MOST_PAYLOADS * max_payload
        self._kept = KeptOutputs(max(_KEPT_BYTES, self._most_bytes))

    @property
    def keeps_any(self) -> bool:
        """Say whether outputs of any run are kept."""
        return len(self._kept) > 0

    def settled(self, run: bytes) -> None:
        """No step of a run waits for room."""
        self._kept.drop_passing(run)

    def drop(self, run: bytes) -> None:
        """A run has ended, or nothing more of it starts."""
        self._kept.drop_run(run)

    def forget(self) -> None:
        """A tick failed: what ended in it may end otherwise."""
        self._kept.clear()

    def names(
        self,
        connection: Connection,
        wanted: Iterable[RunStep],
        needs: Callable[[StepProgram], Iterable[int]] | None = None,
        *,
        known: Mapping[Key, bytes] = {},
        is_urgent: bool = False,
    ) -> StepOutputs:
        """Return what expressions of these steps may name, as far as it `needs`; one query for all of them.

        Without `needs`, these steps themselves are named. If it is urgent, no step is late. What has ended in this
        transaction is `known`, and not read again; but of a fan-out that is only one of many results.
        """
        needed: dict[Key, RunStep] = {}
        again: set[Key] = set()
        found = StepOutputs({})
        of_steps: list[tuple[RunStep, list[Key]]] = []
        rooms: dict[bytes, int] = defaultdict(lambda: _MOST_OUTPUTS)
        named = 0
        for run, place in wanted:
            if named > _MOST_NAMED and not is_urgent:
                found.late.append((run, place))
                continue
            if run.id not in found.names:
                found.names[run.id] = Scope(
                    {"params": run.params, "run": run.info},
                    EvaluationBudget(self._max_payload),
                    sealed=set() if isinstance(run.params, dict) else {"params"},
                )
            keys: list[Key] = []
            for other in [place] if needs is None else needs(run.compiled.programs[place]):
                key = run.id, run.compiled.graph.steps[other].name
                named += 1
                if needs is not None and run.plan.fan(place) is not None:
                    again.add(key)
                if key not in needed:
                    number = _values(run, other)
                    if number > rooms[run.id]:
                        found.names[run.id].unreadable[key[1]] = (
                            f"it has {number:,} values, and {_MOST_OUTPUTS:,} are the most that one step can read. "
                            f"Let its tasks keep their results elsewhere, or combine them in several steps"
                        )
                        continue
                    rooms[run.id] -= number
                    needed[key] = (run, other)
                keys.append(key)
            of_steps.append(((run, place), keys))
        known = {
            key: known[key] for key, (run, other) in needed.items() if key in known and run.plan.fan(other) is None
        }
        sizes = self._sizes(connection, {key: where for key, where in needed.items() if key not in known})
        sizes |= {key: len(result) for key, result in known.items()}
        read: set[Key] = set()
        total = 0
        for step, keys in of_steps:
            more = sum(sizes.get(key, 0) for key in keys if key not in read)
            if total and total + more > self._most_bytes and not is_urgent:
                found.late.append(step)
            elif more > self._most_bytes:
                found.refused.append((step, self._too_large(more)))
            else:
                total += more
                read.update(keys)
                found.readable.append(step)
        needed = {key: where for key, where in needed.items() if key in read}
        self._read(connection, needed, known, None if needs is None else again, found.names)
        return found

    def _sizes(self, connection: Connection, needed: dict[Key, RunStep]) -> dict[Key, int]:
        """Return how many bytes outputs have, unless they are so few that it does not matter."""
        unread = {key: where for key, where in needed.items() if key not in self._kept}
        if sum(_values(*where) for where in unread.values()) <= _MOST_PAYLOADS:
            return {}
        of_tasks, of_runs = _by_kind(unread)
        return dags.output_sizes(connection, of_tasks, of_runs)

    def _too_large(self, size: int) -> str:
        return (
            f"The outputs that it reads have {size:,} bytes together, and at most {self._most_bytes:,} can be read. "
            f"Let tasks return references to large data, or raise the setting max_payload."
        )

    def _read(
        self,
        connection: Connection,
        needed: dict[Key, RunStep],
        known: Mapping[Key, bytes],
        again: set[Key] | None,
        names: dict[bytes, Scope],
    ) -> None:
        """Read outputs, or take cached ones; only outputs that will be read `again` are cached."""
        for key in needed:
            if key in self._kept:
                names[key[0]][key[1]] = self._kept.get(key)
                if again and key in again:
                    self._kept.keep_longer(key)
        found: dict[Key, Results] = {key: [(0, known[key])] for key in needed if key in known and key not in self._kept}
        of_tasks, of_runs = _by_kind(
            {key: where for key, where in needed.items() if key not in self._kept and key not in known}
        )
        found |= dags.outputs(connection, of_tasks) if of_tasks else {}
        found |= dags.child_outputs(connection, of_runs) if of_runs else {}
        for key, results in found.items():
            run, place = needed[key]
            state = run.plan.step_state(place)
            before, stored = timezones.unopened.number, timezones.unopened.stored
            try:
                value = step_output(state, run.plan.fan(place), results, _decode)
            except (msgspec.DecodeError, ValueError, RecursionError, Sealed) as error:
                names[run.id].unreadable[key[1]] = str(error)
                continue
            names[run.id][key[1]] = value
            if timezones.unopened.stored != stored:
                names[run.id].stored.add(key[1])
            if timezones.unopened.number != before:
                names[run.id].sealed.add(key[1])
            elif timezones.unopened.stored == stored and again is not None and state is StepState.SUCCESS:
                weight = sum(len(result or b"") for _, result in results)
                self._kept.keep(key, value, weight, is_passing=key not in again)


def _values(run: DagRun, place: int) -> int:
    """Return how many values the output of a step has."""
    fan = run.plan.fan(place)
    return 1 if fan is None else fan.total


def _by_kind(needed: dict[Key, RunStep]) -> tuple[list[Key], list[Key]]:
    """Return which outputs are those of tasks, and which of child runs."""
    of_tasks: list[Key] = []
    of_runs: list[Key] = []
    for key, (run, place) in needed.items():
        (of_tasks if run.compiled.graph.steps[place].workflow is None else of_runs).append(key)
    return of_tasks, of_runs
