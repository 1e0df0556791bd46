"""Outputs of steps, for the expressions of other steps."""

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


class OutputCache(LruCache[Key, Any]):
    """A cache of outputs. Some are kept until no step waits for them, others as long as their run."""

    def __init__(self, max_weight: int) -> None:
        super().__init__(max_weight)
        self._passing: dict[bytes, dict[str, bool]] = {}
        """By run, the steps with cached outputs, and whether each is kept only until no step of the run waits."""

    def keep(self, key: Key, value: Any, weight: int, *, is_passing: bool) -> None:
        """Cache an output with its weight."""
        self.put(key, value, weight)
        self._passing.setdefault(key[0], {})[key[1]] = is_passing

    def keep_longer(self, key: Key) -> None:
        """Keep a cached output as long as its run."""
        self._passing[key[0]][key[1]] = False

    def drop_passing(self, run: bytes) -> None:
        """Drop the outputs cached only for waiting steps, because no step of the run waits anymore."""
        for step in [step for step, is_passing in self._passing.get(run, {}).items() if is_passing]:
            self.drop((run, step))

    def drop_run(self, run: bytes) -> None:
        for step in list(self._passing.get(run, ())):
            self.drop((run, step))

    def clear(self) -> None:
        """Clear the cache."""
        super().clear()
        self._passing.clear()

    def _dropped(self, key: Key) -> None:
        steps = self._passing.get(key[0])
        if steps is not None:
            steps.pop(key[1], None)
            if not steps:
                del self._passing[key[0]]


_MAX_OUTPUTS = 100_000
"""Values that steps of a run may read together, at most."""
_MAX_PAYLOADS = 20
"""Payloads of the largest allowed size that are read together, at most."""
_MAX_REFERENCES = 200_000
"""References to outputs by all steps that read together, at most. Repeated references count."""
_CACHE_BYTES = 16_000_000
"""Bytes of outputs cached for repeated reads, at least."""
_decode = timezones.decode


RunStep = tuple[DagRun, int]
"""A run and the index of one of its steps."""


@dataclass
class StepOutputs:
    """The outputs that steps may use, by run, as far as they can be read together."""

    names: dict[bytes, Scope]
    readable: list[RunStep] = field(default_factory=list)
    postponed: list[RunStep] = field(default_factory=list)
    """Steps for which there is no room now."""
    refused: list[tuple[RunStep, str]] = field(default_factory=list)
    """Steps that need more outputs than can ever be read together, with the reason."""


