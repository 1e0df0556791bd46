"""Checks that pulled work starts once while its holder lives and is heard, and that its end comes from its holder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tests.chaos.real.arena import Arena
from tests.chaos.real.checks.rows import shown, token_of
from tests.chaos.real.project.pulls import LEASE, pulled

_TOLERANCE = 0.5
"""Seconds by which a heartbeat may be applied before its holder sends the next one."""


@dataclass
class _Holder:
    request: str
    task: str
    queue_id: str
    began: float
    heard: list[float] = field(default_factory=list)
    ended: float = float("inf")
    outcome: str = ""

    def silence_at(self, moment: float) -> float:
        """Return the seconds since the last heartbeat before a moment."""
        return moment - max((at for at in (self.began, *self.heard) if at <= moment), default=self.began)


def check_pulls(arena: Arena, ended: dict[str, Any]) -> Iterator[str]:
    holders = _holders(arena)
    by_request: dict[str, list[_Holder]] = defaultdict(list)
    for holder in holders:
        by_request[holder.request].append(holder)
    for starts in by_request.values():
        for first, second in combinations(starts, 2):
            silence = first.silence_at(second.began)
            if second.began < first.ended and silence < LEASE - _TOLERANCE:
                yield (
                    f"pulled work {first.request} began again {second.began - first.began:.2f} s after its holder "
                    f"{first.queue_id}, which lived and had been heard {silence:.2f} s before, as {second.queue_id}"
                )
    cancelled = {task for (task,) in arena.journal.of_clients("cancel")}
    for holder in holders:
        row = ended.get(holder.task)
        is_own_result = row is not None and row["status"] == "success" and token_of(row["result"]) == holder.queue_id
        if holder.outcome == "200" and not is_own_result:
            yield f"{holder.queue_id} was told that its result is kept: {row and shown(row)}"
        if holder.outcome == "409" and not (
            is_own_result or holder.task in cancelled or _may_have_lost(holder, by_request)
        ):
            yield f"{holder.queue_id} was refused, and had been heard: {row and shown(row)}"
    queue_ids = {holder.queue_id for holder in holders}
    for task, row in ended.items():
        if row["name"] == pulled.name and row["status"] == "success" and token_of(row["result"]) not in queue_ids:
            yield f"task {task} has a result that nobody gave: {shown(row)}"
        if row["name"] == pulled.name and row["status"] == "failed":
            yield f"pulled task {task} failed without a reason: {shown(row)}"


def _may_have_lost(holder: _Holder, by_request: dict[str, list[_Holder]]) -> bool:
    """Return whether a holder may have lost its work: it was silent for a lease, or overlapped another holder."""
    other_holders = [other for other in by_request[holder.request] if other is not holder]
    moments = [holder.ended, *(other.began for other in other_holders if other.began > holder.began)]
    is_second = any(other.began < holder.began < other.ended for other in other_holders)
    return is_second or any(holder.silence_at(moment) >= LEASE - _TOLERANCE for moment in moments)


def _holders(arena: Arena) -> list[_Holder]:
    found = {
        queue_id: _Holder(request, task, queue_id, float(at))
        for request, task, queue_id, at in arena.journal.of_clients("pulled")
    }
    for queue_id, at in arena.journal.of_clients("heard"):
        found[queue_id].heard.append(float(at))
    for queue_id, at, outcome in arena.journal.of_clients("let-go"):
        found[queue_id].ended, found[queue_id].outcome = float(at), outcome
    return sorted(found.values(), key=lambda holder: holder.began)