class Outputs:
    """Reads outputs, and caches those that are read again.

    A fan-out reads its inputs whenever more of its tasks are created. A single step reads them for its condition, for
    its task, and again in the next tick if this one has no room; its inputs are cached until no step of the run waits.
    """

    def __init__(self, max_payload: int) -> None:
        self._max_payload = max_payload
        self._max_bytes = _MAX_PAYLOADS * max_payload
        self._cache = OutputCache(max(_CACHE_BYTES, self._max_bytes))

    @property
    def keeps_any(self) -> bool:
        """Return whether any outputs are cached."""
        return len(self._cache) > 0

    def settled(self, run: bytes) -> None:
        """Drop outputs cached for waiting steps, because no step of the run waits for room anymore."""
        self._cache.drop_passing(run)

    def drop(self, run: bytes) -> None:
        """Drop the outputs of a run that has ended, or that starts nothing more."""
        self._cache.drop_run(run)

    def forget(self) -> None:
        """Clear the cache after a rollback, which may have undone the ends of steps."""
        self._cache.clear()

    def names(
        self,
        connection: Connection,
        run_steps: Iterable[RunStep],
        needs: Callable[[StepProgram], Iterable[int]] | None = None,
        *,
        results: Mapping[Key, bytes] = {},
        is_urgent: bool = False,
    ) -> StepOutputs:
        """Return the names that expressions of these steps may use, reading the outputs that each `needs` in one query.

        Without `needs`, the outputs are those of the steps themselves. With `is_urgent`, no step is postponed.
        `results` of tasks that ended in this transaction are not read again, except of fan-outs.
        """
        needed: dict[Key, RunStep] = {}
        reread: set[Key] = set()
        found = StepOutputs({})
        keys_by_step: list[tuple[RunStep, list[Key]]] = []
        rooms: dict[bytes, int] = defaultdict(lambda: _MAX_OUTPUTS)
        references = 0
        for run, step_index in run_steps:
            if references > _MAX_REFERENCES and not is_urgent:
                found.postponed.append((run, step_index))
                continue
            if run.id not in found.names:
                found.names[run.id] = Scope(
                    {"params": run.params, "run": run.info},
                    EvaluationBudget(self._max_payload),
                    sealed=set() if isinstance(run.params, dict) else {"params"},
                )
            keys: list[Key] = []
            for other in [step_index] if needs is None else needs(run.compiled.programs[step_index]):
                key = run.id, run.compiled.graph.steps[other].name
                references += 1
                if needs is not None and run.plan.fan(step_index) is not None:
                    reread.add(key)
                if key not in needed:
                    number = _values(run, other)
                    if number > rooms[run.id]:
                        found.names[run.id].unreadable[key[1]] = (
                            f"it has {number:,} values, and {_MAX_OUTPUTS:,} is the most that one step can read. Let "
                            f"its tasks keep their results elsewhere, or combine them in several steps"
                        )
                        continue
                    rooms[run.id] -= number
                    needed[key] = (run, other)
                keys.append(key)
            keys_by_step.append(((run, step_index), keys))
        results = {
            key: results[key] for key, (run, other) in needed.items() if key in results and run.plan.fan(other) is None
        }
        sizes = self._sizes(connection, {key: run_step for key, run_step in needed.items() if key not in results})
        sizes |= {key: len(result) for key, result in results.items()}
        read: set[Key] = set()
        total = 0
        for step, keys in keys_by_step:
            more = sum(sizes.get(key, 0) for key in keys if key not in read)
            if total and total + more > self._max_bytes and not is_urgent:
                found.postponed.append(step)
            elif more > self._max_bytes:
                found.refused.append((step, self._too_large(more)))
            else:
                total += more
                read.update(keys)
                found.readable.append(step)
        needed = {key: run_step for key, run_step in needed.items() if key in read}
        self._read(connection, needed, results, None if needs is None else reread, found.names)
        return found

    def _sizes(self, connection: Connection, needed: dict[Key, RunStep]) -> dict[Key, int]:
        """Return the sizes of outputs in bytes, or nothing if they are too few to matter."""
        unread = {key: run_step for key, run_step in needed.items() if key not in self._cache}
        if sum(_values(*run_step) for run_step in unread.values()) <= _MAX_PAYLOADS:
            return {}
        of_tasks, of_runs = _by_kind(unread)
        return dags.output_sizes(connection, of_tasks, of_runs)

    def _too_large(self, size: int) -> str:
        return (
            f"The outputs that it reads have {size:,} bytes together, and at most {self._max_bytes:,} can be read. "
            f"Let tasks return references to large data, or raise the setting max_payload."
        )

    def _read(
        self,
        connection: Connection,
        needed: dict[Key, RunStep],
        results: Mapping[Key, bytes],
        reread: set[Key] | None,
        names: dict[bytes, Scope],
    ) -> None:
        """Read outputs, or take them from the cache. Only outputs in `reread` are cached for the life of the run."""
        for key in needed:
            if key in self._cache:
                names[key[0]][key[1]] = self._cache.get(key)
                if reread and key in reread:
                    self._cache.keep_longer(key)
        found: dict[Key, Results] = {
            key: [(0, results[key])] for key in needed if key in results and key not in self._cache
        }
        of_tasks, of_runs = _by_kind(
            {key: run_step for key, run_step in needed.items() if key not in self._cache and key not in results}
        )
        found |= dags.outputs(connection, of_tasks) if of_tasks else {}
        found |= dags.child_outputs(connection, of_runs) if of_runs else {}
        for key, stored_results in found.items():
            run, step_index = needed[key]
            state = run.plan.step_state(step_index)
            before, stored = timezones.unopened.number, timezones.unopened.stored
            try:
                value = step_output(state, run.plan.fan(step_index), stored_results, _decode)
            except (msgspec.DecodeError, ValueError, RecursionError, Sealed) as error:
                names[run.id].unreadable[key[1]] = str(error)
                continue
            names[run.id][key[1]] = value
            if timezones.unopened.stored != stored:
                names[run.id].stored.add(key[1])
            if timezones.unopened.number != before:
                names[run.id].sealed.add(key[1])
            elif timezones.unopened.stored == stored and reread is not None and state is StepState.SUCCESS:
                weight = sum(len(result or b"") for _, result in stored_results)
                self._cache.keep(key, value, weight, is_passing=key not in reread)


def _values(run: DagRun, step_index: int) -> int:
    fan = run.plan.fan(step_index)
    return 1 if fan is None else fan.total


def _by_kind(needed: dict[Key, RunStep]) -> tuple[list[Key], list[Key]]:
    of_tasks: list[Key] = []
    of_runs: list[Key] = []
    for key, (run, step_index) in needed.items():
        (of_tasks if run.compiled.graph.steps[step_index].workflow is None else of_runs).append(key)
    return of_tasks, of_runs
